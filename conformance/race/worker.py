"""A contestant in its own process: commands come as JSON lines on stdin, answers go as JSON lines to the old stdout.

    {"do": "build", "contestant": name, "size": size}    -> {"import_and_build": s, "memory": {...}}
    {"do": "steps", "count": n}                          -> {"seconds": s for all n, "losses": [...], "memory": {...}}
    {"do": "peak"}                                       -> {"flops_per_second": best of NumPy's float32 products}
    {"do": "stop"}

A command that fails is answered with {"error": sentence}, and the process goes on listening.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from .contestants import Running, all_contestants
from .task import Task


def pin(threads: int | None) -> None:
    """Keep to `threads` of the allowed processors: XLA has no other way to be told, and the rest obey it too."""
    if threads is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def memory() -> dict[str, float]:
    """Resident memory now and at its peak so far, in MiB; what the platform cannot say is left out."""
    found = {}
    try:
        import psutil

        found["now"] = psutil.Process().memory_info().rss / 2**20
    except ImportError:
        pass
    try:
        import resource
    except ImportError:  # Windows
        return found
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found["peak"] = peak / 2**20 if sys.platform == "darwin" else peak / 2**10
    return found


class Worker:
    def __init__(self) -> None:
        self.running: Running | None = None
        self.batches: Iterator[dict[str, Any]] = iter(())

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        if command["do"] == "build":
            return self.build(command["contestant"], command["size"])
        if command["do"] == "steps":
            return self.steps(command["count"])
        if command["do"] == "peak":
            return {"flops_per_second": matmul_peak()}
        raise ValueError(f"unknown command {command['do']!r}")

    def build(self, name: str, size: str) -> dict[str, Any]:
        contestant, task = all_contestants()[name], Task(size)
        for module in contestant.requires:
            __import__(module)
        before = memory()
        begin = time.perf_counter()
        self.running, self.batches = contestant.build(task), task.batches()
        return {"build": time.perf_counter() - begin, "memory": before}

    def steps(self, count: int) -> dict[str, Any]:
        if self.running is None:
            raise ValueError("steps before build")
        given = list(itertools.islice(self.batches, count))  # made before the clock starts
        self.running.finish()
        begin = time.perf_counter()
        losses = [self.running.step(batch) for batch in given]
        self.running.finish()
        seconds = time.perf_counter() - begin
        return {"seconds": seconds, "losses": [float(loss) for loss in losses], "memory": memory()}


def matmul_peak(n: int = 1024, repeats: int = 12) -> float:
    """FLOPs per second of NumPy's float32 matrix product, the best of some: a measure of the machine."""
    import numpy as np

    a = np.ones((n, n), np.float32)
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - begin)
    return 2.0 * n**3 / best


def main() -> None:
    # Libraries print to stdout as they like; answers go where only they can go.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    threads = os.environ.get("RACE_THREADS")
    pin(int(threads) if threads else None)
    worker = Worker()
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "stop":
            return
        try:
            found = worker.answer(command)
        except Exception as error:  # the answer says what happened; the parent decides
            import traceback

            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}
        answers.write(json.dumps(found) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
