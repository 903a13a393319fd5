"""Where the features of a rotary pair stand: what a rotation and its gradient share."""

from __future__ import annotations

import numpy as np


def over_heads(table: np.ndarray) -> np.ndarray:
    """(batch, T, r) -> (batch, 1, T, r) in float64; (T, r) stays."""
    return table.astype(np.float64) if table.ndim == 2 else table.astype(np.float64)[..., None, :, :]


def pairs(rotated: int, layout: str) -> tuple[slice, slice]:
    """Where the first and the second features of the pairs stand. Rules: encodings-6."""
    if layout == "half":
        return slice(0, rotated // 2), slice(rotated // 2, rotated)
    return slice(0, rotated, 2), slice(1, rotated, 2)


def rotary_order(size: int, rotated: int, source: str, target: str) -> np.ndarray:
    """Feature n of the target layout is feature order[n] of the source layout. Rules: encodings-8."""
    order = np.arange(size)
    places = np.arange(size)
    for here, there in zip(pairs(rotated, source), pairs(rotated, target), strict=True):
        order[there] = places[here]
    return order
