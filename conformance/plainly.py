"""Attention in a half type the plain way: every step's result rounded to the type, as eager frameworks do.

Its own error is the second yardstick for half types, as in FlashAttention's tests: whoever computes in float32 inside
has no reason to be further off than twice this.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .budget import OUTPUT, SUBNORMAL, UNIT
from .compare import Tally
from .inputs import DTYPES
from .reference import native
from .zoo.naive import Naive

# FlashAttention's own factor.
TWICE = 2.0


class EveryStepRounded(Naive):
    """The plain second implementation, with a rounding behind each step; products add up in float32."""

    def step(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(x).astype(self.half).astype(np.float32)

    def __init__(self, *arrays: Any, half: str, **arguments: Any) -> None:
        self.half = DTYPES[half]
        super().__init__(*arrays, **arguments)

    def wide(self, x: np.ndarray) -> np.ndarray:
        return x.astype(np.float32)

    def raw(self) -> np.ndarray:
        return self.step(np.float32(self.scale()) * self.step(self.q @ np.swapaxes(self.k, -1, -2)))

    def capped(self, s: np.ndarray) -> np.ndarray:
        return self.step(super().capped(s))

    def biased(self, s: np.ndarray) -> np.ndarray:
        return self.step(super().biased(s))

    def softmax(self, s: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        p, lse = super().softmax(s, seen)
        return self.step(p), lse

    def dropped(self, p: np.ndarray) -> np.ndarray:
        return self.step(super().dropped(p))

    def product(self, p: np.ndarray, seen: np.ndarray) -> np.ndarray:
        assert self.v is not None
        return self.step(p @ self.v)


def plain_output(arguments: dict[str, Any], half: str) -> np.ndarray:
    """The output of attention the plain way, on arguments that were rounded to the half type."""
    given = {name: x for name, x in native(arguments).items() if name != "kernel"}
    arrays = [given.pop(name) for name in ("q", "k", "v")]
    call = EveryStepRounded(*arrays, half=half, **given)
    return call.give("out", call.result()["out"]).astype(np.float64)


def check_beside_plain(tally: Tally, got: np.ndarray, want: np.ndarray, plain: np.ndarray, half: str) -> float:
    """max |got - want| <= 2 max |plain - want| + 3 u max |want|, over what is finite in all three.

    The last term is a rounding of the largest element, with the room that it has element by element: where the plain
    way happens to be exact, a right result still rounds once.
    """
    finite = np.isfinite(want) & np.isfinite(plain) & np.isfinite(np.asarray(got, dtype=np.float64))
    if not finite.any():
        return 0.0
    error = np.abs(np.asarray(got, dtype=np.float64) - want)[finite].max()
    limit = TWICE * np.abs(plain - want)[finite].max() + OUTPUT * UNIT[half] * np.abs(want)[finite].max()
    limit = limit + 2.0 * SUBNORMAL[half] if limit else 0.0
    share = float(error / limit) if limit else 0.0
    tally.add("out beside the plain way in the half type", share)
    return share
