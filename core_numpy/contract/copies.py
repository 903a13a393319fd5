"""Copies of large arrays, and none where the original serves: aligned, in large pages, transposed in blocks."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from functools import cache
from typing import Any

import numpy as np

# From so many bytes on one call for the pages costs less than a fault for each.
LARGE = 1 << 18
# MADV_NOHUGEPAGE and, since Linux 5.14, MADV_POPULATE_WRITE.
_SMALL_PAGES, _POPULATE = 15, 23


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Memory of an array's own that begins at a multiple of 64 bytes, where JAX takes it as it is.

    One piece for a whole model would be new from the system at every load, and last as long as any of its arrays;
    smaller ones are handed out again.
    """
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + 63, np.uint8)
    begin = -memory.ctypes.data % 64
    if size >= LARGE:
        _ask_for_pages(memory)
    return memory[begin : begin + size].view(dtype).reshape(shape)


def _ask_for_pages(memory: np.ndarray) -> None:
    """Have Linux give the pages of new memory at once: one by one, at their first touch, they cost half as much again.

    NumPy asks for pages of 2 MiB. Those cost a fifth where there are some, but three times as much where the host of a
    virtual machine has to make them first. Where the system knows no such call, nothing happens. Source: madvise(2).
    """
    madvise = _madvise()
    if madvise is not None:
        first = -(-memory.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (memory.ctypes.data + memory.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
        madvise(first, size, _SMALL_PAGES)
        madvise(first, size, _POPULATE)


@cache
def _madvise() -> Any:
    """The system's call on Linux, or None."""
    if not sys.platform.startswith("linux"):
        return None
    found = getattr(ctypes.CDLL(None), "madvise", None)
    if found is not None:
        found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return found


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
