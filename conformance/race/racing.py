"""The race itself: everybody warmed up, then in turns, losses compared while the clock runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from .contestants import all_contestants
from .judging import conclude, judge
from .lane import AGREEMENT_UPDATES, Lane, device_facts, reference
from .machine import environment
from .process import WorkerFailed
from .task import ARCHITECTURES, DEVICES, MEASURES, PRECISIONS, RECURRENT, SIZES, Task

# Of the documents that `run` gives. 2: several architectures, devices and measures.
SCHEMA = 2
# NumPy in float64 reaches so many FLOPs a second at the least; where it would take minutes, nobody waits for it.
REFERENCE_SPEED, MOST_REFERENCE_SECONDS = 5e9, 240.0
DEFAULT = ("numpy", "torch", "torch-compiled", "jax")

Say = Callable[[str], None]
K = TypeVar("K")


def run(
    sizes: Sequence[str] = ("tiny",),
    contestants: Sequence[str] | None = None,
    *,
    rounds: int = 10,
    seconds: float = 1.0,
    threads: int | None = None,
    timeout: float = 600.0,
    say: Say = lambda text: None,
    architectures: Sequence[str] | None = None,
    precision: str = "float32",
    remat: bool = False,
    measure: str = "step",
    device: str = "cpu",
) -> dict[str, Any]:
    """Race on each size; gives a document of plain JSON types: {"schema", "environment", "races": [...]}.

    In each round every contestant has one turn, in an order drawn anew, of as many updates as take about `seconds`.
    contestants: names; None is ours. architectures: None is "gpt", and that of each contestant that builds another
    only. Ctrl-C ends the race that runs and those after it, and what was measured is given, with "interrupted".
    """
    chosen = list(DEFAULT) if contestants is None else list(contestants)
    check(sizes, chosen, rounds, seconds, threads, architectures, precision, measure, device)
    tasks = [
        Task(size, name, precision=precision, remat=remat, measure=measure, device=device)
        for size in sizes
        for name in (architectures or needed(chosen))
    ]
    return run_tasks(tasks, chosen, rounds=rounds, seconds=seconds, threads=threads, timeout=timeout, say=say)


def run_tasks(
    tasks: Sequence[Task],
    names: Sequence[str],
    *,
    rounds: int,
    seconds: float,
    threads: int | None,
    timeout: float,
    say: Say,
    label: str = "",
    facts: dict[str, dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """`run` on tasks that are made already: of one device and one precision.

    label: what `say` says first. facts: framework -> `lane.device_facts`, where they are known already.
    """
    frameworks = dict.fromkeys(all_contestants()[name].framework for name in names)
    found = facts or {name: device_facts(name, tasks[0], threads, timeout) for name in frameworks}
    place, peak = surroundings(tasks[0], threads, found)
    document: dict[str, Any] = {"schema": SCHEMA, "environment": place, "races": [], "interrupted": False}
    for task in tasks:
        able = [name for name in names if task.architecture in all_contestants()[name].architectures]
        one = race(task, able, rounds, seconds, threads, timeout, peak, lambda text: say(label + text))
        document["races"].append(one)
        if one.pop("interrupted"):
            document["interrupted"] = True
            break
    return document


def surroundings(
    task: Task, threads: int | None, facts: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, Any], float]:
    """What stands beside the figures, and the fastest matrix product; ValueError where nobody has the device."""
    there = {name: found for name, found in facts.items() if "error" not in found}
    if not there and task.device != "cpu":
        said = "; ".join(found["error"] for found in facts.values())
        raise ValueError(f"no chosen contestant can run on device {task.device!r}: {said}")
    flops, moved = (
        max((found[what] for found in there.values()), default=0.0) for what in ("flops_per_second", "bytes_per_second")
    )
    place = environment(threads)
    return place | {
        "device": task.device, "precision": task.precision, "matmul_gflops": flops / 1e9, "gbytes": moved / 1e9,
        "devices": {name: dict(found) for name, found in facts.items()},
    }, flops  # fmt: skip


def check(
    sizes: Sequence[str],
    names: Sequence[str],
    rounds: int,
    seconds: float,
    threads: int | None,
    architectures: Sequence[str] | None,
    precision: str,
    measure: str,
    device: str,
) -> None:
    """Refuse what cannot be raced, before anybody starts."""
    known = all_contestants()
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        came = ", ".join(map(repr, unknown)) or "none at all"
        raise ValueError(f"unknown contestant {came}; known are {', '.join(known)}")
    if rounds < 1 or not seconds > 0:
        raise ValueError(f"rounds must be at least 1 and seconds above 0; got {rounds} and {seconds}")
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be at least 1; got {threads}")
    for what, given, allowed in (
        ("size", sizes, SIZES), ("architecture", architectures or (), ARCHITECTURES),
        ("precision", [precision], PRECISIONS), ("measure", [measure], MEASURES), ("device", [device], DEVICES),
    ):  # fmt: skip
        for value in given:
            if value not in allowed:
                raise ValueError(f"{what} must be one of {', '.join(allowed)}; got {value!r}")


def needed(names: Sequence[str], alone: bool = False) -> list[str]:
    """Those of whoever cannot build "gpt", and "gpt" where it makes a race or there is nothing else.

    alone: "gpt" also where one contestant has it to itself, as in a sweep, whose curves are compared across races.
    """
    known = all_contestants()
    first = [name for name in names if "gpt" in known[name].architectures]
    wanted = {known[name].architectures[0] for name in names if name not in first}
    if len(first) > 1 or not wanted or (alone and first):
        wanted.add("gpt")
    return [name for name in ARCHITECTURES if name in wanted]


def race(
    task: Task,
    names: Sequence[str],
    rounds: int,
    seconds: float,
    threads: int | None,
    timeout: float,
    peak: float,
    say: Say,
) -> dict[str, Any]:
    """One task: {"task", "contestants": {name: row}, "verdict", "notes", "interrupted"}."""
    expected: dict[str, Any] = {}

    def first() -> None:
        expected["all"] = expectation(task, names, threads, timeout, say)

    lanes = {name: Lane(name, task, threads, timeout) for name in names}
    begun, interrupted = take_turns(
        lanes, lambda name: f"{task.title}: {name}", task.title, rounds, seconds, say, first
    )
    rows = {name: lanes[name].row for name in begun}
    judge(rows, {name: lanes[name].tolerance for name in begun}, expected.get("all"))
    return {"task": task.to_dict(), "contestants": rows, **conclude(rows, task, peak), "interrupted": interrupted}


def take_turns(
    lanes: Mapping[K, Lane],
    named: Callable[[K], str],
    title: str,
    rounds: int,
    seconds: float,
    say: Say,
    first: Callable[[], None],
) -> tuple[list[K], bool]:
    """`first()`, then everybody is prepared, then in each round everybody has one turn, in an order drawn anew.

    Gives those whom preparing came to, and whether Ctrl-C ended it all. Their processes are ended in any case.
    """
    begun: list[K] = []
    try:
        first()
        for key, lane in lanes.items():
            begun.append(key)
            say(f"{named(key)} {lane.prepare(seconds)}")
        order = np.random.default_rng(0)
        for number in range(rounds):
            running = [lane for lane in lanes.values() if lane.row["status"] == "raced"]
            for i in order.permutation(len(running)):
                running[i].turn()
            say(f"{title}: round {number + 1} of {rounds}")
    except KeyboardInterrupt:
        say(f"{title}: interrupted; what was measured so far stays")
        return begun, True
    finally:
        for lane in lanes.values():
            lane.close()
    return begun, False


def expectation(
    task: Task, names: Sequence[str], threads: int | None, timeout: float, say: Say
) -> dict[str, Any] | None:
    """What the reference gives, where it does not race itself; None where there is no reference to give it."""
    if task.architecture in RECURRENT or ("numpy" in names and task.precision == "float32" and task.device == "cpu"):
        return None
    if task.replace(measure="step").flops * AGREEMENT_UPDATES / REFERENCE_SPEED > MOST_REFERENCE_SECONDS:
        say(f"{task.title}: too much work for the float64 reference; the first contestant's losses take its place")
        return None
    say(f"{task.title}: the reference's losses, in float64")
    try:
        return reference(task, threads, timeout)
    except WorkerFailed as error:
        say(f"{task.title}: no reference: {error}")
        return None
