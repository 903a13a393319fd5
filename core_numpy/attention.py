"""Attention: the definition, evaluated in float64 and rounded once.

Some heads and queries at a time, so memory does not grow with T * S, and a window costs T * window. The pairs that take
part are found in `pairs`; the gradients are in `gradients.attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .contract.checks.attention import check_merge
from .contract.checks.kernels import Kernel
from .pairs import Pairs, arrange, block_of, blocks, dropout_factor, parts, visible, weighted_sum
from .rounding import rounded

# Weights that a forward pass keeps for the backward pass: 32 MiB of float64. More are computed again.
KEPT = 1 << 22
# What NaN, inf and dead rows raise on their way is no news: their results are defined by the rules below.
QUIET: dict[str, Any] = {"invalid": "ignore", "divide": "ignore", "over": "ignore"}


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    mask: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    q_offset: int | np.ndarray | None = None,
    kv_lengths: np.ndarray | None = None,
    q_segments: np.ndarray | None = None,
    kv_segments: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: np.ndarray | None = None,
    kernel: str = "auto",
) -> np.ndarray:
    """Each query's weighted mean of the values, weighted by how well the keys match it.

        s_ij = cap(scale * q_i . k_j) + bias_ij                 cap(x) = softcap * tanh(x / softcap), or x without one
        P_ij = exp(s_ij) / (sum_j exp(s_ij) + exp(sink))        over the visible j
        o_i  = sum_j P_ij * kept_ij / (1 - rate) * v_j

    q (..., H, T, D), k (..., G, S, D), v (..., G, S, Dv) -> (..., H, T, Dv), or all without the heads axis. float16,
    bfloat16, float32 or float64 in, computed in float64. Refuses what `contract.checks.attention.attention_plan` lists.

    attention-1: all axes in front of the heads axis are batch axes; 2-D inputs have one head and no heads axis.
    attention-2: H is a multiple of G, and query head h reads key/value head h // (H // G).
    attention-3: a query that may attend to no key gives output 0, weights 0, lse -inf, and gradients 0.
    attention-4: mask is boolean, True = may attend, of rank 2 (T, S) or the full rank, each axis its size or 1.
    attention-5: bias is floating, of the same ranks, and added to the scaled and soft-capped scores.
    attention-6: a bias of -inf masks its pair.
    attention-7: the order is scale, soft cap, bias, masks, sinks, softmax, dropout, weighted sum.
    attention-8: scale is 1 / sqrt(D) unless given; any finite number is taken as it is, 0 and negative ones included.
    attention-9: causal: query i sees key j where j <= i + q_offset.
    attention-10: q_offset is the position of query 0 among the keys: an int or one per batch element, negative too.
    attention-11: q_offset None means 0 where T = S; with causal or window and T != S it is an error.
    attention-12: window (left, right): i + q_offset - left <= j <= i + q_offset + right; None is unbounded.
    attention-13: kv_lengths: keys at and past the length of their batch element are masked.
    attention-14: segments: only pairs with equal ids attend; a negative id matches nothing, itself included.
    attention-15: a pair is visible where all restrictions given allow it.
    attention-16: a masked pair has no effect whatever stands there, NaN and inf in q, k and v included.
    attention-17: keys that no query may attend to have no effect on outputs and gradients, and gradients there are 0.
    attention-18: a sink is one more logit of its head in the denominator, and carries no value.
    attention-19: a query whose only company is a sink gives output 0 and weights 0, and its lse is the sink.
    attention-20: dropout keeps the weight with row-major index n over (..., H, T, S) where uniform(key)[n] < 1 - rate.
    attention-21: a kept weight is divided by 1 - rate; at rate 1 the output is 0; a rate above 0 needs a key.
    attention-22: q, k and v have one dtype, nothing is promoted; the output has it, rounded once from float64.
    attention-23: T = 0 and B = 0 give empty outputs; with S = 0 every query is one that may attend to no key.
    attention-24: the scores of a row may all grow by the same number, of any size, without effect on the output.

    Source: Vaswani et al. 2017, eq. 1; grouped heads: Ainslie et al. 2023; cap: Gemma 2; sinks: as gpt-oss has them.
    """
    return attention_with_lse(
        q, k, v, mask=mask, bias=bias, causal=causal, window=window, q_offset=q_offset, kv_lengths=kv_lengths,
        q_segments=q_segments, kv_segments=kv_segments, sinks=sinks, scale=scale, softcap=softcap,
        dropout_rate=dropout_rate, dropout_key=dropout_key, kernel=kernel)[0]  # fmt: skip


def attention_weights(
    q: np.ndarray,
    k: np.ndarray,
    *,
    mask: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    q_offset: int | np.ndarray | None = None,
    kv_lengths: np.ndarray | None = None,
    q_segments: np.ndarray | None = None,
    kv_segments: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: np.ndarray | None = None,
    kernel: str = "auto",
) -> np.ndarray:
    """The weights P of `attention`, per head and before dropout.

    q (..., H, T, D), k (..., G, S, D) -> (..., H, T, S) in q's dtype; computed in float64. Refuses what
    `attention` does.

    attention-25: weights are per head and before dropout: a row sums to 1, or to less by the sink's share, or to 0.
    attention-26: asking for the weights never changes the output.
    """
    pairs = arrange(
        q, k, None, mask=mask, bias=bias, causal=causal, window=window, q_offset=q_offset, kv_lengths=kv_lengths,
        q_segments=q_segments, kv_segments=kv_segments, sinks=sinks, scale=scale, softcap=softcap,
        dropout_rate=dropout_rate, dropout_key=dropout_key, kernel=kernel,
    )  # fmt: skip
    plan = pairs.plan
    weights = np.zeros((*plan.batch, plan.G, plan.group, plan.T, plan.S), dtype=np.asarray(q).dtype)
    with np.errstate(**QUIET):
        for place, part in parts(pairs):
            here = place.of(weights)
            for rows, keys in blocks(part):
                P, _, _ = softmax(scores(part, rows, keys), visible(part, rows, keys), part.sinks)
                here[..., rows, keys] = rounded(P, weights.dtype)
    return weights.reshape(plan.scores_shape)


def attention_with_lse(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    mask: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    q_offset: int | np.ndarray | None = None,
    kv_lengths: np.ndarray | None = None,
    q_segments: np.ndarray | None = None,
    kv_segments: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: np.ndarray | None = None,
    kernel: str = "auto",
) -> tuple[np.ndarray, np.ndarray]:
    """The output of `attention`, and the natural logarithm of each query's whole denominator.

        lse_i = log(sum_j exp(s_ij) + exp(sink))                over the visible j

    Shapes as in `attention`; lse (..., H, T), float32, or float64 for float64 inputs. Refuses what `attention` does.

    attention-27: lse is the natural logarithm of the denominator, sinks included and before dropout.
    attention-28: lse is float32, float64 for float64 inputs, and has a gradient.
    """
    pairs = arrange(
        q, k, v, mask=mask, bias=bias, causal=causal, window=window, q_offset=q_offset, kv_lengths=kv_lengths,
        q_segments=q_segments, kv_segments=kv_segments, sinks=sinks, scale=scale, softcap=softcap,
        dropout_rate=dropout_rate, dropout_key=dropout_key, kernel=kernel,
    )  # fmt: skip
    out, lse, _ = attend(pairs)
    plan, dtype = pairs.plan, np.asarray(q).dtype
    shape = plan.scores_shape[:-1]
    return (
        rounded(out, dtype).reshape(*shape, plan.Dv),
        rounded(lse, np.float64 if dtype == np.float64 else np.float32).reshape(shape),
    )


def attend(pairs: Pairs, *, keep: bool = False) -> tuple[np.ndarray, np.ndarray, list[np.ndarray] | None]:
    """o and lse of a call that has values, float64 in the inner layout, where lse is a column.

    keep: also the weights P, block by block, for the gradients, unless these should better compute them again.
    """
    plan, v = pairs.plan, pairs.v
    assert v is not None
    out = np.empty((*plan.batch, plan.G, plan.group, plan.T, plan.Dv))
    lse = np.empty((*out.shape[:-1], 1))
    weights: list[np.ndarray] | None = [] if keep and _keeps(pairs) else None
    with np.errstate(**QUIET):
        for place, part in parts(pairs):
            values, out_here, lse_here = place.of(v), place.of(out), place.of(lse)
            for rows, keys in blocks(part):
                seen = visible(part, rows, keys)
                P, m, total = softmax(scores(part, rows, keys), seen, part.sinks)
                lse_here[..., rows, :] = m + np.log(total)
                if weights is not None:
                    weights.append(P)
                thinned = P if plan.dropout_rate == 0.0 else P * dropout_factor(part, rows, keys)
                out_here[..., rows, :] = weighted_sum(thinned, values[..., keys, :], seen)
    return out, lse, weights


def _keeps(pairs: Pairs) -> bool:
    """Whether the weights are few, and all that the gradients need of the scores."""
    plan = pairs.plan
    few = plan.H * plan.T * plan.S * int(np.prod(plan.batch)) <= KEPT
    return few and pairs.sinks is None and plan.softcap is None


def scores(pairs: Pairs, rows: slice, keys: slice) -> np.ndarray:
    """s = bias + softcap * tanh(scale * q.k / softcap), of one block, before anything is masked."""
    s = capped(pairs, rows, keys)
    return s if pairs.bias is None else s + block_of(pairs.bias, rows, keys).astype(np.float64)


def capped(pairs: Pairs, rows: slice, keys: slice) -> np.ndarray:
    """softcap * tanh(scale * q.k / softcap), or scale * q.k without a cap."""
    plan = pairs.plan
    s = (plan.scale * pairs.q[..., rows, :]) @ pairs.k[..., keys, :].swapaxes(-1, -2)
    return s if plan.softcap is None else plan.softcap * np.tanh(s / plan.softcap)


def softmax(
    s: np.ndarray, seen: np.ndarray | None, sinks: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """P = exp(s - m) / total over the seen pairs and 0 elsewhere, m, and total = sum exp(s - m) + exp(sink - m).

    m is the largest score of the row, or 0 where there is none, so that nothing overflows and no row is NaN. P takes
    the place of s; m and total are columns, and lse is m + log(total), in which a large m leaves no digits to total.
    """
    if seen is not None:
        np.copyto(s, -np.inf, where=~seen)
    m = s.max(axis=-1, keepdims=True, initial=-np.inf)
    if sinks is not None:
        m = np.maximum(m, sinks)
    m = np.where(m == -np.inf, 0.0, m)
    e = np.exp(np.subtract(s, m, out=s), out=s)
    total = e.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks - m)
    P = np.divide(e, np.where(total == 0.0, 1.0, total), out=e)
    if seen is not None and np.isnan(total).any():
        np.copyto(P, 0.0, where=~seen)  # a NaN in the row's denominator stays with the pairs that are seen
    return P, m, total


def merge_attention(outs: Sequence[np.ndarray], lses: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Merge the results of `attention_with_lse` over disjoint parts of the keys into that over all of them.

        lse = log(sum_n exp(lse_n)),  out = sum_n exp(lse_n - lse) out_n

    outs: (..., H, T, Dv) each; lses: (..., H, T) each -> the same shapes, out in the dtype of outs, lse float32
    (float64 for float64 outs). Refuses what `contract.checks.attention.check_merge` lists.

    attention-29: merging the parts of split keys gives the output and lse of all the keys together.
    attention-30: a part in which a query sees no key has lse -inf and no effect there; sinks go to one part only.
    """
    check_merge(outs, lses)
    dtype = np.asarray(outs[0]).dtype
    with np.errstate(**QUIET):
        w, lse = merge_weights(lses)
        out = sum(
            np.where(w_n != 0.0, w_n * np.asarray(out_n).astype(np.float64), 0.0)
            for w_n, out_n in zip(w[..., None], outs, strict=True)
        )
    return rounded(out, dtype), lse.astype(np.float64 if dtype == np.float64 else np.float32)


def merge_weights(lses: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """exp(lse_n - lse), stacked over the parts, and lse."""
    parts = np.stack([np.asarray(lse).astype(np.float64) for lse in lses], axis=-1)
    w, m, total = softmax(parts, None, None)
    return np.moveaxis(w, -1, 0), (m + np.log(total))[..., 0]


def available_kernels() -> dict[str, Kernel]:
    """The kernels of this package by name: one, the reference, which serves every argument."""
    return {"reference": Kernel("reference", cannot=(), twice=False, shields="pairs")}


def explain_kernel(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    mask: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    q_offset: int | np.ndarray | None = None,
    kv_lengths: np.ndarray | None = None,
    q_segments: np.ndarray | None = None,
    kv_segments: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: np.ndarray | None = None,
    kernel: str = "auto",
) -> str:
    """Which kernel `attention` would choose for these arguments, and why, one sentence per kernel."""
    arrange(
        q, k, v, mask=mask, bias=bias, causal=causal, window=window, q_offset=q_offset, kv_lengths=kv_lengths,
        q_segments=q_segments, kv_segments=kv_segments, sinks=sinks, scale=scale, softcap=softcap,
        dropout_rate=dropout_rate, dropout_key=dropout_key, kernel=kernel,
    )  # fmt: skip
    return "reference: chosen; it is the only kernel of core_numpy and serves every argument in float64."
