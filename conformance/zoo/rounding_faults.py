"""Faults of the last rounding, each too small for the budget of any one element: results of half types that are cut,
always rounded up, or kept with one bit less. Only all elements together show them (`compare.check_together`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

import core_numpy as core

from .faults import Fault, Row, from_rows
from .naive import Naive, functions

_HALF = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
_BITS = {np.dtype(np.float16): 11, np.dtype(ml_dtypes.bfloat16): 8}


def _nearest_bits(x: np.ndarray, bits: int) -> np.ndarray:
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.round(np.ldexp(mantissa, bits)), exponent - bits)


def cut(x: np.ndarray, dtype: Any) -> np.ndarray:
    """Toward 0: what is left when the lower bits of a wider number are thrown away."""
    mantissa, exponent = np.frexp(x)
    bits = _BITS[np.dtype(dtype)]
    return np.ldexp(np.trunc(np.ldexp(mantissa, bits)), exponent - bits).astype(dtype)


def away(x: np.ndarray, dtype: Any) -> np.ndarray:
    """Away from 0 wherever anything is left over."""
    mantissa, exponent = np.frexp(x)
    bits, scaled = _BITS[np.dtype(dtype)], np.ldexp(mantissa, _BITS[np.dtype(dtype)])
    return np.ldexp(np.sign(scaled) * np.ceil(np.abs(scaled)), exponent - bits).astype(dtype)


def shorter(x: np.ndarray, dtype: Any) -> np.ndarray:
    """To nearest, with one bit less than the type has."""
    return _nearest_bits(x, _BITS[np.dtype(dtype)] - 1).astype(dtype)


def _ends_with(name: str, last: Callable[[np.ndarray, Any], np.ndarray]) -> dict[str, Any]:
    """The reference's function in float64, with another last rounding for half types."""

    def function(x: np.ndarray, *rest: Any, **named: Any) -> np.ndarray:
        if x.dtype not in _HALF:
            return getattr(core, name)(x, *rest, **named)
        return last(getattr(core, name)(x.astype(np.float64), *rest, **named), x.dtype)

    return {name: function}


class OutputCut(Naive):
    def give(self, name: str, value: np.ndarray) -> np.ndarray:
        if name == "lse" or self.dtype not in _HALF:
            return super().give(name, value)
        return cut(value[0] if self.flat else value, self.dtype)


_CUT = "half types are cut toward 0; the contract is one rounding to nearest"
_ROWS: list[Row] = [
    ("softmax-cut", "bfloat16 made by dropping the lower half of a float32 [tensorflow bfloat16]",
     "subtle", _ends_with("softmax", cut), f"softmax: {_CUT}"),
    ("layer-norm-cut", "bfloat16 made by dropping the lower half of a float32",
     "subtle", _ends_with("layer_norm", cut), f"layer_norm: {_CUT}"),
    ("rms-norm-cut", "bfloat16 made by dropping the lower half of a float32",
     "subtle", _ends_with("rms_norm", cut), f"rms_norm: {_CUT}"),
    ("gelu-cut", "bfloat16 made by dropping the lower half of a float32",
     "subtle", _ends_with("gelu", cut), f"gelu: {_CUT}"),
    ("rotary-cut", "bfloat16 made by dropping the lower half of a float32",
     "subtle", _ends_with("apply_rotary", cut), f"apply_rotary: {_CUT}"),
    ("silu-away", "rounding up where it should be to nearest",
     "subtle", _ends_with("silu", away),
     "silu: half types are rounded away from 0; the contract is one rounding to nearest"),
    ("rms-norm-shorter", "a table or conversion with one bit less than the type",
     "subtle", _ends_with("rms_norm", shorter),
     "rms_norm: half types are given with one bit less than they have; the contract is one rounding to nearest"),
    ("gelu-shorter", "a table or conversion with one bit less than the type",
     "subtle", _ends_with("gelu", shorter),
     "gelu: half types are given with one bit less than they have; the contract is one rounding to nearest"),
]  # fmt: skip


def faults() -> list[Fault]:
    says = f"attention: {_CUT}"
    kind = "bfloat16 made by dropping the lower half of a float32"
    return [*from_rows(_ROWS), Fault("output-cut", kind, "subtle", says, partial(functions, OutputCut))]
