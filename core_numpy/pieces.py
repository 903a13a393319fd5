"""Formulas a piece at a time: the arrays that a formula makes on its way stay in a processor's cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

# Elements of a piece: 128 KiB of float64, of which a formula holds about five.
PIECE = 1 << 14


def by_element(f: Callable[..., Any], *arrays: np.ndarray) -> Any:
    """f(*arrays) of arrays of one shape, where f treats each element by itself; f gives an array or several."""
    return _by_piece(f, PIECE, *(x.reshape(-1) for x in arrays), lead=arrays[0].shape)


def by_row(f: Callable[..., Any], *arrays: np.ndarray) -> Any:
    """f(*arrays) of arrays (..., W), where f treats each row by itself: it gets (rows, W) and gives the like."""
    *lead, width = arrays[0].shape
    rows = (x.reshape(math.prod(lead), x.shape[-1]) for x in arrays)
    return _by_piece(f, max(1, PIECE // max(1, width)), *rows, lead=tuple(lead))


def _by_piece(f: Callable[..., Any], size: int, *arrays: np.ndarray, lead: tuple[int, ...]) -> Any:
    """f of `size` entries of the first axis at a time, put together; that axis becomes those of `lead`."""
    count = len(arrays[0])
    whole: list[np.ndarray] = []
    for first in range(0, max(count, 1), size):
        found = f(*(x[first : first + size] for x in arrays))
        parts = found if isinstance(found, tuple) else (found,)
        if count <= size:
            whole = list(parts)
            break
        whole = whole or [np.empty((count, *part.shape[1:]), part.dtype) for part in parts]
        for x, part in zip(whole, parts, strict=True):
            x[first : first + size] = part
    shaped = tuple(x.reshape(*lead, *x.shape[1:]) for x in whole)
    return shaped if isinstance(found, tuple) else shaped[0]
