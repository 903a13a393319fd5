"""The rotation of a decoding step, where each operation costs more than its arithmetic: a third as many of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Tables(tuple[Tensor, Tensor]):
    """(cos, sin), each (T, r), that know their doubled form, each (T, 2r): cos twice, and -sin before sin."""

    doubled: tuple[Tensor, ...]

    @classmethod
    def of(cls, cos: Tensor, sin: Tensor) -> Tables:
        return cls._made((cos, sin), (torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)))

    def rows(self, begin: int, end: int) -> Tables:
        """Those of positions `begin` to `end` - 1."""
        return self._made((x[begin:end] for x in self), (x[begin:end] for x in self.doubled))

    @classmethod
    def _made(cls, pair: Iterable[Tensor], doubled: Iterable[Tensor]) -> Tables:
        tables = cls(pair)
        tables.doubled = tuple(doubled)
        return tables


def turns(tables: object, x: Tensor, size: int) -> bool:
    """Whether `turned` serves: one position, known tables in x's dtype, and every feature of a head is rotated."""
    if not isinstance(tables, Tables) or x.shape[1] != 1:
        return False
    cos = tables.doubled[0]
    return cos.shape[-1] == size and cos.dtype == x.dtype


def turned(q: Tensor, k: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
    """q (B, 1, H * D) and k (B, 1, G * D) by head and rotated by halves: (B, H, 1, D) and (B, G, 1, D).

    (a, b) becomes (a cos - b sin, b cos + a sin) = (a, b) (cos, cos) + (b, a) (-sin, sin).
    """
    cos, sin = tables.doubled
    size = cos.shape[-1]
    x = torch.cat([q, k], -1).unflatten(2, (-1, size)).transpose(1, 2)
    a, b = x.chunk(2, -1)
    y = torch.addcmul(x * cos, torch.cat([b, a], -1), sin)
    heads = q.shape[-1] // size
    return y[:, :heads], y[:, heads:]
