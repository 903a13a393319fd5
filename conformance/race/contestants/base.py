"""What a contestant is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..task import Task

Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Running:
    """A contestant that is built: `step(batch)` makes one update and gives its loss, which may still be on its way.

    `finish()` waits until every parameter is there; the clock stops after it. `backward(batch)` computes loss and
    gradients without an update, `forward(batch)` the loss alone; `decode(prompts, new)` continues (B, T) prompts
    greedily, with a cache, and gives (B, T + new) or the new tokens alone. What a library has no way for is None.
    """

    step: Callable[[Batch], Any]
    finish: Callable[[], None]
    backward: Callable[[Batch], Any] | None = None
    forward: Callable[[Batch], Any] | None = None
    decode: Callable[[np.ndarray, int], Any] | None = None


@dataclass(frozen=True)
class Contestant:
    """build(task) imports the framework, makes the model with the task's weights and its optimiser.

    requires: modules without which it is left out. framework and compiled name the class in which it is compared.
    architectures: of `task.ARCHITECTURES`, those that it can build exactly. offers: of "bfloat16", "remat", "decode",
    "devices": several of them.
    loss_tolerance: relative distance allowed to the reference's loss in the first updates; None is the task's own.
    environment: variables of its process, for libraries that read them at import.
    """

    name: str
    build: Callable[[Task], Running]
    requires: tuple[str, ...]
    note: str = ""
    framework: str = "numpy"
    compiled: bool = False
    ours: bool = False
    architectures: tuple[str, ...] = ("gpt",)
    offers: frozenset[str] = frozenset()
    loss_tolerance: float | None = None
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def group(self) -> str:
        """The class in which it races: framework, and eager or compiled where the framework has both."""
        return self.framework + (" compiled" if self.compiled else " eager" if self.framework == "torch" else "")

    def cannot(self, task: Task) -> str | None:
        """Why it has no place in a race on `task`, or None."""
        if task.architecture not in self.architectures:
            return f"does not build the {task.architecture} architecture"
        wanted = {task.precision: task.precision != "float32", "remat": task.remat, "decode": task.measure == "decode"}
        wanted["devices"] = task.devices > 1
        lacking = [what for what, asked in wanted.items() if asked and what not in self.offers]
        if lacking:
            return f"does not offer {' and '.join(lacking)}"
        if task.device not in {"numpy": ("cpu",), "torch": ("cpu", "cuda")}.get(self.framework, ("cpu", "cuda", "tpu")):
            return f"{self.framework} has no device {task.device!r}"
        return None
