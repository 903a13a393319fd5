"""Attention in torch. Rules: core_numpy.attention. Arguments are checked here, once; kernels.py chooses a kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from core_numpy.contract.checks.attention import AttentionPlan, attention_plan, check_attention_values, check_merge
from core_numpy.contract.checks.kernels import Kernel, check_kernel

from .arrays import require_tensors, values
from .dense import accumulation, dense
from .flex import flex
from .fused import sdpa
from .kernels import KERNELS, Call, choose, explain
from .known import Form, Known, bare, keep, look
from .place import placed_key
from .registered import blockwise
from .short import short
from .visibility import Visibility

# The keyword arguments of `attention`, in their order.
Options = tuple[Any, ...]

_autocast = torch._C._is_any_autocast_enabled


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    q_offset: int | Tensor | None = None,
    kv_lengths: Tensor | None = None,
    q_segments: Tensor | None = None,
    kv_segments: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Tensor | None = None,
    kernel: str = "auto",
) -> Tensor:
    """softmax(scale * q k^T + bias, over the keys that a query may attend to) v.

    q (..., H, T, D), k (..., G, S, D), v (..., G, S, Dv) -> (..., H, T, Dv) in q's dtype. Rules:
    core_numpy.attention. Native: torch's fused kernels where they can say the arguments (`explain_kernel`), in
    every case the same meaning; works under torch.compile, torch.export and torch.func. Autocast does not reach
    inside: q's dtype decides. On a CPU float16 is computed in float32 throughout.
    """
    name = known = None
    if not is_compiling():
        if (
            mask is bias is window is q_offset is kv_lengths is q_segments is kv_segments is sinks is None
            and scale is softcap is dropout_key is None and type(dropout_rate) is float and dropout_rate == 0.0
            and kernel == "auto"
        ):  # fmt: skip
            out = bare(q, k, v, causal)
            if out is not None:
                return out
        name, known = look(
            q, k, v, False, mask, bias, causal, window, q_offset, kv_lengths, q_segments, kv_segments, sinks, scale,
            softcap, dropout_rate, dropout_key, kernel,
        )  # fmt: skip
        if known is not None and known.short is not None and not _autocast():
            out = known.short(q, k, v, mask, bias, kv_lengths, sinks)
            if out is not None:
                return out
    options = (
        mask, bias, causal, window, q_offset, kv_lengths, q_segments, kv_segments, sinks, scale, softcap, dropout_rate,
        dropout_key, kernel,
    )  # fmt: skip
    call, chosen = _asked(q, k, v, False, options, name, known)
    if known is None and name is not None and not _autocast():
        # The short way from the first call on: `torch.utils.checkpoint` wants a call again as it was.
        _, known = look(q, k, v, False, *options)
        out = None if known is None or known.short is None else known.short(q, k, v, mask, bias, kv_lengths, sinks)
        if out is not None:
            return out
    out, _ = _as_given(_run, chosen, call)
    return out if q.dim() == 4 else out.reshape(*q.shape[:-1], v.shape[-1])


def attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    q_offset: int | Tensor | None = None,
    kv_lengths: Tensor | None = None,
    q_segments: Tensor | None = None,
    kv_segments: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Tensor | None = None,
    kernel: str = "auto",
) -> Tensor:
    """The weights of `attention`, per head, before dropout: (..., H, T, S) in q's dtype. Rules: core_numpy.attention.

    They are what they are, whole, so every kernel's weights come from the formula itself.
    """
    options = (
        mask, bias, causal, window, q_offset, kv_lengths, q_segments, kv_segments, sinks, scale, softcap, dropout_rate,
        dropout_key, kernel,
    )  # fmt: skip
    call, _ = _asked(q, k, None, False, options)
    weights = _as_given(partial(dense, value=False), call)[2]
    return weights.reshape(call.plan.scores_shape)


def attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    q_offset: int | Tensor | None = None,
    kv_lengths: Tensor | None = None,
    q_segments: Tensor | None = None,
    kv_segments: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Tensor | None = None,
    kernel: str = "auto",
) -> tuple[Tensor, Tensor]:
    """(out, lse): `attention` and the logarithm of its denominators. Rules: core_numpy.attention.

    out (..., H, T, Dv) in q's dtype; lse (..., H, T) float32, float64 for float64. Both have gradients.
    """
    options = (
        mask, bias, causal, window, q_offset, kv_lengths, q_segments, kv_segments, sinks, scale, softcap, dropout_rate,
        dropout_key, kernel,
    )  # fmt: skip
    call, chosen = _asked(q, k, v, True, options, *_remembered(q, k, v, True, options))
    out, lse = _as_given(_run, chosen, call)
    return out.reshape(*q.shape[:-1], v.shape[-1]), lse.reshape(q.shape[:-1])


def merge_attention(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(out, lse) over all keys from those over parts of the keys. Rules: core_numpy.attention.

    lse = logsumexp(lses);  out = sum_i exp(lse_i - lse) * out_i. Each out (..., H, T, Dv), each lse (..., H, T).
    """
    check_merge(outs, lses)
    for out, lse in zip(outs, lses, strict=True):
        require_tensors(outs=out, lses=lse)
    acc = accumulation(outs[0].dtype)
    logs = torch.stack([x.to(acc) for x in lses])
    top = logs.detach().amax(0)
    top = top.where(top > -torch.inf, 0.0)
    powers = torch.exp(logs - top)
    total = powers.sum(0)
    some = total > 0  # selected before division and logarithm, whose derivatives at 0 would be NaN
    total = total.where(some, 1.0)
    parts = torch.stack([x.to(acc) for x in outs])
    out = ((powers / total)[..., None] * parts).sum(0)
    return out.to(outs[0].dtype), (total.log() + top).where(some, -torch.inf)


def available_kernels() -> dict[str, Kernel]:
    """Name -> what the kernel cannot serve, whether it differentiates twice, how far it shields from NaN."""
    return dict(KERNELS)


def explain_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    q_offset: int | Tensor | None = None,
    kv_lengths: Tensor | None = None,
    q_segments: Tensor | None = None,
    kv_segments: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Tensor | None = None,
    kernel: str = "auto",
) -> str:
    """One sentence per kernel: which `attention` would choose for these arguments, and why not the others."""
    options = (
        mask, bias, causal, window, q_offset, kv_lengths, q_segments, kv_segments, sinks, scale, softcap, dropout_rate,
        dropout_key, kernel,
    )  # fmt: skip
    call, _ = _asked(q, k, v, False, options)
    return explain(kernel, call)


def _remembered(q: Any, k: Any, v: Any, wants_lse: bool, options: Options) -> tuple[Form | None, Known | None]:
    """The form of an eager call, and what is known of it."""
    if is_compiling():
        return None, None
    return look(q, k, v, wants_lse, *options)


def _asked(
    q: Tensor, k: Tensor, v: Tensor | None, wants_lse: bool, options: Options, name: Form | None = None,
    known: Known | None = None,
) -> tuple[Call, str]:  # fmt: skip
    """Check, merge the batch axes into one, and choose the kernel."""
    (
        mask, bias, causal, window, q_offset, kv_lengths, q_segments, kv_segments, sinks, scale, softcap, dropout_rate,
        dropout_key, kernel,
    ) = options  # fmt: skip
    if known is not None:
        plan, left, right = known.plan, known.left, known.right
        check_attention_values(plan.S, bias=bias, kv_lengths=kv_lengths, sinks=sinks, values=values)
    else:
        require_tensors(
            q=q, k=k, v=v, mask=mask, bias=bias, q_offset=q_offset, kv_lengths=kv_lengths, q_segments=q_segments,
            kv_segments=kv_segments, sinks=sinks, dropout_key=dropout_key,
        )  # fmt: skip
        plan = attention_plan(
            q, k, v, mask=mask, bias=bias, causal=causal, window=window, q_offset=q_offset, kv_lengths=kv_lengths,
            q_segments=q_segments, kv_segments=kv_segments, sinks=sinks, scale=scale, softcap=softcap,
            dropout_rate=dropout_rate, dropout_key=dropout_key, values=values,
        )  # fmt: skip
        check_kernel(kernel, KERNELS)
        left, right = _band(plan)
    offset: int | Tensor = 0
    if left is not None or right is not None:
        offset = q_offset.reshape(-1) if plan.q_offset is None else plan.q_offset
    if q.dim() == 4:
        mask, bias = (x if x is None or x.dim() == 4 else x[None, None] for x in (mask, bias))
    else:
        N = math.prod(plan.batch)
        q, k = q.reshape(N, plan.H, plan.T, plan.D), k.reshape(N, plan.G, plan.S, plan.D)
        v = None if v is None else v.reshape(N, plan.G, plan.S, plan.Dv)
        mask, bias = _merge(mask, plan), _merge(bias, plan)
        kv_lengths = None if kv_lengths is None else kv_lengths.reshape(N)
        q_segments = None if q_segments is None else q_segments.reshape(N, plan.T)
        kv_segments = None if kv_segments is None else kv_segments.reshape(N, plan.S)
        sinks = None if sinks is None else sinks.reshape(plan.H)
    see = Visibility(left, right, offset, kv_lengths, q_segments, kv_segments, mask, bias)
    key = placed_key(dropout_key, plan.H, plan.T, plan.S)
    call = Call(q, k, q[..., :0] if v is None else v, see, sinks, key, plan, wants_lse)
    if known is not None:
        return call, known.kernel
    chosen = choose(kernel, call)
    keep(name, Known(plan, chosen, left, right, short(call, chosen, kernel)), call.q, call.k, call.v, options)
    return call, chosen


def _band(plan: AttentionPlan) -> tuple[int | None, int | None]:
    """The sides of the band, causality included; None for one that restricts nothing."""
    left, right = plan.window or (None, None)
    right = 0 if plan.causal else right
    # Not while traced: there a comparison of lengths would tie the program to them.
    if plan.q_offset is not None and not is_compiling():
        if left is not None and left >= plan.T - 1 + plan.q_offset:
            left = None
        if right is not None and right >= plan.S - 1 - plan.q_offset:
            right = None
    return left, right


def _merge(x: Tensor | None, plan: AttentionPlan) -> Tensor | None:
    """A mask or bias with its batch axes merged: (N or 1, H or 1, T or 1, S or 1)."""
    if x is None:
        return None
    if x.dim() == 2:
        return x[None, None]
    rest, N = x.shape[len(plan.batch) :], 1
    if any(size != 1 for size in x.shape[: len(plan.batch)]):
        x, N = x.expand(*plan.batch, *rest), math.prod(plan.batch)
    return x.reshape(N, *((1,) * (3 - len(rest))), *rest)


def _run(kernel: str, call: Call) -> tuple[Tensor, Any]:
    if call.empty:
        return dense(call)[:2]  # empty sums: there is nothing for a kernel to do
    if kernel != "dense" and call.wide:
        q, k, v = (x.float() for x in (call.q, call.k, call.v))
        out, lse = _run(kernel, replace(call, q=q, k=k, v=v))
        return out.to(call.q.dtype), lse
    if kernel == "sdpa":
        fused = sdpa(call)
        return (blockwise(call)[0] if fused is None else fused), None
    if kernel == "blockwise":
        return blockwise(call)
    return flex(call) if kernel == "flex" else dense(call)[:2]


def _as_given(compute: Callable[..., Any], *arguments: Any) -> Any:
    """compute(*arguments), the last of them a Call, without autocast.

    It would round float32 down although the contract says that q's dtype decides.
    """
    device = arguments[-1].q.device.type
    if _autocast() and device != "meta":
        with torch.autocast(device, enabled=False):
            return compute(*arguments)
    return compute(*arguments)
