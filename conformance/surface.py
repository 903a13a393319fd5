"""The public surface: the same names, with the same parameters, kinds and defaults, in the same order."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .compare import Disagreement, Tally
from .runner import Result, judged
from .targets.protocol import OURS, Target


@dataclass(frozen=True)
class Surface:
    """One public name; judged for our own packages, which promise all of them."""

    id: str
    name: str
    rules: tuple[str, ...] = ("surface",)
    function: str = "signature"


def public_names() -> list[str]:
    """The names that all three must offer: the reference's own list, less its hand-derived gradients."""
    import core_numpy

    return [name for name in core_numpy.__all__ if not name.endswith("_vjp")]


def shape_of(value: Any) -> list[tuple[str, str, Any]]:
    """Name, kind and default of each parameter; of a class, those of its constructor and of its call."""
    if inspect.isclass(value):
        own = inspect.signature(value.__init__).parameters
        rows = [(f"__init__.{p.name}", p.kind.name, p.default) for p in own.values() if p.name != "self"]
        call = getattr(value, "forward", None) or value.__dict__.get("__call__")
        if call is not None:
            inner = inspect.signature(call).parameters
            rows += [(f"call.{p.name}", p.kind.name, p.default) for p in inner.values() if p.name != "self"]
        return rows
    return [(p.name, p.kind.name, p.default) for p in inspect.signature(value).parameters.values()]


def run_surface(target: Target) -> Iterator[Result]:
    """One result per public name, for our own packages; others promise only what they offer."""
    if target.name not in OURS.values():
        return
    import core_numpy

    for name in public_names():
        reference = getattr(core_numpy, name)
        if not callable(reference):
            continue

        def work(tally: Tally, name: str = name, reference: Any = reference) -> None:
            mine = getattr(target.module, name, None)
            if mine is None:
                raise Disagreement(f"{target.name} lacks {name}")
            want, got = shape_of(reference), shape_of(mine)
            if got != want:
                raise Disagreement(f"{name} must take {want}; takes {got}")
            tally.add(name, 0.0)

        yield judged(Surface(f"signature-{name}", name), target, "float32", "auto", work)
