"""Which part of a whole batch this process computes. Random numbers and positions are those of the whole.

A trainer on several devices says it for the time of a step; nothing else sets it, and without it a process has
everything. It is global rather than a context variable because a backward pass may run in threads of torch's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Part:
    """first_row: of the rows here in the micro-batch. head, heads: the first head here, and how many there are in all.

    ring: the processes that share each row's positions (ring.Ring), or None. distance: the configuration and the table
    of a bias by distance, which a ring makes block by block. corner, whole: for a block of attention, its first query
    and key, and the numbers of all queries and keys.
    """

    first_row: int = 0
    head: int = 0
    heads: int | None = None
    ring: Any = None
    distance: tuple[Any, Tensor | None] | None = None
    corner: tuple[int, int] = (0, 0)
    whole: tuple[int, int] | None = None


_part: Part | None = None


def part() -> Part | None:
    """The part that is being computed, or None for all of it."""
    return _part


def move(here: Part | None) -> None:
    """From now on this part is computed, until the `placed` around it ends."""
    global _part
    _part = here


@contextmanager
def placed(here: Part) -> Iterator[None]:
    """Inside, what is computed is this part."""
    global _part
    before, _part = _part, here
    try:
        yield
    finally:
        _part = before


def placed_key(key: Tensor | None, H: int, T: int, S: int) -> Tensor | None:
    """A dropout key with the place of this call's weights (N, H, T, S) among all of them, which `weight_index` reads.

    In a tensor, because the backward pass has the key and not the part.
    """
    here = _part
    if key is None or here is None:
        return key
    heads, (T, S) = here.heads or H, here.whole or (T, S)
    words = [here.first_row, heads, here.head, T, here.corner[0], S, here.corner[1]]
    return torch.cat([key.to(torch.int64), torch.tensor(words, device=key.device)])


def weight_index(key: Tensor, n: Tensor, H: int, i: Tensor, j: Tensor, T: int, S: int) -> Tensor:
    """The row-major index (n, H, i, j) of attention weights among all (N, H, T, S) weights, for `kept`."""
    h: Tensor = torch.arange(H, device=n.device)
    sizes: tuple[Any, ...] = (H, T, S)
    if key.numel() > 2:
        row, heads, head, queries, query, keys, first = key[2:].to(n.device).unbind()
        n, h, i, j, sizes = n + row, h + head, i + query, j + first, (heads, queries, keys)
    rows = (n[:, None] * sizes[0] + h)[:, :, None] * sizes[1] + i
    return rows[..., None] * sizes[2] + j


def element_index(shape: torch.Size, device: torch.device) -> Tensor | None:
    """The row-major index of the elements of a (B, T, W) part among those of the whole; None where the part is all."""
    here = _part
    if here is None:
        return None
    B, T, W = shape
    rows = torch.arange(here.first_row, here.first_row + B, device=device)[:, None]
    columns, length = torch.arange(T, device=device), T
    if here.ring is not None:
        columns, length = here.ring.positions(device), here.ring.length
    return (rows * length + columns)[..., None] * W + torch.arange(W, device=device)
