"""Which query-key pairs meet: the arguments of an attention call laid out, its visible pairs, its parts and blocks.

Inside, the heads axis is split in two, so that a key/value head meets its group of query heads by broadcasting and
is never repeated: q (*batch, G, H/G, T, D), k and v (*batch, G, 1, S, D), pairs (*batch, G, H/G, T, S).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from . import random
from .contract.checks.attention import AttentionPlan, attention_plan
from .contract.checks.kernels import check_kernel

# Scores in one block: 512 KiB of float64, so that the steps over them find them in a processor's cache.
CELLS = 1 << 16
# Queries in one block. Few, because a causal block leaves out the keys behind its last query; heads fill it up.
ROWS = 64
# Scores in one block at the most, 32 MiB of float64: of which a forward step holds one or two, a gradient about three.
MOST = 1 << 22


@dataclass(frozen=True)
class Pairs:
    """The arguments of one call, or of a part of it, in the inner layout.

    q, k, v and sinks are float64; a bias is converted block by block. heads: the number of each among those of the
    call, batch by batch, where dropout asks for it.
    """

    plan: AttentionPlan
    key: Any
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray | None
    mask: np.ndarray | None
    bias: np.ndarray | None
    offset: np.ndarray
    lengths: np.ndarray | None
    q_segments: np.ndarray | None
    kv_segments: np.ndarray | None
    sinks: np.ndarray | None
    heads: np.ndarray | None

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """Largest distance back and ahead, i + offset - left <= j <= i + offset + right; causal means right = 0."""
        left, right = self.plan.window or (None, None)
        return left, (0 if self.plan.causal else right)

    @property
    def most(self) -> int:
        """How many keys there are at the most."""
        return self.plan.S if self.lengths is None else int(self.lengths.max())


ARRAYS = tuple(field.name for field in fields(Pairs))[2:]


class Place(NamedTuple):
    """Where a part of a call stands: some elements of the first batch axis, some key/value heads."""

    axes: int
    elements: slice
    heads: slice

    def of(self, x: np.ndarray) -> np.ndarray:
        """The part of an array in the inner layout, as a view; an axis of size 1 concerns every part."""
        if x.shape[-4] > 1:
            x = x[..., self.heads, :, :, :]
        return x[self.elements] if x.ndim == self.axes + 4 and self.axes and x.shape[0] > 1 else x


def arrange(
    q: Any,
    k: Any,
    v: Any | None,
    *,
    mask: Any = None,
    bias: Any = None,
    causal: Any = False,
    window: Any = None,
    q_offset: Any = None,
    kv_lengths: Any = None,
    q_segments: Any = None,
    kv_segments: Any = None,
    sinks: Any = None,
    scale: Any = None,
    softcap: Any = None,
    dropout_rate: Any = 0.0,
    dropout_key: Any = None,
    kernel: Any = "auto",
) -> Pairs:
    """Check the arguments and lay them out."""
    check_kernel(kernel, ("reference",))
    plan = attention_plan(
        q,
        k,
        v,
        mask=mask,
        bias=bias,
        causal=causal,
        window=window,
        q_offset=q_offset,
        kv_lengths=kv_lengths,
        q_segments=q_segments,
        kv_segments=kv_segments,
        sinks=sinks,
        scale=scale,
        softcap=softcap,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        values=np.asarray,
    )
    batch = plan.batch
    offset = np.asarray(0 if q_offset is None else q_offset).astype(np.int64)
    count = plan.H * int(np.prod(batch))
    return Pairs(
        plan=plan,
        key=dropout_key,
        q=split_heads(q, plan, np.float64),
        k=split_heads(k, plan, np.float64),
        v=None if v is None else split_heads(v, plan, np.float64),
        mask=None if mask is None else split_heads(mask, plan),
        bias=None if bias is None else split_heads(bias, plan),
        offset=offset.reshape(*offset.shape, 1, 1, 1, 1),
        lengths=None if kv_lengths is None else np.asarray(kv_lengths).astype(np.int64).reshape(*batch, 1, 1, 1, 1),
        q_segments=None if q_segments is None else np.asarray(q_segments).reshape(*batch, 1, 1, plan.T, 1),
        kv_segments=None if kv_segments is None else np.asarray(kv_segments).reshape(*batch, 1, 1, 1, plan.S),
        sinks=None if sinks is None else np.asarray(sinks).astype(np.float64).reshape(plan.G, plan.group, 1, 1),
        heads=np.arange(count).reshape(*batch, plan.G, plan.group, 1, 1) if 0.0 < plan.dropout_rate < 1.0 else None,
    )


def split_heads(x: Any, plan: AttentionPlan, dtype: Any = None) -> np.ndarray:
    """(..., heads, n, m) -> (..., G, heads/G, n, m); one head, or no heads axis, gives (..., 1, 1, n, m).

    Not copied where it has the dtype already.
    """
    x = np.asarray(x, dtype=dtype)
    lead, heads = x.shape[:-3], (x.shape[-3] if x.ndim > 2 else 1)
    split = (1, 1) if heads == 1 else (plan.G, heads // plan.G)
    return x.reshape(*lead, *split, *x.shape[-2:])


def join_heads(x: np.ndarray) -> np.ndarray:
    """(..., G, heads/G, n, m) -> (..., heads, n, m)."""
    return x.reshape(*x.shape[:-4], x.shape[-4] * x.shape[-3], *x.shape[-2:])


def parts(pairs: Pairs) -> Iterator[tuple[Place, Pairs]]:
    """The call some batch elements and key/value heads at a time, whose blocks have about `CELLS` scores."""
    plan = pairs.plan
    if 0 in plan.batch:
        return
    rows, width = block_size(pairs)
    many = max(1, CELLS // max(1, int(np.prod(plan.batch[1:])) * plan.group * rows * width))
    heads, each = min(plan.G, many), max(1, many // plan.G)
    for first in range(0, plan.batch[0] if plan.batch else 1, each):
        for head in range(0, plan.G, heads):
            place = Place(len(plan.batch), slice(first, first + each), slice(head, head + heads))
            given = {name: getattr(pairs, name) for name in ARRAYS}
            arrays: dict[str, Any] = {name: place.of(x) for name, x in given.items() if x is not None}
            yield place, replace(pairs, **arrays)


def block_size(pairs: Pairs) -> tuple[int, int]:
    """Queries in a block, and the keys that they see at the most."""
    plan, (left, right) = pairs.plan, pairs.reach
    rows, width = ROWS, pairs.most
    if left is not None and right is not None:
        # Under a window a block of its own width looks at twice as many keys.
        rows = max(ROWS, left + right + 1 + int(pairs.offset.max() - pairs.offset.min()))
        width = min(width, 2 * rows)
    return max(1, min(rows, plan.T, MOST // max(1, plan.group * width))), width


def blocks(pairs: Pairs) -> Iterator[tuple[slice, slice]]:
    """Blocks of queries, each with the range of keys outside which it sees none."""
    plan, (left, right), most = pairs.plan, pairs.reach, pairs.most
    first, last = int(pairs.offset.min()), int(pairs.offset.max())
    rows, _ = block_size(pairs)
    for start in range(0, plan.T, rows):
        stop = min(start + rows, plan.T)
        low = 0 if left is None else min(max(0, start + first - left), most)
        high = most if right is None else min(most, stop + last + right)
        yield slice(start, stop), slice(low, max(low, high))


def visible(pairs: Pairs, rows: slice, keys: slice) -> np.ndarray | None:
    """The pairs of a block that take part, broadcastable to (*batch, G, H/G, rows, keys); None where all do."""
    left, right = pairs.reach
    i, j = np.arange(rows.start, rows.stop)[:, None], np.arange(keys.start, keys.stop)
    parts = []
    if left is not None:
        parts.append(i + pairs.offset - left <= j)
    if right is not None:
        parts.append(j <= i + pairs.offset + right)
    if pairs.lengths is not None:
        parts.append(j < pairs.lengths)
    if pairs.q_segments is not None and pairs.kv_segments is not None:
        of_q, of_k = pairs.q_segments[..., rows, :], pairs.kv_segments[..., keys]
        parts.append((of_q == of_k) & (of_q >= 0))
    if pairs.mask is not None:
        parts.append(block_of(pairs.mask, rows, keys))
    if pairs.bias is not None:
        parts.append(block_of(pairs.bias, rows, keys) != -np.inf)
    seen = reduce(np.logical_and, parts) if parts else None
    return None if seen is None or seen.all() else seen


def block_of(x: np.ndarray, rows: slice, keys: slice) -> np.ndarray:
    """The part of a mask or bias that concerns a block; an axis of size 1 concerns every block."""
    return x[..., rows if x.shape[-2] > 1 else slice(None), keys if x.shape[-1] > 1 else slice(None)]


def dropout_factor(pairs: Pairs, rows: slice, keys: slice) -> np.ndarray | float:
    """1 / (1 - rate) where the pair is kept, else 0; the number 1 at rate 0, and 0 at rate 1.

    The pair's number n is its place in (..., H, T, S), so the answer does not depend on the blocks.
    """
    plan, rate = pairs.plan, pairs.plan.dropout_rate
    if pairs.heads is None:
        return 1.0 - rate
    i, j = np.arange(rows.start, rows.stop)[:, None], np.arange(keys.start, keys.stop)
    n = (pairs.heads * plan.T + i) * plan.S + j
    # In float32, the dtype of the uniform numbers, as the frameworks compare.
    return np.where(random.uniform_at(pairs.key, n) < np.float32(1.0 - rate), 1.0 / (1.0 - rate), 0.0)


def weighted_sum(weights: np.ndarray, x: np.ndarray, seen: np.ndarray | None) -> np.ndarray:
    """sum_j w_ij x_j over the pairs that are seen; w is 0 at all others.

    A plain product is that sum unless x holds NaN or inf, for 0 * NaN is NaN. Then the product takes the finite
    entries, and the others are added key by key where they are seen.
    """
    plain = weights @ x
    if seen is None or np.isfinite(plain).all():
        return plain
    finite = np.isfinite(x)
    total = weights @ np.where(finite, x, 0.0)
    seen = np.broadcast_to(seen, weights.shape)
    suspects = ~finite.all(axis=-1)
    for j in np.flatnonzero(suspects.any(axis=tuple(range(suspects.ndim - 1)))):
        one, x_j = seen[..., j, None], x[..., None, j, :]
        if one.any():
            total += np.where(one & ~np.isfinite(x_j), weights[..., j, None] * x_j, 0.0)
    return total
