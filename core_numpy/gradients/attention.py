"""The gradients of attention, derived by hand and evaluated in float64, blocked over queries as the forward pass is.

With s the scores after the soft cap c and the bias, R_ij = kept_ij / (1 - rate), o_i = sum_j R_ij P_ij v_j:

    dv_j    = sum_i R_ij P_ij do_i
    dP_ij   = R_ij do_i . v_j
    ds_ij   = P_ij (dP_ij - sum_j P_ij dP_ij + dlse_i)       as dP_ij/ds_ik = P_ij (1[j=k] - P_ik), dlse_i/ds_ij = P_ij
    dsink   = sum_i P_i,sink (0 - sum_j P_ij dP_ij + dlse_i)    a key whose value is 0; P_i,sink = exp(sink - lse_i)
    dbias   = ds, summed over the axes along which bias is broadcast
    dx_ij   = ds_ij (1 - tanh(x_ij / c)^2)                      x = scale * q.k; the factor is 1 without a cap
    dq_i    = scale * sum_j dx_ij k_j
    dk_j    = scale * sum_i dx_ij q_i                           summed over the query heads of the group, as dv_j is

All sums run over the visible pairs only, so a masked pair gives exactly 0 whatever stands there, in the cotangents too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..attention import QUIET, capped, merge_weights, softmax
from ..contract.checks.attention import check_merge
from ..contract.checks.common import require_float, require_shape
from ..pairs import Pairs, arrange, block_of, blocks, dropout_factor, split_heads, visible, weighted_sum
from ..rounding import rounded


def attention_vjp(
    grad_out: np.ndarray,
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
) -> dict[str, np.ndarray]:
    """The gradients of sum(grad_out * attention(q, k, v, ...)), under the names of the arguments.

    grad_out (..., H, T, Dv) of any floating dtype -> {"q", "k", "v"}, and "bias" and "sinks" where given, each with the
    shape and dtype of its argument. Computed in float64, rounded once. Refuses what `attention` does.
    """
    pairs = arrange(
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
        kernel=kernel,
    )
    shape = (*pairs.plan.scores_shape[:-1], pairs.plan.Dv)
    return _gradients(
        pairs,
        {"q": q, "k": k, "v": v, "bias": bias, "sinks": sinks},
        out=_cotangent("grad_out", grad_out, shape, pairs),
    )


def attention_weights_vjp(
    grad_weights: np.ndarray,
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
) -> dict[str, np.ndarray]:
    """The gradients of sum(grad_weights * attention_weights(q, k, ...)), under the names of the arguments.

    grad_weights (..., H, T, S) -> {"q", "k"}, and "bias" and "sinks" where given; otherwise as `attention_vjp`.
    """
    pairs = arrange(
        q,
        k,
        None,
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
        kernel=kernel,
    )
    weights = _cotangent("grad_weights", grad_weights, pairs.plan.scores_shape, pairs)
    return _gradients(pairs, {"q": q, "k": k, "bias": bias, "sinks": sinks}, weights=weights)


def attention_with_lse_vjp(
    grad_out: np.ndarray,
    grad_lse: np.ndarray,
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
) -> dict[str, np.ndarray]:
    """The gradients of sum(grad_out * out) + sum(grad_lse * lse), under the names of the arguments.

    grad_out (..., H, T, Dv), grad_lse (..., H, T); otherwise as `attention_vjp`. A query that sees no key has a
    constant lse, so its grad_lse counts only towards its sink.
    """
    pairs = arrange(
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
        kernel=kernel,
    )
    shape = (*pairs.plan.scores_shape[:-1], pairs.plan.Dv)
    out = _cotangent("grad_out", grad_out, shape, pairs)
    lse = _cotangent("grad_lse", grad_lse, shape[:-1], pairs)
    return _gradients(pairs, {"q": q, "k": k, "v": v, "bias": bias, "sinks": sinks}, out=out, lse=lse)


def merge_attention_vjp(
    grad_out: np.ndarray, grad_lse: np.ndarray, outs: Sequence[np.ndarray], lses: Sequence[np.ndarray]
) -> dict[str, list[np.ndarray]]:
    """The gradients of sum(grad_out * out) + sum(grad_lse * lse) for (out, lse) = merge_attention(outs, lses).

        w_n     = exp(lse_n - lse)
        dout_n  = w_n dout
        dlse_n  = w_n (dout . out_n - dout . out + dlse)

    grad_out (..., H, T, Dv), grad_lse (..., H, T) -> {"outs": a list, "lses": a list}, in the shapes and dtypes of the
    arguments. A part in which a query sees no key (lse -inf) gets 0 there.
    """
    check_merge(outs, lses)
    for name, x, shape in (("grad_out", grad_out, outs[0].shape), ("grad_lse", grad_lse, outs[0].shape[:-1])):
        require_float(name, x)
        require_shape(name, x, shape, "(that of the result)")
    dout, dlse = np.asarray(grad_out).astype(np.float64), np.asarray(grad_lse).astype(np.float64)
    with np.errstate(**QUIET):
        w = merge_weights(lses)[0]
        along = [
            np.where(w_n != 0.0, (dout * np.asarray(out_n).astype(np.float64)).sum(axis=-1), 0.0)
            for w_n, out_n in zip(w, outs, strict=True)
        ]
        mean = sum(np.where(w_n != 0.0, w_n * along_n, 0.0) for w_n, along_n in zip(w, along, strict=True))
        douts = [np.where(w_n[..., None] != 0.0, w_n[..., None] * dout, 0.0) for w_n in w]
        dlses = [
            np.where(w_n != 0.0, w_n * (along_n - mean + dlse), 0.0) for w_n, along_n in zip(w, along, strict=True)
        ]
    return {
        "outs": [rounded(d, np.asarray(x).dtype) for d, x in zip(douts, outs, strict=True)],
        "lses": [rounded(d, np.asarray(x).dtype) for d, x in zip(dlses, lses, strict=True)],
    }


def _cotangent(name: str, x: Any, shape: tuple[int, ...], pairs: Pairs) -> np.ndarray:
    """A cotangent, checked, in the inner layout and in float64; that of lse as a column."""
    require_float(name, x)
    require_shape(name, x, shape, "(that of the result)")
    column = len(shape) < len(pairs.plan.scores_shape)
    return split_heads(np.asarray(x)[..., None] if column else x, pairs.plan).astype(np.float64)


def _gradients(
    pairs: Pairs,
    arguments: dict[str, Any],
    *,
    out: np.ndarray | None = None,
    lse: np.ndarray | None = None,
    weights: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """The formulas at the top of this file, block by block, for the cotangents `out`, `lse` and `weights`."""
    plan = pairs.plan
    given = {name: np.asarray(x) for name, x in arguments.items() if x is not None}
    v = split_heads(given["v"], plan).astype(np.float64) if "v" in given else None
    # One slice per key/value head and group member; the group is summed at the end.
    lead = (*plan.batch, plan.G, plan.group)
    dq, dk = np.zeros((*lead, plan.T, plan.D)), np.zeros((*lead[:-1], 1, plan.S, plan.D))
    dv = np.zeros((*lead[:-1], 1, plan.S, plan.Dv))
    dbias = None if pairs.bias is None else np.zeros(pairs.bias.shape)
    dsinks = np.zeros((plan.G, plan.group))
    with np.errstate(**QUIET):
        for rows, keys in blocks(pairs):
            q, k = pairs.q[..., rows, :], pairs.k[..., keys, :]
            seen = visible(pairs, rows, keys)
            seen_by = None if seen is None else seen.swapaxes(-1, -2)
            x = capped(pairs, rows, keys)
            s = x if pairs.bias is None else x + block_of(pairs.bias, rows, keys).astype(np.float64)
            P, log_sum = softmax(s, seen, pairs.sinks)
            dP = np.zeros(P.shape)
            if out is not None and v is not None:
                do, R = out[..., rows, :], dropout_factor(pairs, rows, keys)
                dv[..., keys, :] += weighted_sum((P * R).swapaxes(-1, -2), do, seen_by).sum(axis=-3, keepdims=True)
                dP = R * (do @ v[..., keys, :].swapaxes(-1, -2))
            if weights is not None:
                dP = weights[..., rows, keys]
            shift = lse[..., rows, :] if lse is not None else 0.0
            shift = shift - _seen(P * dP, seen).sum(axis=-1, keepdims=True)
            ds = _seen(P * (dP + shift), seen)
            if pairs.sinks is not None:
                P_sink = np.where(pairs.sinks == -np.inf, 0.0, np.exp(pairs.sinks - log_sum[..., None]))
                dsinks += _sum_to(P_sink * shift, (plan.G, plan.group, 1, 1))[..., 0, 0]
            if dbias is not None:
                part = block_of(dbias, rows, keys)
                part += _sum_to(ds, part.shape)
            dx = ds if plan.softcap is None else _seen(ds * (1.0 - (x / plan.softcap) ** 2), seen)
            dq[..., rows, :] = plan.scale * weighted_sum(dx, k, seen)
            dk[..., keys, :] += plan.scale * weighted_sum(dx.swapaxes(-1, -2), q, seen_by).sum(axis=-3, keepdims=True)
    found = {"q": dq, "k": dk, "v": dv, "bias": dbias, "sinks": dsinks}
    return {name: rounded(found[name], x.dtype).reshape(x.shape) for name, x in given.items()}


def _seen(x: np.ndarray, seen: np.ndarray | None) -> np.ndarray:
    return x if seen is None else np.where(seen, x, 0.0)


def _sum_to(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sum over the axes along which an array of `shape` was broadcast to x."""
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1)
    return x.sum(axis=axes, keepdims=True)
