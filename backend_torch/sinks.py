"""Sinks beside torch's fused CPU kernel, in one piece: its denominator grows by exp(sink), so its results shrink.

    lse' = log(exp(lse) + exp(sink));  out' = exp(lse - lse') out

Backward the kernel's own pass takes out' and lse' for out and lse: it makes the weights exp(s - lse'), and dO . O' is
the sum over all columns, that of the sink, whose value is 0, included.

    dsink = -sum exp(sink - lse') (dO . O')
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .fused import second_derivative
from .tiles import FLASH, FLASH_BACKWARD, says_enough


def with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, flag: bool, scale: float) -> Tensor | None:
    """(N, H, T, D) of a call whose every query sees a key, whose features lie side by side, and which has no lse.

    flag: j <= i, as torch's. float32 and float64. None where the logarithms do not say enough (`tiles.ENOUGH`).
    """
    sinks = sinks if sinks.dtype == q.dtype else sinks.to(q.dtype)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or sinks.requires_grad):
        out, joint = _Sinks.apply(q, k, v, sinks, flag, scale)
        return out if says_enough(joint) else None
    out, lse = FLASH(q, k, v, 0.0, flag, scale=scale)
    if not says_enough(lse):
        return None
    return out.mul_(torch.sigmoid(lse - sinks.unsqueeze(-1)).unsqueeze(-1))


class _Sinks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, flag: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse = FLASH(q, k, v, 0.0, flag, scale=scale)
        joint = torch.logaddexp(lse, sinks.unsqueeze(-1))
        out.mul_(torch.exp(lse - joint).unsqueeze(-1))
        ctx.save_for_backward(q, k, v, sinks, out, joint)
        ctx.numbers = flag, scale
        ctx.mark_non_differentiable(joint)
        ctx.set_materialize_grads(False)
        return out, joint

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
        # Recorded, it has to say that it has no derivative.
        step: Any = _Backward.apply if torch.is_grad_enabled() else _backward
        return *step(grad, *ctx.saved_tensors, *ctx.numbers, ctx.needs_input_grad[3]), None, None


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, out: Tensor, joint: Tensor, flag: bool, scale: float,
    to_sinks: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    dsinks = None
    if to_sinks:
        share = torch.exp(sinks.unsqueeze(-1) - joint)
        dsinks = share.mul_(torch.linalg.vecdot(grad, out)).sum((0, 2)).neg_()
    return *FLASH_BACKWARD(grad, q, k, v, out, joint, 0.0, flag, scale=scale), dsinks


class _Backward(torch.autograd.Function):
    """The first derivative, which has none itself."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor | None, ...]:
        return _backward(*arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise second_derivative("blockwise")
