"""Faults of float32: operands, inputs or results in TF32 or bfloat16 on the way, float64 and half types right."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

import core_numpy as core

from .faults import Fault, Row, from_rows
from .naive import Naive, functions


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(x.dtype)


def to_tf32(x: np.ndarray) -> np.ndarray:
    """Float32's exponent and eleven bits of mantissa, the hidden one included."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.round(np.ldexp(mantissa, 11)), exponent - 11).astype(x.dtype)


class InputsBfloat16(Naive):
    def __init__(self, q: np.ndarray, k: np.ndarray, v: np.ndarray | None, **arguments: Any) -> None:
        super().__init__(q, k, v, **arguments)
        if self.dtype == np.float32:
            self.q, self.k = self.shorter(self.q), self.shorter(self.k)
            self.v = None if self.v is None else self.shorter(self.v)

    def shorter(self, x: np.ndarray) -> np.ndarray:
        return to_bfloat16(x)


class ProductsBfloat16(InputsBfloat16):
    """The weights too, before the second product."""

    def product(self, p: np.ndarray, seen: np.ndarray) -> np.ndarray:
        return super().product(self.shorter(p) if self.dtype == np.float32 else p, seen)


class ProductsTF32(ProductsBfloat16):
    def shorter(self, x: np.ndarray) -> np.ndarray:
        return to_tf32(x)


class OutputBfloat16(Naive):
    def give(self, name: str, value: np.ndarray) -> np.ndarray:
        given = super().give(name, value)
        return to_bfloat16(given) if name != "lse" and given.dtype == np.float32 else given


def _short(name: str) -> dict[str, Any]:
    """The reference's function on a float32 argument that was rounded to bfloat16."""

    def function(x: np.ndarray, *rest: Any, **named: Any) -> Any:
        return getattr(core, name)(to_bfloat16(x) if x.dtype == np.float32 else x, *rest, **named)

    return {name: function}


_KIND = "float32 rounded to bfloat16 under autocast"
_CONTRACT = "the contract is float32"
_ROWS: list[Row] = [
    ("products-tf32", "TF32 for float32 by default [jax 12008]",
     "subtle", functions(ProductsTF32), f"products of float32 are made in TF32, ten bits of mantissa; {_CONTRACT}"),
    ("products-bfloat16", "bfloat16 passes for float32 by default [jax 9973]",
     "subtle", functions(ProductsBfloat16), f"products of float32 are made in bfloat16; {_CONTRACT}"),
    ("inputs-bfloat16", _KIND,
     "subtle", functions(InputsBfloat16), f"q, k and v in float32 are rounded to bfloat16; {_CONTRACT}"),
    ("output-bfloat16", _KIND,
     "subtle", functions(OutputBfloat16), f"the result in float32 is rounded to bfloat16; {_CONTRACT}"),
    ("layer-norm-bfloat16", _KIND,
     "subtle", _short("layer_norm"), f"layer_norm rounds float32 to bfloat16; {_CONTRACT}"),
    ("rms-norm-bfloat16", _KIND,
     "subtle", _short("rms_norm"), f"rms_norm rounds float32 to bfloat16; {_CONTRACT}"),
    ("rotary-bfloat16", _KIND,
     "subtle", _short("apply_rotary"), f"apply_rotary rounds float32 to bfloat16; {_CONTRACT}"),
    ("gelu-bfloat16", _KIND,
     "subtle", _short("gelu"), f"gelu rounds float32 to bfloat16; {_CONTRACT}"),
    ("loss-bfloat16", _KIND,
     "subtle", _short("cross_entropy"), f"the loss rounds float32 logits to bfloat16; {_CONTRACT}"),
]  # fmt: skip


def faults() -> list[Fault]:
    return from_rows(_ROWS)
