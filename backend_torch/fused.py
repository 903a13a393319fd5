"""torch's own fused attention, `F.scaled_dot_product_attention`, made to mean what the contract says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .dense import accumulation
from .visibility import Visibility, hull, seen, visible

_SDPA = F.scaled_dot_product_attention


def sdpa(call: Any) -> Tensor:
    """(N, H, T, Dv) of a call without soft cap, sinks, dropout or lse.

    Pure causality goes as torch's flag, which is top-left; every other restriction as one boolean mask, so nothing
    depends on how torch combines the two. Keys that no query may attend to are cut off or taken out of k and v:
    torch would multiply a NaN in them by 0. Head sizes that differ are filled with zeros up to the larger one, which
    changes no score, because only equal sizes reach torch's fused kernels on a CPU.
    """
    q, k, v, see, plan = call.q, call.k, call.v, call.see, call.plan
    T, S, D, Dv = q.shape[2], k.shape[2], q.shape[3], v.shape[3]
    if see.banded:
        start, stop = hull(see, T, S)
        if start != 0 or stop != S:
            k, v, see = k[:, :, start:stop], v[:, :, start:stop], _cut(see, start, stop)
    flag = False
    if plan.scale > 0 and _is_flag(see):  # on a CPU torch scales its fill of -inf too: NaN for 0, inf below
        flag = True
    mask = None
    if not flag and (see.banded or see.ragged or see.mask is not None):
        mask = visible(replace(see, bias=None), q.device, (0, q.shape[0]), (0, T), (0, k.shape[2]))
    if see.bias is not None:
        # In the accumulation dtype, never rounded down to that of q (a bias of q's own dtype stays what it is).
        # Detached where no gradient is wanted: the flag alone would keep torch from its fused kernels.
        bias = see.bias if call.bias_gradient else see.bias.detach()
        bias = bias if bias.dtype == q.dtype else bias.to(accumulation(q.dtype))
        mask = bias if mask is None else bias.where(mask, -torch.inf)
    alive = None if mask is None else seen(mask, k.shape[1])
    if alive is not None:
        k, v = k.where(alive, 0.0), v.where(alive, 0.0)
    if Dv != D and not q.is_cuda:
        q, k, v = (F.pad(x, (0, max(D, Dv) - x.shape[-1])) for x in (q, k, v))
    # The fused kernels need features next to each other; otherwise torch quietly takes its quadratic one.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    grouped = False  # set by a branch: while traced, a comparison of sizes is no bool
    if k.shape[1] != q.shape[1]:
        grouped = mask is None or not q.is_cuda
        if not grouped:  # no fused CUDA kernel has groups and a mask together
            k, v = (x.repeat_interleave(plan.group, 1) for x in (k, v))
    out = _SDPA(q, k, v, attn_mask=mask, is_causal=flag, scale=plan.scale, enable_gqa=grouped)
    if not torch.compiler.is_compiling() and out.grad_fn is not None:
        out.grad_fn.register_hook(_once)
    return out[..., :Dv] if Dv != D else out


def _cut(see: Visibility, start: int, stop: int) -> Visibility:
    """The same restrictions over keys start to stop alone."""

    def keys(x: Tensor | None) -> Tensor | None:
        return x if x is None or x.shape[-1] == 1 else x[..., start:stop]

    return Visibility(
        left=see.left,
        right=see.right,
        offset=see.offset - start,
        lengths=None if see.lengths is None else see.lengths - start,
        q_segments=see.q_segments,
        kv_segments=None if see.kv_segments is None else see.kv_segments[:, start:stop],
        mask=keys(see.mask),
        bias=keys(see.bias),
    )


def _is_flag(see: Visibility) -> bool:
    """Whether all there is to say is j <= i."""
    if see.left is not None or see.right is None or see.ragged or see.mask is not None or see.bias is not None:
        return False
    return not isinstance(see.offset, Tensor) and see.offset + see.right == 0


class _Once(torch.autograd.Function):
    """The identity, whose derivative says that there is none."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise second_derivative("sdpa")


def second_derivative(kernel: str) -> RuntimeError:
    return RuntimeError(f"attention's kernel={kernel!r} has no second derivative; kernel='dense' has all of them")


def _once(grads: tuple[Tensor | None, ...], _: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
    """Of the first backward pass: where it is itself recorded, mark its results."""
    if not torch.is_grad_enabled():
        return None
    return tuple(g if g is None or not g.requires_grad else _Once.apply(g) for g in grads)
