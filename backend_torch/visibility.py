"""Which query may attend to which key: the restrictions of one call, as a mask or as ranges."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Visibility:
    """The restrictions of a call, over N merged batch axes.

    left, right: bounds of `j - (i + offset)`, causality included (right 0), None for unbounded. offset: an int
    or an (N,) tensor. lengths (N,); q_segments (N, T) and kv_segments (N, S); mask with each of (N, H, T, S) its
    size or 1. bias likewise: its -inf entries are masked.
    """

    left: int | None = None
    right: int | None = None
    offset: int | Tensor = 0
    lengths: Tensor | None = None
    q_segments: Tensor | None = None
    kv_segments: Tensor | None = None
    mask: Tensor | None = None
    bias: Tensor | None = None

    @property
    def banded(self) -> bool:
        return self.left is not None or self.right is not None

    @property
    def ragged(self) -> bool:
        """Whether batch elements differ in structure."""
        return self.lengths is not None or self.q_segments is not None or isinstance(self.offset, Tensor)


def part(x: Tensor, *ranges: tuple[int, int]) -> Tensor:
    """x[a:b, c:d, ...] where an axis of size 1 stands for all of its positions."""
    for axis, (start, stop) in enumerate(ranges):
        if x.shape[axis] != 1 and stop - start != x.shape[axis]:
            x = x.narrow(axis, start, stop - start)
    return x


def visible(see: Visibility, device: torch.device, n: tuple[int, int], i: tuple[int, int], j: tuple[int, int]):
    """Bool mask of batch elements n, queries i and keys j, broadcastable to (n, H, i, j); None where all is visible."""
    parts: list[Tensor] = []
    full = (0, 1)  # the heads axis of masks is never cut: it is 1 or H
    if see.mask is not None:
        parts.append(part(see.mask, n, (0, see.mask.shape[1]), i, j))
    if see.bias is not None:
        parts.append(part(see.bias, n, (0, see.bias.shape[1]), i, j) != -torch.inf)
    if see.banded or see.lengths is not None:
        keys = torch.arange(*j, device=device)
    if see.banded:
        position = torch.arange(*i, device=device)[:, None]
        if isinstance(see.offset, Tensor):
            position = position + part(see.offset[:, None, None, None], n, full)
        else:
            position = position + see.offset
        if see.right is not None:
            parts.append(keys <= position + see.right)
        if see.left is not None:
            parts.append(keys >= position - see.left)
    if see.lengths is not None:
        parts.append(keys < part(see.lengths[:, None, None, None], n))
    if see.q_segments is not None and see.kv_segments is not None:
        mine = part(see.q_segments[:, None, :, None], n, full, i)
        theirs = part(see.kv_segments[:, None, None, :], n, full, full, j)
        parts.append((mine == theirs) & (mine >= 0))
    result = None
    for item in parts:
        if item.dim() == 2:
            item = item[None, None]
        result = item if result is None else result & item
    return result


# Masks of bands that many calls share are kept up to this size, 1 MiB in float32.
KEPT_BAND = 1 << 18


def band_term(see: Visibility, T: int, S: int, dtype: torch.dtype) -> Tensor:
    """0 where the band alone, its offset an int, lets a query look and -inf elsewhere: (1, 1, T, S) on the CPU."""
    make = _kept_band if T * S <= KEPT_BAND else _made_band
    return make(see.left, see.right, see.offset, T, S, dtype)


def _made_band(left: int | None, right: int | None, offset: int | Tensor, T: int, S: int, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):  # what is kept is for training too
        shown = visible(Visibility(left, right, offset), torch.device("cpu"), (0, 1), (0, T), (0, S))
        return torch.zeros(1, 1, T, S, dtype=dtype, device="cpu").masked_fill_(~shown, -torch.inf)


_kept_band = lru_cache(maxsize=16)(_made_band)

# Rows below this Euclidean norm, squared, neither overflow in a product with ordinary numbers nor hold NaN.
TAME = 1e30


def tame(*arrays: Tensor) -> bool:
    """Whether a score of -inf and a weight of 0 silence whatever these keys and values hold: none is NaN, inf or huge.

    One product with itself each, read on the host: for float32 and float64 whose elements lie side by side; else False.
    """
    for x in arrays:
        if x.dtype not in (torch.float32, torch.float64):
            return False
        x = x.detach()
        if not x.is_contiguous():
            x = x.transpose(1, 2)  # heads and length as a projection leaves them
            if not x.is_contiguous():
                return False
        x = x.view(-1)
        if not torch.dot(x, x).item() < TAME:
            return False
    return True


def last_sees_all(term: Tensor) -> bool:
    """Whether the last query may attend to every key, so that none is hidden; term as in `seen`. Read on the host."""
    last = term.detach()[:, :, -1]
    return bool(last.all().item() if last.dtype == torch.bool else last.amin().item() > -torch.inf)


def seen(term: Tensor, G: int) -> Tensor | None:
    """(n, G, j, 1) bool: the keys that some query may attend to; None where three rows show that all are.

    term: bool visibility, or a bias whose -inf entries are masked, (n or 1, H or 1, i or 1, j or 1).
    """
    if term.shape[-2] > 8 and readable(term):
        rows = term[..., :: term.shape[-2] // 2, :]
        rows = torch.cat((rows, term[..., -1:, :]), -2)
        if bool(_some(rows).all()):
            return None
    some = _some(term)
    if some.shape[1] not in (1, G):
        some = some.unflatten(1, (G, -1)).any(2)
    return some[..., None]


def _some(term: Tensor) -> Tensor:
    return term.any(-2) if term.dtype == torch.bool else term.amax(-2) > -torch.inf


def traced() -> bool:
    """Whether tensors may have no values to look at: torch.compile, torch.export, torch.func, FakeTensorMode."""
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return torch._C._len_torch_dispatch_stack() > 0


def readable(x: Tensor) -> bool:
    """Whether values may be looked at on the way, at no cost but the look: plain tensors on the CPU, eagerly."""
    return x.device.type == "cpu" and type(x) in (Tensor, torch.nn.Parameter) and not traced()


def hull(see: Visibility, T: int, S: int) -> tuple[int, int]:
    """The range of keys outside of which band and offset let no query look; (0, S) for offsets in a tensor."""
    if isinstance(see.offset, Tensor):
        return 0, S
    start, stop = 0, S
    if see.left is not None:
        start = max(0, min(S, see.offset - see.left))
    if see.right is not None:
        stop = max(start, min(S, T + see.offset + see.right))
    return start, stop


def narrowed(see: Visibility, start: int, stop: int) -> tuple[Visibility, int, int]:
    """The keys of start to stop that lengths and a mask over keys leave some query, and what restricts inside of them.

    Read on the host (`readable`). A padding mask or equal lengths leave nothing but the range; nobody may see an empty
    one.
    """
    if see.lengths is not None:
        found = see.lengths.tolist()
        stop = max(start, min(stop, max(found)))
        if min(found) >= stop:
            see = replace(see, lengths=None)
    if see.mask is not None and see.mask.shape[2] == 1 < see.mask.shape[3]:
        shown = see.mask.numpy()[:, :, 0, start:stop]
        keys = np.flatnonzero(shown[0, 0] if see.mask.shape[:2] == (1, 1) else shown.any((0, 1)))
        if not len(keys):
            return see, start, start
        first, last = int(keys[0]), int(keys[-1]) + 1
        start, stop = start + first, start + last
        if shown[:, :, first:last].all():
            see = replace(see, mask=None)
    return see, start, stop
