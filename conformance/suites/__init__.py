"""Outside suites: cases that somebody else wrote, put to a target by `conformance run --suite NAME`.

A suite is a module of this package with `cases(level, pattern)`, which gives the selected ones as `OutsideCase`. What a
suite needs beyond NumPy it imports itself; where that is missing it raises ImportError with one sentence. TIMEOUT,
where a suite has it, is how many seconds a case may be silent. One suite is ours: layouts over devices, whose cases
start processes of their own.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..runner import Result
    from ..targets.protocol import Target

SUITES = {
    "onnx": "onnx_nodes",  # the node cases of the installed onnx package
    "minilm": "minilm",  # a trained sentence encoder against its home library
    "parallel": "parallel",  # training on two and four devices, every layout
}


class OutsideCase(ABC):
    """A case of an outside suite. function: the public name that it is about. rules: whose rules it tests."""

    id: str
    function: str
    rules: tuple[str, ...]

    @abstractmethod
    def judge(self, target: Target, level: str) -> Iterable[Result]:
        """The results, made by `runner.judged`, so that they have the form of ours."""


def load(name: str) -> Any:
    """The suite's module. Raises ImportError where what it needs is not installed."""
    return importlib.import_module(f".{SUITES[name]}", __package__)


def suite_timeout(name: str | None, default: float) -> float:
    """Seconds that one case of a suite may be silent."""
    return default if name is None else float(getattr(load(name), "TIMEOUT", default))
