"""Copies of large arrays, and none where the original serves: aligned, in large pages, transposed in blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np


class Room:
    """Memory for arrays that are made one after the other and live together: `take` gives each the next piece.

    One piece of memory for a whole model, because the system hands out small ones page by page, at a fault each: of
    large ones it makes large pages where it has them. The first array that is taken asks for it.
    """

    def __init__(self, size: int) -> None:
        """`size`: bytes, each array's rounded up to a multiple of 64."""
        self._size, self._next = size, 0
        self._memory: np.ndarray | None = None

    def take(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        if self._memory is None:
            self._memory = np.empty(self._size + 63, np.uint8)
            self._next = -self._memory.ctypes.data % 64
        size = math.prod(shape) * dtype.itemsize
        begin, self._next = self._next, self._next + rounded_up(size)
        return self._memory[begin : begin + size].view(dtype).reshape(shape)

    @classmethod
    def of(cls, shapes: Iterable[tuple[int, ...]], dtype: Any) -> Room:
        """Room for arrays of these shapes."""
        return cls(sum(rounded_up(math.prod(shape) * np.dtype(dtype).itemsize) for shape in shapes))


def rounded_up(size: int) -> int:
    """The least multiple of 64, at which JAX takes memory as it is."""
    return -(-size // 64) * 64


def serves(x: np.ndarray, dtype: Any, *, order: str = "C", alignment: int = 1) -> bool:
    """Whether x may be used as it is: in `dtype`, its numbers close together in the order that `copied` would give.

    alignment: what x's address must be a multiple of, besides its dtype's own.
    """
    lies = x.flags.c_contiguous or (order == "K" and x.flags.f_contiguous)
    return x.dtype == np.dtype(dtype) and lies and x.flags.aligned and x.ctypes.data % alignment == 0


def copied(x: np.ndarray, dtype: Any, *, order: str = "C", room: Room | None = None) -> np.ndarray:
    """A copy of x in `dtype` that begins at a multiple of 64 bytes, in `room` or in memory of its own.

    order "C": the last axis lies closest; "K": a matrix that lies transposed in x does so in the copy, which is then
    as fast as reading.
    """
    dtype = np.dtype(dtype)
    turned = x.ndim == 2 and x.strides[0] == x.itemsize < x.strides[1]
    if turned and order == "K":
        return copied(x.T, dtype, room=room).T
    out = (Room.of([x.shape], dtype) if room is None else room).take(x.shape, dtype)
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
