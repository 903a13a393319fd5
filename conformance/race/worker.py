"""A contestant in its own process: commands come as JSON lines on stdin, answers go as JSON lines to the old stdout.

    {"do": "probe", "framework": f, "device": d}         -> {"device": its name} or an error that says what there is
    {"do": "build", "contestant": name, "task": spec}    -> {"import": s, "build": s, "memory": {...}}
    {"do": "steps", "count": n}                          -> {"seconds": s for all n, "losses": [...], "memory": {...}}
    {"do": "turn", "count": n}                           -> the same for what the task measures
    {"do": "decoded"}                                    -> {"tokens": the new tokens of the task's prompts}
    {"do": "profile", "count": n, "rows": m}             -> {"rows": [...]}: see profile.py
    {"do": "peak", "framework": f, "device": d, "precision": p}    -> {"flops_per_second", "bytes_per_second"}
    {"do": "stop"}

A command that fails is answered with {"error": sentence}, and the process goes on listening.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from .contestants import Running, all_contestants
from .device import memory, peaks, probe, stopwatch
from .task import Task


def pin(threads: int | None, first: int = 0) -> None:
    """Keep to `threads` of the allowed processors: XLA has no other way to be told, and the rest obey it too.

    first: which of them is the first; where there are too few, those at the front serve once more.
    """
    if threads is not None and hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {allowed[(first + i) % len(allowed)] for i in range(threads)})


class Worker:
    def __init__(self) -> None:
        self.running: Running | None = None
        self.task = Task()
        self.framework = "numpy"
        self.batches: Iterator[dict[str, Any]] = iter(())

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        what = {name: value for name, value in command.items() if name != "do"}
        verbs: dict[str, Callable[..., dict[str, Any]]] = {
            "probe": probe, "build": self.build, "steps": self.steps, "turn": self.turn, "decoded": self.decoded,
            "profile": self.profile, "peak": peaks,
        }  # fmt: skip
        if command["do"] not in verbs:
            raise ValueError(f"unknown command {command['do']!r}")
        return verbs[command["do"]](**what)

    def build(self, contestant: str, task: dict[str, Any]) -> dict[str, Any]:
        entry, self.task = all_contestants()[contestant], Task.from_spec(task)
        self.framework = entry.framework
        start = time.perf_counter()
        for module in entry.requires:
            __import__(module)
        imported = time.perf_counter() - start
        before = memory(self.framework, self.task.device)
        start = time.perf_counter()
        self.running, self.batches = entry.build(self.task), self.task.batches()
        return {"import": imported, "build": time.perf_counter() - start, "memory": before}

    def _built(self, asked: str) -> Running:
        if self.running is None:
            raise ValueError(f"{asked} before build")
        return self.running

    def steps(self, count: int) -> dict[str, Any]:
        return self._time(self._built("steps").step, count, losses=True)

    def turn(self, count: int) -> dict[str, Any]:
        running, measure = self._built("turn"), self.task.measure
        if measure == "decode":
            if running.decode is None:
                raise ValueError("it has no way to decode")
            prompts, new, decode = self.task.prompts(), self.task.decoded, running.decode
            return self._time(lambda batch: decode(prompts, new), count, losses=False)
        function = {"step": running.step, "backward": running.backward, "forward": running.forward}[measure]
        if function is None:
            raise ValueError(f"it has no way to measure {measure!r}")
        return self._time(function, count, losses=measure == "step")

    def _time(self, function: Callable[[Any], Any], count: int, *, losses: bool) -> dict[str, Any]:
        given = list(itertools.islice(self.batches, count))  # made before the clock starts
        finish = self._built("turn").finish
        seconds, results = stopwatch(
            lambda: [function(batch) for batch in given], finish, self.framework, self.task.device
        )
        found = [float(loss) for loss in results] if losses else []
        return {"seconds": seconds, "losses": found, "memory": memory(self.framework, self.task.device)}

    def decoded(self) -> dict[str, Any]:
        """What it answers to the prompts: the last `task.decoded` columns."""
        running = self._built("decoded")
        if running.decode is None:
            raise ValueError("it has no way to decode")
        out = running.decode(self.task.prompts(), self.task.decoded)
        rows = out.tolist() if hasattr(out, "tolist") else list(out)
        return {"tokens": [[int(token) for token in row[-self.task.decoded :]] for row in rows]}

    def profile(self, count: int, rows: int) -> dict[str, Any]:
        from .profile import profiled

        running, given = self._built("profile"), list(itertools.islice(self.batches, count))

        def work() -> None:
            for batch in given:
                running.step(batch)
            running.finish()

        return {"rows": profiled(work, self.framework, self.task.device, count, rows)}


def main() -> None:
    threads = os.environ.get("RACE_THREADS")
    pin(int(threads) if threads else None, int(os.environ.get("RACE_FIRST", "0")))
    serve(Worker().answer)


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]], *, end_at_errors: bool = False) -> None:
    """Answer commands until `stop`, or until nobody is there to ask.

    end_at_errors: after the first error, so that others of a group that wait for this process see that it has gone.
    """
    # Libraries print to stdout as they like; answers go where only they can go.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "stop":
            return
        try:
            found = answer(command)
        except Exception as error:  # the answer says what happened; the parent decides
            import traceback

            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}
        answers.write(json.dumps(found) + "\n")
        answers.flush()
        if end_at_errors and "error" in found:
            return


if __name__ == "__main__":
    main()
