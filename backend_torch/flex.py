"""FlexAttention on CUDA: torch compiles a kernel for the band, lengths, segments, soft cap and sinks of a call."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor


def flex(call: Any, attend: Callable[..., Any] | None = None) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call without mask, bias and dropout; attend: FlexAttention, compiled unless given.

    Sinks join afterwards, through lse: out *= exp(lse - lse'), lse' = log(exp(lse) + exp(sink)).
    """
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

    q, k, v, see, plan = call.q, call.k, call.v, call.see, call.plan
    allowed = _allowed(see, q.device)
    mask = None
    if allowed is not None:
        N = q.shape[0] if see.ragged else None
        mask = create_block_mask(allowed, N, None, q.shape[2], k.shape[2], device=q.device)
        if see.lengths is not None or see.kv_segments is not None:
            # Inside a partly visible block the kernel multiplies every value: unseen ones are taken out.
            alive = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=q.device)
            if see.lengths is not None:
                alive &= torch.arange(k.shape[2], device=q.device) < see.lengths[:, None]
            if see.kv_segments is not None:
                ids = zip(see.kv_segments.contiguous(), see.q_segments.contiguous(), strict=True)
                alive &= torch.stack([torch.isin(theirs, mine) for theirs, mine in ids]) & (see.kv_segments >= 0)
            k, v = (x.where(alive[:, None, :, None], 0.0) for x in (k, v))
    out, aux = (attend or _compiled())(
        q, k, v, score_mod=_cap(plan.softcap), block_mask=mask, scale=plan.scale,
        enable_gqa=q.shape[1] != k.shape[1], return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    lse = aux.lse
    if call.sinks is not None:
        joint = torch.logaddexp(lse, call.sinks.to(lse.dtype)[:, None])
        out = (out * torch.exp(lse - joint.where(joint > -torch.inf, 0.0))[..., None]).to(q.dtype)
        lse = joint
    return out, lse


@cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


def _cap(softcap: float | None) -> Callable[..., Tensor] | None:
    if softcap is None:
        return None
    return lambda score, b, h, i, j: softcap * torch.tanh(score / softcap)


def _allowed(see: Any, device: torch.device) -> Callable[..., Tensor] | None:
    """The condition on (batch, head, query, key), or None where all is visible."""
    if not see.banded and not see.ragged:
        return None
    offset = see.offset

    def allowed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        yes = j >= 0
        distance = j - i - (offset[b] if isinstance(offset, Tensor) else offset)
        if see.left is not None:
            yes = yes & (distance >= -see.left)
        if see.right is not None:
            yes = yes & (distance <= see.right)
        if see.lengths is not None:
            yes = yes & (j < see.lengths[b])
        if see.q_segments is not None:
            mine = see.q_segments[b, i]
            yes = yes & (mine == see.kv_segments[b, j]) & (mine >= 0)
        return yes

    return allowed
