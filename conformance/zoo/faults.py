"""What a planted fault is, and the module that has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

STRENGTHS = ("blatant", "subtle", "rare")


@dataclass(frozen=True)
class Fault:
    """functions: replacements by public name ("gradients.x_vjp" for a gradient). stands_for: the public kind of fault.

    strength: blatant (nearly every input shows it), subtle (small numbers, or few inputs), rare (only at certain
    sizes, dtypes or combinations). diagnosis: what to tell its owner, one sentence: what it does, and the contract.
    refusals: whether the fault is that something is not refused; for the others refusal rows say nothing.
    """

    id: str
    stands_for: str
    strength: str
    diagnosis: str
    functions: Callable[[], dict[str, Any]]
    refusals: bool = False


class Faulty:
    """core_numpy with some functions replaced; everything else is the reference's own."""

    def __init__(self, fault: Fault) -> None:
        import core_numpy
        from core_numpy import gradients

        replaced = fault.functions()
        self._core = core_numpy
        self.REFUSALS = fault.refusals
        self._replaced = {name: x for name, x in replaced.items() if not name.startswith("gradients.")}
        self.gradients = _Overlay(
            gradients, {name.split(".", 1)[1]: x for name, x in replaced.items() if name.startswith("gradients.")}
        )

    def __getattr__(self, name: str) -> Any:
        if name == "optimise" and "Trainer" in self._replaced:
            from .plain_trainer import optimise

            return optimise(self._replaced["Trainer"])
        if name == "available_kernels":  # one kernel, its own: nothing to multiply the rows by
            raise AttributeError(name)
        return self._replaced[name] if name in self._replaced else getattr(self._core, name)


class _Overlay:
    def __init__(self, below: Any, replaced: dict[str, Any]) -> None:
        self._below, self._replaced = below, replaced

    def __getattr__(self, name: str) -> Any:
        return self._replaced[name] if name in self._replaced else getattr(self._below, name)


# What these get wrong is that they do not refuse.
_REFUSALS = ("embed-clamps", "layer-dropout-no-key")

# Rows of a file's table: id, the public kind, strength, the changed function(s), diagnosis.
Row = tuple[str, str, str, dict[str, Any], str]


def from_rows(rows: list[Row]) -> list[Fault]:
    """A fault for each row of a table."""
    return [
        Fault(name, why, strength, says, given.copy, name in _REFUSALS) for name, why, strength, given, says in rows
    ]
