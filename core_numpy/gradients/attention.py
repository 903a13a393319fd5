"""The gradients of attention, derived by hand and evaluated in float64, in the parts and blocks of the forward pass.

With s the scores after the soft cap c and the bias, R_ij = kept_ij / (1 - rate), o_i = sum_j R_ij P_ij v_j:

    dv_j    = sum_i R_ij P_ij do_i
    dP_ij   = R_ij do_i . v_j
    ds_ij   = P_ij (dP_ij - sum_j P_ij dP_ij + dlse_i)       as dP_ij/ds_ik = P_ij (1[j=k] - P_ik), dlse_i/ds_ij = P_ij
    dsink   = sum_i P_i,sink (0 - sum_j P_ij dP_ij + dlse_i)    a key whose value is 0, of weight P_i,sink
    dbias   = ds, summed over the axes along which bias is broadcast
    dx_ij   = ds_ij (1 - tanh(x_ij / c)^2)                      x = scale * q.k; the factor is 1 without a cap
    dq_i    = scale * sum_j dx_ij k_j
    dk_j    = scale * sum_i dx_ij q_i                           summed over the query heads of the group, as dv_j is

All sums run over the visible pairs only, so a masked pair gives exactly 0 whatever stands there, in the cotangents too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..attention import QUIET, capped, merge_weights, scores, softmax
from ..contract.checks.attention import check_merge
from ..contract.checks.common import require_float, require_shape
from ..pairs import Pairs, arrange, block_of, blocks, dropout_factor, parts, split_heads, visible, weighted_sum
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
    return split_heads(np.asarray(x)[..., None] if column else x, pairs.plan, np.float64)


def _gradients(pairs: Pairs, arguments: dict[str, Any], **cotangents: Any) -> dict[str, np.ndarray]:
    """The gradients under the arguments' names, each with the shape and dtype of its argument."""
    given = {name: np.asarray(x) for name, x in arguments.items() if x is not None}
    found = gradients(pairs, **cotangents)
    return {name: rounded(found[name], x.dtype).reshape(x.shape) for name, x in given.items()}


def gradients(
    pairs: Pairs,
    *,
    out: np.ndarray | None = None,
    lse: np.ndarray | None = None,
    weights: np.ndarray | None = None,
    kept: list[np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """The formulas at the top of this file, block by block, for the cotangents `out`, `lse` and `weights`.

    All in the inner layout and in float64. kept: what `attend` kept, if it did.
    """
    plan = pairs.plan
    found = {"q": np.zeros((*plan.batch, plan.G, plan.group, plan.T, plan.D)), "k": np.zeros(pairs.k.shape)}
    for name, x in (("v", pairs.v), ("bias", pairs.bias), ("sinks", pairs.sinks)):
        if x is not None:
            found[name] = np.zeros(x.shape)
    made = iter(kept) if kept is not None else None
    with np.errstate(**QUIET):
        for place, part in parts(pairs):
            here = {name: place.of(x) for name, x in found.items()}
            do, dlse, dweights = (x if x is None else place.of(x) for x in (out, lse, weights))
            for rows, keys in blocks(part):
                _add_block(part, rows, keys, here, do, dlse, dweights, made)
    return found


def _add_block(
    part: Pairs,
    rows: slice,
    keys: slice,
    found: dict[str, np.ndarray],
    do: np.ndarray | None,
    dlse: np.ndarray | None,
    dweights: np.ndarray | None,
    made: Iterator[np.ndarray] | None,
) -> None:
    """Add what one block has to say to the gradients of its part."""
    plan, q, k = part.plan, part.q[..., rows, :], part.k[..., keys, :]
    seen = visible(part, rows, keys)
    seen_by = None if seen is None else seen.swapaxes(-1, -2)
    if made is None:
        P, m, total = softmax(scores(part, rows, keys), seen, part.sinks)
    else:
        P = next(made)
    if do is not None and part.v is not None:
        do, v = do[..., rows, :], part.v[..., keys, :]
        dP = do @ v.swapaxes(-1, -2)
        thinned = P
        if plan.dropout_rate > 0.0:
            R = dropout_factor(part, rows, keys)
            thinned, dP = P * R, R * dP
        found["v"][..., keys, :] += _over_group(weighted_sum(thinned.swapaxes(-1, -2), do, seen_by))
    else:
        assert dweights is not None
        dP = dweights[..., rows, keys].copy()
    mean = _mean(P, dP, seen)
    shift = -mean if dlse is None else dlse[..., rows, :] - mean
    ds = np.multiply(P, np.add(dP, shift, out=dP), out=dP)
    if seen is not None and not np.isfinite(shift).all():
        np.copyto(ds, 0.0, where=~seen)
    if part.sinks is not None:
        P_sink = np.exp(part.sinks - m) / np.where(total == 0.0, 1.0, total)
        found["sinks"] += _sum_to(P_sink * shift, part.sinks.shape)
    if part.bias is not None:
        dbias = block_of(found["bias"], rows, keys)
        dbias += _sum_to(ds, dbias.shape)
    dx = ds
    if plan.softcap is not None:
        dx = _seen(ds * (1.0 - (capped(part, rows, keys) / plan.softcap) ** 2), seen)
    found["q"][..., rows, :] = plan.scale * weighted_sum(dx, k, seen)
    found["k"][..., keys, :] += plan.scale * _over_group(weighted_sum(dx.swapaxes(-1, -2), q, seen_by))


def _mean(P: np.ndarray, dP: np.ndarray, seen: np.ndarray | None) -> np.ndarray:
    """sum_j P_ij dP_ij over the pairs that are seen, a column; where a pair that is not holds NaN or inf, dP gets 0."""
    mean = np.einsum("...ij,...ij->...i", P, dP)[..., None]
    if seen is None or np.isfinite(mean).all():
        return mean
    np.copyto(dP, 0.0, where=~seen)
    return np.einsum("...ij,...ij->...i", P, dP)[..., None]


def _over_group(x: np.ndarray) -> np.ndarray:
    """The sum over the query heads that share a key/value head."""
    return x.sum(axis=-3, keepdims=True)


def _seen(x: np.ndarray, seen: np.ndarray | None) -> np.ndarray:
    return x if seen is None else np.where(seen, x, 0.0)


def _sum_to(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sum over the axes along which an array of `shape` was broadcast to x."""
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1)
    return x.sum(axis=axes, keepdims=True)
