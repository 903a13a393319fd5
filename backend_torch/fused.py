"""torch's own fused attention, `F.scaled_dot_product_attention`, made to mean what the contract says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from .dense import accumulation, dense
from .tiles import FLASH, says_enough
from .visibility import Visibility, band_term, hull, last_sees_all, narrowed, readable, seen, tame, visible

_SDPA = F.scaled_dot_product_attention
_allowed = torch._C._get_flash_sdp_enabled


def sdpa(call: Any) -> Tensor | None:
    """(N, H, T, Dv) of a call without soft cap, sinks, dropout or lse; None where `recorded` gives none.

    Pure causality goes as torch's flag, which is top-left; every other restriction as one mask, so nothing depends on
    how torch combines the two. Keys that no query may attend to are cut off or, where they hold what a weight of 0
    would not silence, taken out of k and v: torch would multiply a NaN in them by 0. Head sizes that differ are filled
    with zeros up to the larger one, which changes no score, because only equal sizes reach torch's fused kernels on a
    CPU.
    """
    q, k, v, see, plan = call.q, call.k, call.v, call.see, call.plan
    T, S, D, Dv = q.shape[2], k.shape[2], q.shape[3], v.shape[3]
    looks = readable(q)
    start, stop = hull(see, T, S) if see.banded else (0, S)
    if looks:
        see, start, stop = narrowed(see, start, stop)
    if looks and stop == start:
        return dense(call)[0]  # nothing to see
    if start != 0 or stop != S:
        k, v, see = k[:, :, start:stop], v[:, :, start:stop], _cut(see, start, stop)
    flag = is_flag(see, plan.scale)
    mask, alive = None, None
    if not flag:
        mask, alive = _restricted(call, see, q, k, v, looks)
    if alive is not None:
        k, v = k.where(alive, 0.0), v.where(alive, 0.0)
    if Dv != D and not q.is_cuda:
        q, k, v = (F.pad(x, (0, max(D, Dv) - x.shape[-1])) for x in (q, k, v))
    # The fused kernels need features next to each other; otherwise torch quietly takes its quadratic one.
    q, k, v = side_by_side(q, k, v)
    grouped = False  # set by a branch: while traced, a comparison of sizes is no bool
    if k.shape[1] != q.shape[1]:
        grouped = mask is None or not q.is_cuda
        if not grouped:  # no fused CUDA kernel has groups and a mask together
            k, v = (x.repeat_interleave(plan.group, 1) for x in (k, v))
    if looks and call.gradient and not call.bias_gradient and _allowed() and forward_ad._current_level < 0:
        out = recorded(q, k, v, mask, flag, plan.scale)
        if out is None:
            return None
    else:
        out = _SDPA(q, k, v, attn_mask=mask, is_causal=flag, scale=plan.scale, enable_gqa=grouped)
        if not torch.compiler.is_compiling() and out.grad_fn is not None:
            mark(out)
    return out[..., :Dv] if Dv != D else out


def recorded(q: Tensor, k: Tensor, v: Tensor, term: Tensor | None, flag: bool, scale: float | None) -> Tensor | None:
    """The output of torch's fused CPU kernel, eager, where a gradient of q, k or v is wanted.

    None where its backward pass, which makes weights from lse, would not find them (see `tiles.ENOUGH`).
    """
    if term is not None and term.dtype == torch.bool:
        term = torch.zeros((), dtype=q.dtype).where(term, -torch.inf)
    out, lse = FLASH(q, k, v, 0.0, flag, attn_mask=term, scale=scale)
    if not says_enough(lse.detach()):
        return None
    mark(out)
    return out


def _restricted(
    call: Any, see: Visibility, q: Tensor, k: Tensor, v: Tensor, looks: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Mask or bias for torch's kernel, and which keys to take out of k and v: (n, G, S, 1), None for none."""
    N, T, S = q.shape[0], q.shape[2], k.shape[2]
    if see.bias is None:
        if looks and see.banded and see.mask is None and not see.ragged:
            return band_term(see, T, S, accumulation(q.dtype)), None  # between its ends a band leaves no key out
        mask = None
        if see.banded or see.ragged or see.mask is not None:
            mask = visible(see, q.device, (0, N), (0, T), (0, S))
    else:
        mask = None
        if see.banded or see.ragged or see.mask is not None:
            mask = visible(replace(see, bias=None), q.device, (0, N), (0, T), (0, S))
        # In the accumulation dtype, never rounded down to that of q (a bias of q's own dtype stays what it is).
        # Detached where no gradient is wanted: the flag alone would keep torch from its fused kernels.
        bias = see.bias if call.bias_gradient else see.bias.detach()
        bias = bias if bias.dtype == q.dtype else bias.to(accumulation(q.dtype))
        mask = bias if mask is None else bias.where(mask, -torch.inf)
    if mask is None or (looks and (last_sees_all(mask) or tame(k, v))):
        return mask, None
    return mask, seen(mask, k.shape[1])


def side_by_side(*arrays: Tensor) -> tuple[Tensor, ...]:
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in arrays)


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


def is_flag(see: Visibility, scale: float) -> bool:
    """Whether torch's flag says it all: j <= i. On a CPU it scales its fill of -inf too: NaN for 0, inf below."""
    if (
        not scale > 0
        or see.left is not None
        or see.right is None
        or see.ragged
        or see.mask is not None
        or see.bias is not None
    ):
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


def mark(out: Tensor) -> None:
    """Who asks for a second derivative of torch's kernel is told which kernel has one."""
    out.grad_fn.register_hook(_once)  # type: ignore[union-attr]


def _once(grads: tuple[Tensor | None, ...], _: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
    """Of the first backward pass: where it is itself recorded, mark its results."""
    if not torch.is_grad_enabled():
        return None
    return tuple(g if g is None or not g.requires_grad else _Once.apply(g) for g in grads)
