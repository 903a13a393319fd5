"""One contestant's process and its row of the table."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from .contestants import all_contestants, missing
from .device import variables
from .process import Process, WorkerFailed
from .task import Task
from .team import Team, started

# Compilers, allocators and thread pools settle in the first updates; the first of all is reported apart.
WARM_UP = 3
# The updates over which losses must agree; later ones drift apart as rounding does, in honest contestants too.
AGREEMENT_UPDATES = 8
MOST_STEPS_PER_TURN = 200


class Lane:
    """Prepared once, then asked for turns. A failure ends it and is written in its row."""

    def __init__(
        self,
        name: str,
        task: Task,
        threads: int | None,
        timeout: float,
        more: Mapping[str, str] | None = None,
        copies: int = 1,
    ) -> None:
        """more: variables of the contestant's process beside its own. copies: how many run at once, apart."""
        self.contestant = all_contestants()[name]
        self.tolerance = self.contestant.loss_tolerance or task.loss_tolerance
        self.task, self.threads, self.timeout = task, threads, timeout
        self.row: dict[str, Any] = {
            "status": "raced", "note": self.contestant.note, "framework": self.contestant.framework,
            "group": self.contestant.group, "ours": self.contestant.ours, "rounds": [], "losses": [],
        }  # fmt: skip
        self.process: Process | Team | None = None
        self.more, self.copies = dict(more or {}), copies
        self.count = 1

    def prepare(self, seconds: float) -> str:
        """Start, build, first update, warm-up, and what the task measures once more; says how it went."""
        unable, lacking = self.contestant.cannot(self.task), missing(self.contestant)
        if unable or lacking:
            self.row |= {"status": "skipped", "reason": unable or f"not installed: {', '.join(lacking)}"}
            return f"skipped, {self.row['reason']}"
        framework = variables(self.contestant.framework, self.task.device)
        more = {**dict(self.contestant.environment), **framework, **self.more}
        self.process = started(
            self.contestant.framework, self.task, self.threads, self.timeout, more, self.copies
        )  # fmt: skip
        built = self.ask({"do": "build", "contestant": self.contestant.name, "task": self.task.spec()})
        first = None if built is None else self.steps(1)
        warm = None if first is None else self.steps(WARM_UP)
        if self.task.measure != "step" and warm is not None:
            first, warm = self._prepare_measure()
        if built is None or first is None or warm is None:
            return f"failed, {self.row['reason']}"
        self.row |= {
            "import_seconds": built["import"], "build_seconds": built["build"], "first_step_seconds": first["seconds"],
            "memory_before": built["memory"].get("now"),
        }  # fmt: skip
        # As many updates as fill a turn, judged by the warm-up.
        self.count = int(min(max(round(seconds * WARM_UP / max(warm["seconds"], 1e-9)), 1), MOST_STEPS_PER_TURN))
        return f"ready, first {self.task.measure} {first['seconds']:.1f} s"

    def _prepare_measure(self) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """The updates that show agreement are made first, then the measured work is warmed up."""
        rest = self.steps(AGREEMENT_UPDATES - 1 - WARM_UP)
        first = None if rest is None else self.ask({"do": "turn", "count": 1})
        if first is not None and self.task.measure == "decode":
            said = self.ask({"do": "decoded"})
            self.row["decoded"] = None if said is None else said["tokens"]
        return first, None if first is None else self.ask({"do": "turn", "count": WARM_UP})

    def turn(self) -> None:
        answer = self.ask({"do": "turn", "count": self.count})
        if answer is not None:
            self.row["losses"].extend(answer["losses"])
            self.row["rounds"].append(answer["seconds"] / self.count)
            self.row["memory_peak"] = answer["memory"].get("peak")

    def steps(self, count: int) -> dict[str, Any] | None:
        """`count` updates outside of the clock."""
        answer = self.ask({"do": "steps", "count": count})
        if answer is not None:
            self.row["losses"].extend(answer["losses"])
        return answer

    def ask(self, command: dict[str, Any]) -> dict[str, Any] | None:
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


def reference(task: Task, threads: int | None, timeout: float) -> dict[str, Any]:
    """{"losses", "decoded"} of the reference on this task: float64, on the CPU, in a process of its own."""
    process = Process(threads=threads, timeout=timeout)
    try:
        process.ask({
            "do": "build", "contestant": "numpy",
            "task": task.replace(precision="float32", remat=False, device="cpu", parallel=None).spec(),
        })  # fmt: skip
        found = {"losses": process.ask({"do": "steps", "count": AGREEMENT_UPDATES})["losses"]}
        if task.measure == "decode":
            found["decoded"] = process.ask({"do": "decoded"})["tokens"]
        return found
    finally:
        process.close()


def device_facts(framework: str, task: Task, threads: int | None, timeout: float) -> dict[str, Any]:
    """{"device", "products", "flops_per_second", "bytes_per_second"} of the framework there, or {"error": why not}.

    The speeds are of its own matrix product and copy, with as many threads as the contestants get.
    """
    if importlib.util.find_spec(framework) is None:
        return {"error": f"{framework} is not installed"}
    process = Process(threads=threads, timeout=timeout, variables=variables(framework, task.device))
    try:
        there = process.ask({"do": "probe", "framework": framework, "device": task.device})
        asked = {"framework": framework, "device": task.device, "precision": task.precision}
        return there | process.ask({"do": "peak", **asked})
    except WorkerFailed as error:
        return {"error": str(error)}
    finally:
        process.close()
