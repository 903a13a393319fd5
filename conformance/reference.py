"""The reference called by the name of a function: its results and its hand-derived gradients as named arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from .functions import FUNCTIONS
from .inputs import Key

Arrays = dict[str, np.ndarray]


def reference() -> Any:
    import core_numpy

    return core_numpy


def native(arguments: dict[str, Any]) -> dict[str, Any]:
    """Keys made by the reference's own `key`; everything else as it is."""
    core = reference()
    return {name: core.key(x.seed) if isinstance(x, Key) else x for name, x in arguments.items()}


def call(function: str, arguments: dict[str, Any], module: Any = None) -> Arrays:
    """The reference's results as named float64 (or integer) arrays."""
    module = module or reference()
    spec = FUNCTIONS[function]
    rest = dict(native(arguments))
    positional = [rest.pop(name) for name in spec.positional if name in rest]
    with np.errstate(all="ignore"):
        got = getattr(module, function)(*positional, **rest)
    return named(function, got)


def named(function: str, got: Any) -> Arrays:
    results = FUNCTIONS[function].results
    values = got if isinstance(got, tuple | list) else (got,)
    return {name: np.asarray(value) for name, value in zip(results, values, strict=True)}


def pull_back(function: str, arguments: dict[str, Any], wrt: list[str], cotangents: Arrays) -> Arrays:
    """The reference's hand-derived gradients, by argument name."""
    from core_numpy import gradients

    spec = FUNCTIONS[function]
    rest = dict(native(arguments))
    positional = [rest.pop(name) for name in spec.positional if name in rest]
    vjp = getattr(gradients, f"{function}_vjp")
    with np.errstate(all="ignore"):
        got = vjp(*cotangents.values(), *positional, **rest)
    if not isinstance(got, dict):
        values = got if isinstance(got, tuple | list) else (got,)
        names = [name for name in spec.positional if name in spec.differentiable]
        got = dict(zip(names, values, strict=True))
    return {name: np.asarray(got[name]) for name in wrt}
