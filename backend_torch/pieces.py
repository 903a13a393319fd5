"""What a structured call leaves to compute: rectangles of queries and keys, empty ones left out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from .visibility import Visibility

# A run of one segment becomes a piece of its own when runs are this long on average; shorter ones share blocks.
SHORT_RUN = 32


@dataclass(frozen=True)
class Piece:
    """Batch elements n, queries q and keys k, each (start, stop), and what is masked in it.

    kind: "full" nothing is, "diagonal" exactly the keys after the query's own place in the piece are, "mask" look
    at every pair. Keys outside the pieces of a query are all masked; a query in no piece may attend to none.
    """

    n: tuple[int, int]
    q: tuple[int, int]
    k: tuple[int, int]
    kind: str


@dataclass(frozen=True)
class _Row:
    """The restrictions of one batch element on the host; None for what cannot be read or differs within n."""

    n: tuple[int, int]
    see: Visibility
    offset: int | None
    length: int
    hidden: bool  # something else than band and length masks pairs
    ids: np.ndarray | None
    keys: dict[int, tuple[int, int, bool]] | None  # segment -> first key, past the last key, whether unbroken


def pieces(see: Visibility, N: int, T: int, S: int, rows: int, *, whole: bool) -> Iterator[Piece]:
    """The pieces of a call, at most `rows` queries each; whole: unmasked and diagonal ones may be longer."""
    for row in _rows(see, N, S):
        for start, stop in _runs(row, T):
            piece = _piece(row, start, stop)
            if piece is None:
                continue
            if whole and piece.kind != "mask":
                yield piece
                continue
            for first in range(start, stop, rows):
                piece = _piece(row, first, min(first + rows, stop))
                if piece is not None:
                    yield piece


def _rows(see: Visibility, N: int, S: int) -> Iterator[_Row]:
    masked = see.mask is not None or see.bias is not None
    if not see.ragged:
        yield _Row((0, N), see, int(see.offset), S, masked, None, None)  # type: ignore[arg-type]
        return
    tensors = [x for x in (see.offset, see.lengths, see.q_segments, see.kv_segments) if isinstance(x, torch.Tensor)]
    if any(x.device.type != "cpu" for x in tensors):  # reading would wait for the device: every pair is looked at
        offset = None if isinstance(see.offset, torch.Tensor) else see.offset
        yield _Row((0, N), see, offset, S, True, None, None)
        return
    offsets = see.offset.tolist() if isinstance(see.offset, torch.Tensor) else [see.offset] * N
    lengths = [S] * N if see.lengths is None else see.lengths.tolist()
    for n in range(N):
        ids = keys = None
        if see.q_segments is not None and see.kv_segments is not None:
            ids = see.q_segments[n].numpy()
            keys = _segments(see.kv_segments[n].numpy())
        yield _Row((n, n + 1), see, offsets[n], lengths[n], masked, ids, keys)


def _segments(ids: np.ndarray) -> dict[int, tuple[int, int, bool]]:
    names, first, count = np.unique(ids, return_index=True, return_counts=True)
    last = len(ids) - np.unique(ids[::-1], return_index=True)[1]
    return {
        int(name): (int(a), int(b), bool(b - a == c))
        for name, a, b, c in zip(names, first, last, count, strict=True)
        if name >= 0
    }


def _runs(row: _Row, T: int) -> list[tuple[int, int]]:
    if row.ids is None:
        return [(0, T)]
    edges = [0, *(np.flatnonzero(row.ids[1:] != row.ids[:-1]) + 1).tolist(), T]
    if (len(edges) - 1) * SHORT_RUN > T:
        return [(0, T)]
    return list(pairwise(edges))


def _piece(row: _Row, start: int, stop: int) -> Piece | None:
    """The rectangle of queries start to stop: the keys from the first to the last that one of them may see."""
    see, exact = row.see, not row.hidden
    first, last = 0, row.length
    if row.ids is not None and row.keys is not None:
        names = np.unique(row.ids[start:stop]).tolist()
        found = [row.keys[name] for name in names if name in row.keys]
        if not found:
            return None
        first = max(first, min(a for a, _, _ in found))
        last = min(last, max(b for _, b, _ in found))
        exact = exact and len(names) == 1 and found[0][2]
    diagonal = False
    if see.banded:
        if row.offset is None:
            exact = False
        else:
            low, high = start + row.offset, stop - 1 + row.offset  # places of the first and the last query
            if see.left is not None:
                first = max(first, low - see.left)
                exact = exact and first >= high - see.left
            if see.right is not None:
                last = min(last, high + see.right + 1)
                diagonal = exact and low + see.right == first
                exact = exact and last <= low + see.right + 1
    if first >= last:
        return None
    kind = "full" if exact else "diagonal" if diagonal else "mask"
    return Piece(row.n, (start, stop), (first, last), kind)
