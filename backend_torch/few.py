"""Few scores: the formula in torch's shortest operations, its weights kept for a backward pass of its own.

    s = scale * q·k, soft-capped, + term;  w = softmax(s);  w /= 1 + max(w) exp(sink - max(s));  out = w v
    dv = w.T dO;  ds = w * (dO v.T - sum_j w dO v.T);  dq = scale * ds k;  dk = scale * ds.T q;  dterm = ds
    dsink = -sum ds

A sink's share is what its row's weights lack to 1, and max(w) = exp(max(s)) / sum exp(s) gives it without another pass.

Query heads of one key head are rows of one product. Where the backward pass is itself recorded it is the formula's own,
so there are derivatives of any order.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .visibility import Visibility, band_term

# What a product without a term to add is given for one: it is not read.
_UNREAD: dict[torch.dtype, Tensor] = {dtype: torch.empty(1, dtype=dtype) for dtype in (torch.float32, torch.float64)}


def few(
    q: Tensor, k: Tensor, v: Tensor, term: Tensor | None, sinks: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """(N, H, T, D) of a call on the CPU in float32 or float64 whose every query sees a key, and every key is seen.

    term: None; `future`; or a bias that broadcasts to (1, H, T, S), where N is 1 and H is G. sinks (H,) in q's dtype.
    """
    if torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad
        or (term is not None and term.requires_grad) or (sinks is not None and sinks.requires_grad)
    ):  # fmt: skip
        return _Few.apply(q, k, v, term, sinks, scale, softcap)
    return _forward(q, k, v, term, sinks, scale, softcap, keep=False)[0]


@lru_cache(maxsize=16)
def future(group: int, T: int, S: int, dtype: torch.dtype) -> Tensor:
    """(group * T, S): 0 where j <= i and -inf elsewhere, for each of the query heads of one key head."""
    with torch.inference_mode(False):
        return band_term(Visibility(right=0), T, S, dtype)[0, 0].repeat(group, 1)


def _merged(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(N, G, ...) as one batch axis of matrices; query heads become rows of their key head."""
    N, G, S, D = k.shape
    if N == 1 and q.shape[1] == G:
        return q.squeeze(0), k.squeeze(0), v.squeeze(0)
    return q.reshape(N * G, -1, D), k.reshape(N * G, S, D), v.reshape(N * G, S, D)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, term: Tensor | None, sinks: Tensor | None, scale: float, softcap: float | None,
    *, keep: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """out, weights (N * G, H / G * T, S), tanh of the soft cap where `keep` says that it is asked for."""
    rows, keys, values = _merged(q, k, v)
    bent, unread = None, _UNREAD[q.dtype]
    if softcap is not None:
        bent = torch.baddbmm(unread, rows, keys.mT, beta=0.0, alpha=scale / softcap).tanh_()
        place = None if keep else bent
        if term is None:
            s = torch.mul(bent, softcap, out=place)
        else:
            s = torch.add(_flat(term), bent, alpha=softcap, out=place)
    elif term is None:
        s = torch.baddbmm(unread, rows, keys.mT, beta=0.0, alpha=scale)
    else:
        s = torch.baddbmm(_flat(term), rows, keys.mT, alpha=scale)
    if sinks is None:
        weights = torch._softmax(s, -1, False, out=s)
    else:
        above = torch.exp(sinks.unsqueeze(-1) - s.amax(-1).view(q.shape[:3]))
        weights = torch._softmax(s, -1, False, out=s)
        weights.div_(weights.amax(-1, keepdim=True).mul_(above.view(*s.shape[:2], 1)).add_(1.0))
    return torch.bmm(weights, values).view(q.shape), weights, bent


def _flat(term: Tensor) -> Tensor:
    return term if term.dim() == 2 else term.squeeze(0)


class _Few(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, term: Tensor | None, sinks: Tensor | None, scale: float,
        softcap: float | None,
    ) -> Tensor:  # fmt: skip
        out, weights, bent = _forward(q, k, v, term, sinks, scale, softcap, keep=True)
        ctx.save_for_backward(q, k, v, term, sinks, weights, bent)
        ctx.numbers = scale, softcap
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        step: Any = _recorded if torch.is_grad_enabled() else _backward
        return *step(grad, *ctx.saved_tensors, *ctx.numbers, ctx.needs_input_grad), None, None


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, term: Tensor | None, sinks: Tensor | None, weights: Tensor,
    bent: Tensor | None, scale: float, softcap: float | None, needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    rows, keys, values = _merged(q, k, v)
    grads, unread, dsinks, dterm = grad.reshape(rows.shape), _UNREAD[q.dtype], None, None
    ds = torch._softmax_backward_data(torch.bmm(grads, values.mT), weights, -1, q.dtype)
    if sinks is not None and needed[4]:
        dsinks = ds.view(*q.shape[:3], -1).sum((0, 2, 3)).neg_()
    if term is not None and needed[3]:
        dterm = ds.view(1, *q.shape[1:3], -1).sum_to_size(term.shape)
    if bent is not None:
        ds = torch.ops.aten.tanh_backward(ds, bent)
    dq = torch.baddbmm(unread, ds, keys, beta=0.0, alpha=scale).view(q.shape)
    dk = torch.baddbmm(unread, ds.mT, rows, beta=0.0, alpha=scale).view(k.shape)
    return dq, dk, torch.bmm(weights.mT, grads).view(v.shape), dterm, dsinks


def _recorded(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, term: Tensor | None, sinks: Tensor | None, _: Tensor,
    __: Tensor | None, scale: float, softcap: float | None, needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The backward pass as torch's own of the formula, for derivatives of it."""
    rows, keys, values = _merged(q, k, v)
    s = rows @ keys.mT * scale
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if term is not None:
        s = s + _flat(term)
    if sinks is not None:
        s = torch.cat([s, sinks[:, None].expand(q.shape[:3]).reshape(*s.shape[:2], 1)], -1)
    out = (torch.softmax(s, -1)[..., : k.shape[2]] @ values).view(q.shape)
    wanted = [x for x, need in zip((q, k, v, term, sinks), needed, strict=False) if need and x is not None]
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
    return tuple(next(found) if need else None for need in needed[:5])
