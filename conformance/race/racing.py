"""The race itself: everybody warmed up, then in turns, losses compared while the clock runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .contestants import all_contestants, missing
from .figures import loss_distance, quartiles, ratio_interval, verdict
from .machine import environment
from .process import Process, WorkerFailed
from .task import SIZES, Task

SCHEMA = 1
# Compilers, allocators and thread pools settle in the first updates; the first of all is reported apart.
WARM_UP = 3
# The updates over which losses must agree; later ones drift apart as rounding does, in honest contestants too.
AGREEMENT_UPDATES = 8
# float32 against the float64 reference over those updates: torch and JAX measured 5e-8 to 8e-7 at tiny and small, and a
# wrong eps, a biased variance or the other GELU is 1e-4 and more.
LOSS_TOLERANCE = 1e-5
MOST_STEPS_PER_TURN = 200

Say = Callable[[str], None]


def run(
    sizes: Sequence[str] = ("tiny",),
    contestants: Sequence[str] | None = None,
    *,
    rounds: int = 10,
    seconds: float = 1.0,
    threads: int | None = None,
    timeout: float = 600.0,
    say: Say = lambda text: None,
) -> dict[str, Any]:
    """Race on each size; gives a document of plain JSON types: {"schema", "environment", "races": [...]}.

    In each round every contestant has one turn, in an order drawn anew, of as many updates as take about `seconds`.
    """
    known = all_contestants()
    chosen = list(known) if contestants is None else list(contestants)
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise ValueError(f"unknown contestant {', '.join(map(repr, unknown))}; known are {', '.join(known)}")
    if rounds < 1 or seconds <= 0:
        raise ValueError(f"rounds must be at least 1 and seconds above 0; got {rounds} and {seconds}")
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be at least 1; got {threads}")
    for size in sizes:
        if size not in SIZES:
            raise ValueError(f"size must be one of {', '.join(SIZES)}; got {size!r}")
    place = environment(threads)
    peak = measure_peak(threads, timeout)
    return {
        "schema": SCHEMA,
        "environment": {**place, "matmul_gflops": peak / 1e9},
        "races": [race(Task(size), chosen, rounds, seconds, threads, timeout, peak, say) for size in sizes],
    }


def measure_peak(threads: int | None, timeout: float) -> float:
    """The machine's float32 matrix product with as many threads as the contestants get, FLOPs per second."""
    process = Process(threads=threads, timeout=timeout)
    try:
        return float(process.ask({"do": "peak"})["flops_per_second"])
    finally:
        process.close()


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
    """One size: {"task", "contestants": {name: row}, "verdict"}."""
    rows: dict[str, dict[str, Any]] = {}
    lanes: dict[str, Lane] = {}
    try:
        for name in names:
            lane = Lane(name, task, threads, timeout)
            rows[name] = lane.row
            say(f"{task.size}: {name} {lane.prepare(seconds)}")
            if lane.row["status"] == "raced":
                lanes[name] = lane
        order = np.random.default_rng(0)
        for number in range(rounds):
            for name in order.permutation([name for name in lanes if lanes[name].row["status"] == "raced"]):
                lanes[name].turn()
            say(f"{task.size}: round {number + 1} of {rounds}")
    finally:
        for lane in lanes.values():
            lane.close()
    judge(rows, {name: lane.tolerance for name, lane in lanes.items()})
    return {"task": task.to_dict(), "contestants": rows, "verdict": conclude(rows, task, peak)}


class Lane:
    """One contestant's process and its row of the table."""

    def __init__(self, name: str, task: Task, threads: int | None, timeout: float) -> None:
        self.contestant = all_contestants()[name]
        self.tolerance = self.contestant.loss_tolerance or LOSS_TOLERANCE
        self.task, self.threads, self.timeout = task, threads, timeout
        self.row: dict[str, Any] = {"status": "raced", "note": self.contestant.note, "rounds": [], "losses": []}
        self.process: Process | None = None
        self.count = 1

    def prepare(self, seconds: float) -> str:
        """Start, build, first update, warm-up; says how it went."""
        lacking = missing(self.contestant)
        if lacking:
            self.row |= {"status": "skipped", "reason": f"not installed: {', '.join(lacking)}"}
            return f"skipped, {self.row['reason']}"
        self.process = Process(threads=self.threads, timeout=self.timeout)
        built = self._ask({"do": "build", "contestant": self.contestant.name, "size": self.task.size})
        first = None if built is None else self._steps(1)
        warm = None if first is None else self._steps(WARM_UP)
        if built is None or first is None or warm is None:
            return f"failed, {self.row['reason']}"
        self.row |= {"build_seconds": built["build"], "first_step_seconds": first["seconds"]}
        self.row["memory_before"] = built["memory"].get("now")
        # As many updates as fill a turn, judged by the warm-up.
        self.count = int(min(max(round(seconds * WARM_UP / max(warm["seconds"], 1e-9)), 1), MOST_STEPS_PER_TURN))
        return f"ready, first update {first['seconds']:.1f} s"

    def turn(self) -> None:
        answer = self._steps(self.count)
        if answer is not None:
            self.row["rounds"].append(answer["seconds"] / self.count)
            self.row["memory_peak"] = answer["memory"].get("peak")

    def _steps(self, count: int) -> dict[str, Any] | None:
        answer = self._ask({"do": "steps", "count": count})
        if answer is not None:
            self.row["losses"].extend(answer["losses"])
        return answer

    def _ask(self, command: dict[str, Any]) -> dict[str, Any] | None:
        if self.process is None:
            return None
        try:
            return self.process.ask(command)
        except WorkerFailed as error:
            self.row |= {"status": "failed", "reason": str(error)}
            self.close()
            return None

    def close(self) -> None:
        if self.process is not None:
            self.process.close()
            self.process = None


def judge(rows: dict[str, dict[str, Any]], tolerances: dict[str, float]) -> None:
    """Write each one's distance from the reference's losses; who is too far away is disqualified.

    The reference is "numpy" where it runs, else the first that does.
    """
    running = [name for name, row in rows.items() if row["status"] == "raced"]
    if not running:
        return
    reference = "numpy" if "numpy" in running else running[0]
    for name in running:
        row, losses = rows[name], rows[reference]["losses"]
        row["loss_reference"] = reference
        distance = loss_distance(row["losses"][:AGREEMENT_UPDATES], losses[:AGREEMENT_UPDATES])
        row["loss_distance"] = distance
        row["loss_distance_all"] = loss_distance(row["losses"], losses)
        if not distance <= tolerances[name]:
            row["status"] = "disqualified"
            row["reason"] = (
                f"its losses differ from {reference}'s by {distance:.1e} (relative) in the first {AGREEMENT_UPDATES} "
                f"updates; allowed are {tolerances[name]:.0e}"
            )


def conclude(rows: dict[str, dict[str, Any]], task: Task, peak: float) -> str:
    """Fill in the figures of everybody with rounds; gives the verdict over those who count."""
    times = {name: row["rounds"] for name, row in rows.items() if row["status"] == "raced" and row["rounds"]}
    fastest = min(times, key=lambda name: quartiles(times[name])[1]) if times else None
    for name, seconds in times.items():
        row = rows[name]
        low, middle, high = quartiles(seconds)
        row |= {"q1": low, "median": middle, "q3": high, "tokens_per_second": task.tokens / middle}
        row["share_of_peak"] = task.flops / middle / peak
        if row.get("memory_before") is not None and row.get("memory_peak") is not None:
            row["memory_growth"] = row["memory_peak"] - row["memory_before"]
        ratio, below, above = ratio_interval(seconds, times[fastest or name])
        row |= {"ratio": ratio, "ratio_low": below, "ratio_high": above}
    return verdict(times)
