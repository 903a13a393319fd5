"""What a contestant is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..task import Task


@dataclass(frozen=True)
class Running:
    """A contestant that is built: `step(batch)` makes one update and gives its loss, which may still be on its way.

    `finish()` waits until every parameter is there; the clock stops after it.
    """

    step: Callable[[dict[str, np.ndarray]], Any]
    finish: Callable[[], None]


@dataclass(frozen=True)
class Contestant:
    """build(task) imports the framework, makes the model with the task's weights and its optimiser.

    requires: modules without which it is left out. loss_tolerance: relative distance allowed to the reference's loss in
    the first updates; None is the race's own, for float32.
    """

    name: str
    build: Callable[[Task], Running]
    requires: tuple[str, ...]
    note: str = ""
    loss_tolerance: float | None = None
