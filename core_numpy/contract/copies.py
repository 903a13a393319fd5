"""Copies of large arrays, and none where the original serves: aligned, in large pages, transposed in blocks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Memory of an array's own that begins at a multiple of 64 bytes, where JAX takes it as it is.

    One piece for a whole model would be new from the system at every load, and last as long as any of its arrays;
    smaller ones are handed out again.
    """
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + 63, np.uint8)
    begin = -memory.ctypes.data % 64
    return memory[begin : begin + size].view(dtype).reshape(shape)


def serves(x: np.ndarray, dtype: Any, *, order: str = "C", alignment: int = 1) -> bool:
    """Whether x may be used as it is: in `dtype`, its numbers close together in the order that `copied` would give.

    alignment: what x's address must be a multiple of, besides its dtype's own.
    """
    lies = x.flags.c_contiguous or (order == "K" and x.flags.f_contiguous)
    return x.dtype == np.dtype(dtype) and lies and x.flags.aligned and x.ctypes.data % alignment == 0


def copied(x: np.ndarray, dtype: Any, *, order: str = "C") -> np.ndarray:
    """A copy of x in `dtype` that begins at a multiple of 64 bytes.

    order "C": the last axis lies closest; "K": a matrix that lies transposed in x does so in the copy, which is then
    as fast as reading.
    """
    turned = x.ndim == 2 and x.strides[0] == x.itemsize < x.strides[1]
    if turned and order == "K":
        return copied(x.T, dtype).T
    out = empty(x.shape, dtype)
    if turned:
        _turn(x.T, out)
    else:
        np.copyto(out, x, casting="unsafe")
    return out


def _turn(x: np.ndarray, out: np.ndarray) -> None:
    """Put x (R, C) transposed into out (C, R), 64 rows at a time: NumPy would fetch a line of memory for each number.

    They go through a buffer whose rows are a line of the cache longer: the numbers of a column of x, where C is a power
    of two, would all have one place in the cache and push each other out.
    """
    rows, width = 64, x.shape[1]
    buffer = np.empty((rows, width + 64 // out.itemsize), out.dtype)
    for begin in range(0, len(x), rows):
        block = x[begin : begin + rows]
        near = buffer[: len(block), :width]
        np.copyto(near, block, casting="unsafe")
        out[:, begin : begin + rows] = near.T
