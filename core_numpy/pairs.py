"""Which query-key pairs meet: the arguments of an attention call laid out, its visible pairs, its blocks of queries.

Inside, the heads axis is split in two, so that a key/value head meets its group of query heads by broadcasting and
is never repeated: q (*batch, G, H/G, T, D), k (*batch, G, 1, S, D), pairs (*batch, G, H/G, T, S).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from . import random
from .contract.checks.attention import AttentionPlan, attention_plan
from .contract.checks.kernels import check_kernel

# Scores in one block: 32 MiB of float64, of which a forward step holds about five and a gradient about ten.
CELLS = 1 << 22
# Fewest rows of a block under a window: below this the loop costs more than the arithmetic.
ROWS = 64


@dataclass(frozen=True)
class Pairs:
    """The arguments of one call in the inner layout; q, k and sinks are float64, a bias is converted block by block."""

    plan: AttentionPlan
    q: np.ndarray
    k: np.ndarray
    mask: np.ndarray | None
    bias: np.ndarray | None
    offset: np.ndarray
    lengths: np.ndarray | None
    q_segments: np.ndarray | None
    kv_segments: np.ndarray | None
    sinks: np.ndarray | None
    key: Any

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """Largest distance back and ahead, i + offset - left <= j <= i + offset + right; causal means right = 0."""
        left, right = self.plan.window or (None, None)
        return left, (0 if self.plan.causal else right)


def arrange(
    q: Any,
    k: Any,
    v: Any | None,
    *,
    mask: Any,
    bias: Any,
    causal: Any,
    window: Any,
    q_offset: Any,
    kv_lengths: Any,
    q_segments: Any,
    kv_segments: Any,
    sinks: Any,
    scale: Any,
    softcap: Any,
    dropout_rate: Any,
    dropout_key: Any,
    kernel: Any,
) -> Pairs:
    """Check the arguments and lay them out; v is only checked."""
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
    return Pairs(
        plan=plan,
        q=split_heads(q, plan).astype(np.float64),
        k=split_heads(k, plan).astype(np.float64),
        mask=None if mask is None else split_heads(mask, plan),
        bias=None if bias is None else split_heads(bias, plan),
        offset=offset.reshape(*offset.shape, 1, 1, 1, 1),
        lengths=None if kv_lengths is None else np.asarray(kv_lengths).astype(np.int64).reshape(*batch, 1, 1, 1, 1),
        q_segments=None if q_segments is None else np.asarray(q_segments).reshape(*batch, 1, 1, plan.T),
        kv_segments=None if kv_segments is None else np.asarray(kv_segments).reshape(*batch, 1, 1, plan.S),
        sinks=None if sinks is None else np.asarray(sinks).astype(np.float64).reshape(plan.G, plan.group, 1, 1),
        key=dropout_key,
    )


def split_heads(x: Any, plan: AttentionPlan) -> np.ndarray:
    """(..., heads, n, m) -> (..., G, heads/G, n, m); one head, or no heads axis, gives (..., 1, 1, n, m)."""
    x = np.asarray(x)
    lead, heads = x.shape[:-3], (x.shape[-3] if x.ndim > 2 else 1)
    split = (1, 1) if heads == 1 else (plan.G, heads // plan.G)
    return x.reshape(*lead, *split, *x.shape[-2:])


def blocks(pairs: Pairs) -> Iterator[tuple[slice, slice]]:
    """Blocks of queries, each with the range of keys outside which it sees none."""
    plan, (left, right) = pairs.plan, pairs.reach
    heads = plan.H * int(np.prod(plan.batch))
    if heads == 0:
        return
    first, last = int(pairs.offset.min()), int(pairs.offset.max())
    most = plan.S if pairs.lengths is None else int(pairs.lengths.max())
    width, rows = most, plan.T
    if left is not None and right is not None:
        width = max(ROWS, left + right + 1 + last - first)
        rows, width = width, min(most, 2 * width)
    rows = max(1, min(rows, CELLS // max(1, heads * width)))
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
        of_q, of_k = pairs.q_segments[..., rows, None], pairs.kv_segments[..., None, keys]
        parts.append((of_q == of_k) & (of_q >= 0))
    if pairs.mask is not None:
        parts.append(block_of(pairs.mask, rows, keys))
    if pairs.bias is not None:
        parts.append(block_of(pairs.bias, rows, keys) != -np.inf)
    return reduce(np.logical_and, parts) if parts else None


def block_of(x: np.ndarray, rows: slice, keys: slice) -> np.ndarray:
    """The part of a mask or bias that concerns a block; an axis of size 1 concerns every block."""
    return x[..., rows if x.shape[-2] > 1 else slice(None), keys if x.shape[-1] > 1 else slice(None)]


def dropout_factor(pairs: Pairs, rows: slice, keys: slice) -> np.ndarray | float:
    """1 / (1 - rate) where the pair is kept, else 0; 1 without dropout.

    The pair's number n is its place in (..., H, T, S), so the answer does not depend on the blocks.
    """
    plan, rate = pairs.plan, pairs.plan.dropout_rate
    if rate == 0.0:
        return 1.0
    if rate == 1.0:
        return 0.0
    heads = np.arange(plan.H * int(np.prod(plan.batch))).reshape(*plan.batch, plan.G, plan.group, 1, 1)
    i, j = np.arange(rows.start, rows.stop)[:, None], np.arange(keys.start, keys.stop)
    n = (heads * plan.T + i) * plan.S + j
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
