"""`conformance race --devices N`: how the time of an update changes with the devices of the host that share it.

    strong: the same batch over more devices          speed-up = t(1) / t(n)
    weak:   n times the rows over n devices           speed-up = n t(1) / t(n)
    apart:  n runs of one device each at once         speed-up = n t(1) / t(n)
    efficiency = speed-up / n

Every number of devices of a kind takes turns with the others, so that speed-ups are of one run; losses of each are held
against the reference's while the clock runs. A device is `threads` processors; where there are fewer, devices share
them, and the row says so: it then shows what sharing costs, not how the layout scales. Runs that are apart send
nothing: what they lose, the machine's processors and memory lose, and no layout can do better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from core_numpy.contract.communication import step_communication, wire_bytes
from core_numpy.contract.parallel import AXES, Layout, check_layout, check_parallel_batch

from .contestants import all_contestants
from .figures import ratio_interval
from .judging import conclude, judge
from .lane import Lane, device_facts
from .machine import cores
from .racing import SCHEMA, Say, expectation, surroundings, take_turns
from .task import RECURRENT, Task

KINDS = ("strong", "weak", "apart")
# More processes than that on each processor measure the scheduler alone, and may not find one another within a minute.
MOST_ON_ONE = 8


def counts_of(most: int) -> list[int]:
    """1, 2, 4 and so on, and the largest itself."""
    return sorted({2**i for i in range(most.bit_length()) if 2**i <= most} | {most})


def tasks_of(base: Task, kind: str, axis: str, most: int) -> dict[int, Task]:
    """Number of devices -> task. ValueError where the model or its batch does not fall into so many parts."""
    found = {}
    for count in counts_of(most):
        batch = base.batch * (count if kind == "weak" else 1)
        task = base.replace(batch=batch, parallel={axis: count} if count > 1 and kind != "apart" else None)
        layout = Layout.of(task.parallel)
        check_layout(layout, task.model, task.train, layout.devices, "devices")
        check_parallel_batch(layout, task.model, {"tokens": np.empty((batch, task.length))}, 1)
        found[count] = task
    return found


def check_devices(most: int, axis: str, base: Task, threads: int | None) -> None:
    """Refuse what cannot be measured, before anybody starts."""
    limit = MOST_ON_ONE * max(cores() // (threads or 1), 1)
    if not 2 <= most <= limit:
        raise ValueError(
            f"devices must be at least 2 and at most {limit}, {MOST_ON_ONE} for each of the processors here "
            f"({cores()}, {threads or 1} a device); got {most}"
        )
    if axis not in AXES:
        raise ValueError(f"layout must be one of {', '.join(AXES)}; got {axis!r}")
    if base.measure != "step" or base.device != "cpu" or base.architecture in RECURRENT:
        raise ValueError(
            "devices are measured on whole updates of a transformer on devices of the host: --measure step and "
            f"--device cpu; got {base.measure}, {base.device} and {base.architecture}"
        )
    for kind in KINDS:
        tasks_of(base, kind, axis, most)


def able(names: Sequence[str], say: Say) -> list[str]:
    """Those of `names` that train on several devices; the others are said."""
    known = all_contestants()
    found = [name for name in names if "devices" in known[name].offers]
    if not found:
        offering = ", ".join(name for name, c in known.items() if "devices" in c.offers)
        raise ValueError(f"no chosen contestant trains on several devices; those that do: {offering}")
    others = [name for name in names if name not in found]
    if others:
        say(f"left out, one device each: {', '.join(others)}")
    return found


def scaling(
    base: Task,
    names: Sequence[str],
    *,
    devices: int,
    layout: str = "data",
    rounds: int,
    seconds: float,
    threads: int | None,
    timeout: float,
    say: Say,
) -> dict[str, Any]:
    """A document as `run` gives, with "scaling": {"axis", "cores", "threads", "rows"}.

    Each race is of one kind and one number of devices, "at". A row of "scaling" is one contestant's figures there.
    """
    check_devices(devices, layout, base, threads)
    chosen = able(names, say)
    facts = {name: device_facts(name, base, threads or 1, timeout)
             for name in dict.fromkeys(all_contestants()[name].framework for name in chosen)}  # fmt: skip
    place, peak = surroundings(base, threads or 1, facts)
    races: list[dict[str, Any]] = []
    document: dict[str, Any] = {"schema": SCHEMA, "environment": place, "races": races, "interrupted": False}
    for kind in KINDS:
        found, interrupted = _kind(
            kind, tasks_of(base, kind, layout, devices), chosen, rounds, seconds, threads or 1, timeout, peak, say
        )
        races += found
        if interrupted:
            document["interrupted"] = True
            break
    rows = [row for race in races for row in figures(race, races, threads or 1)]
    document["scaling"] = {"axis": layout, "cores": cores(), "threads": threads or 1, "rows": rows}
    return document


def _kind(
    kind: str,
    tasks: Mapping[int, Task],
    names: Sequence[str],
    rounds: int,
    seconds: float,
    threads: int,
    timeout: float,
    peak: float,
    say: Say,
) -> tuple[list[dict[str, Any]], bool]:
    """The races of one kind, one for each number of devices, run together in turns; and whether Ctrl-C ended them."""
    lanes = {
        (count, name): Lane(name, task, threads, timeout, copies=count if kind == "apart" else 1)
        for count, task in tasks.items()
        for name in names
    }
    expected: dict[int, Any] = {}

    def first() -> None:
        for count, task in tasks.items():
            # The reference has one device: of equal batches it need not be asked twice.
            known = next((n for n in expected if tasks[n].batch == task.batch), None)
            alone = task.replace(parallel=None)
            expected[count] = expectation(alone, names, threads, timeout, say) if known is None else expected[known]

    _, interrupted = take_turns(
        lanes, lambda key: f"{kind}, {_devices(key[0])}: {key[1]}", kind, rounds, seconds, say, first
    )
    races = []
    for count, task in tasks.items():
        rows = {name: lanes[count, name].row for name in names}
        judge(rows, {name: lanes[count, name].tolerance for name in names}, expected.get(count))
        share = min(count * threads, cores()) / threads
        found = {"task": task.to_dict(), "contestants": rows, **conclude(rows, task, peak * share)}
        races.append(found | {"at": count, "kind": kind})
    return races, interrupted


def _devices(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"


def figures(race: Mapping[str, Any], races: Sequence[Mapping[str, Any]], threads: int) -> list[dict[str, Any]]:
    """{"contestant", "kind", "devices", "rows", "median", "speedup", "low", "high", "efficiency", ...} of who finished.

    low, high: the speed-up's 95 % interval, rounds resampled in pairs with those of one device. sent: bytes that leave
    each device in an update, computed. shared: devices on each processor's place, 1 where each has its own.
    """
    count, kind = race["at"], race["kind"]
    alone = next(one for one in races if one["kind"] == kind and one["at"] == 1)
    grown = count if kind == "apart" else race["task"]["batch"] / alone["task"]["batch"]
    task = Task.from_spec(race["task"]["spec"])
    sent = step_communication(
        task.model, Layout.of(task.parallel), task.batch, task.length, itemsize=2 if task.precision != "float32" else 4
    )
    made = []
    for name, row in race["contestants"].items():
        other = alone["contestants"][name]
        if "median" not in row or "median" not in other:
            continue
        shared = min(len(row["rounds"]), len(other["rounds"]))
        ratio, low, high = ratio_interval(other["rounds"][:shared], row["rounds"][:shared])
        made.append({
            "contestant": name, "kind": kind, "devices": count, "rows": int(alone["task"]["batch"] * grown),
            "median": row["median"], "q1": row["q1"], "q3": row["q3"],
            "tokens_per_second": alone["task"]["tokens"] * grown / row["median"],
            "speedup": ratio * grown, "low": low * grown, "high": high * grown, "efficiency": ratio * grown / count,
            "sent": sum(wire_bytes(sent).values()), "shared": max(count * threads / cores(), 1.0),
            "loss_distance": row["loss_distance"],
        })  # fmt: skip
    return made


def sentences(found: Mapping[str, Any]) -> list[str]:
    """What the most devices gave that have processors of their own, by kind and contestant; what sharing means."""
    said = []
    own = [row for row in found["rows"] if row["shared"] == 1.0 and row["devices"] > 1]
    for kind, name in dict.fromkeys((row["kind"], row["contestant"]) for row in own):
        row = max((r for r in own if (r["kind"], r["contestant"]) == (kind, name)), key=lambda r: r["devices"])
        if kind == "apart":
            said.append(
                f"apart: {row['devices']} runs of {name} that send nothing do {row['speedup']:.2f} times the work of "
                f"one in the same time (95 % interval {row['low']:.2f} to {row['high']:.2f}): this machine has no more"
            )
            continue
        said.append(
            f"{kind}: {name} on {row['devices']} devices does {row['speedup']:.2f} times the work of one in the same "
            f"time (95 % interval {row['low']:.2f} to {row['high']:.2f}), {row['efficiency']:.0%} of the ideal"
        )
    shared = sorted({row["devices"] for row in found["rows"] if row["shared"] > 1.0})
    if shared:
        said.append(
            f"oversubscribed: {', '.join(map(str, shared))} devices share {found['cores']} processors; those rows show "
            "what sharing costs, not how the layout scales"
        )
    return said
