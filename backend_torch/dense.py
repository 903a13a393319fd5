"""The formula as it stands: every score at once, differentiable any number of times."""

from __future__ import annotations

import torch
from torch import Tensor

from .place import weight_index
from .quick import quick
from .random import uniform_at
from .visibility import readable, seen, visible


def dense(call, *, value: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, weights) of a call; memory (N, H, T, S). with value=False out is empty: v holds no values.

    s = scale * q·k;  s = softcap * tanh(s / softcap);  s += bias;  w = exp(s - m) / (sum exp(s - m) + exp(sink - m))
    out (N, H, T, Dv) and weights (N, H, T, S) in q's dtype, rounded once; lse (N, H, T) in the accumulation dtype.
    Keys that no query may attend to are taken out of k and v; masked scores are replaced, never multiplied away.
    """
    q, k, v, plan = call.q, call.k, call.v, call.plan
    N, H, T, _ = q.shape
    G, S = k.shape[1], k.shape[2]
    acc = accumulation(q.dtype)
    if readable(q) and q.numel() and k.numel():
        found = quick(call, acc, value)
        if found is not None:
            return _quickly(call, *found, acc, value)
    vis = visible(call.see, q.device, (0, N), (0, T), (0, S))
    if vis is not None:
        alive = seen(vis, G)
        if alive is not None:
            k = k.where(alive, 0.0)
            v = v.where(alive, 0.0) if value else v
    scores = grouped(q.to(acc), G) @ k.to(acc).mT
    scores = scores.reshape(N, H, T, S)
    if plan.softcap is None:
        scores = scores * plan.scale
    else:
        scores = plan.softcap * torch.tanh(scores * (plan.scale / plan.softcap))
    if call.see.bias is not None:
        scores = scores + call.see.bias.to(acc)
    if vis is not None:
        scores = scores.where(vis, -torch.inf)
    weights, lse = _softmax(scores, None if call.sinks is None else call.sinks.to(acc)[:, None, None])
    if not value:
        return v, lse, weights.to(q.dtype)
    out = (grouped(_thinned(call, weights, acc), G) @ v.to(acc)).reshape(N, H, T, v.shape[-1])
    return out.to(q.dtype), lse, weights.to(q.dtype)


def _quickly(
    call, s: Tensor, weights: Tensor, values: Tensor, acc: torch.dtype, value: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The same from scores and weights whose last column may be the sink."""
    q, S = call.q, call.k.shape[2]
    N, H, T, _ = q.shape
    lse = s.new_empty(0)
    if call.wants_lse:  # from the largest on: torch's derivative is exp(s - lse), and a large lse has no digits left
        top = s.detach().amax(-1, keepdim=True)
        lse = torch.logsumexp(s - top, -1) + top.squeeze(-1)
    if not value:
        return call.v, lse, weights[..., :S].to(q.dtype)
    used = weights
    if call.plan.dropout_rate > 0:
        used, values = _thinned(call, weights[..., :S], acc), values[:, :, :S]
    G = values.shape[1]
    out = torch.bmm(used.reshape(N * G, H // G * T, -1), values.reshape(N * G, -1, values.shape[-1]))
    return out.view(N, H, T, -1).to(q.dtype), lse, weights[..., :S].to(q.dtype)


def _thinned(call, weights: Tensor, acc: torch.dtype) -> Tensor:
    """Weights after dropout."""
    if call.plan.dropout_rate == 0:
        return weights
    (N, H, T, S), key = weights.shape, call.key
    n, i, j = (torch.arange(size, device=weights.device) for size in (N, T, S))
    return weights * kept(key, weight_index(key, n, H, i, j, T, S), call.plan.dropout_rate, acc)


def _softmax(scores: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights and log-sum-exp over the last axis; a row of -inf alone has weights 0 and lse -inf, gradients 0."""
    if scores.shape[-1]:
        top = scores.detach().amax(-1, keepdim=True)
    else:
        top = scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    if sink is not None:
        top = torch.maximum(top, sink.detach())
    top = top.where(top > -torch.inf, 0.0)
    powers = torch.exp(scores - top)
    total = powers.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - top)
    # Both selections stand before the division and the logarithm: their derivatives at 0 would be NaN.
    some = total > 0
    total = total.where(some, 1.0)
    lse = (total.log() + top).where(some, -torch.inf)
    return powers / total, lse.squeeze(-1)


def accumulation(dtype: torch.dtype) -> torch.dtype:
    """Scores and statistics: float32 at least, float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def grouped(x: Tensor, G: int) -> Tensor:
    """(N, H, T, D) -> (N, G, H/G * T, D): query heads of one key head become rows, so keys are not repeated."""
    N, H, T, D = x.shape
    return x if H == G else x.reshape(N, G, (H // G) * T, D)


def kept(key: Tensor, index: Tensor, rate: float, dtype: torch.dtype) -> Tensor:
    """Factor of each weight: 1 / (1 - rate) where `uniform[index] < 1 - rate`, else 0."""
    keep = 1.0 - rate
    return (uniform_at(key[:2], index) < keep).to(dtype) * (1.0 / keep if keep > 0 else 0.0)
