"""Attention: the public functions. What each argument means is said once, in core_numpy.attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from core_numpy.contract.checks.attention import AttentionPlan, attention_plan, check_merge
from core_numpy.contract.checks.common import dtype_name, require_x64
from core_numpy.contract.checks.kernels import Kernel, check_kernel, refuse_kernel

from .arrays import require_arrays, values
from .blocks import FAR, Spec, Terms, fold_band
from .blockwise import blockwise
from .blockwise_scores import accumulation
from .dense import dense
from .kernels import KERNELS, WHAT, Asked, fastest, platform_of, reasons
from .place import placed_key


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    q_offset: int | jax.Array | None = None,
    kv_lengths: jax.Array | None = None,
    q_segments: jax.Array | None = None,
    kv_segments: jax.Array | None = None,
    sinks: jax.Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    kernel: str = "auto",
) -> jax.Array:
    """Each query's weighted mean of the values. Rules: core_numpy.attention.

    q (..., H, T, D), k (..., G, S, D), v (..., G, S, Dv) -> (..., H, T, Dv) in q's dtype, computed in float32 at least.
    NumPy arrays are taken too. One compiled call; traces under jit, grad, vmap, checkpoint and export. Under a trace,
    and on an accelerator, values are not checked. Products are full float32 unless `jax.default_matmul_precision` says
    otherwise.
    """
    call, arrays = _door(
        q, k, v, "out", mask=mask, bias=bias, causal=causal, window=window, q_offset=q_offset, kv_lengths=kv_lengths,
        q_segments=q_segments, kv_segments=kv_segments, sinks=sinks, scale=scale, softcap=softcap,
        dropout_rate=dropout_rate, dropout_key=dropout_key, kernel=kernel,
    )  # fmt: skip
    return _run(call, arrays)[0]


def attention_weights(
    q: jax.Array,
    k: jax.Array,
    *,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    q_offset: int | jax.Array | None = None,
    kv_lengths: jax.Array | None = None,
    q_segments: jax.Array | None = None,
    kv_segments: jax.Array | None = None,
    sinks: jax.Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    kernel: str = "auto",
) -> jax.Array:
    """The weights of `attention`, per head and before dropout. Rules: core_numpy.attention.

    q (..., H, T, D), k (..., G, S, D) -> (..., H, T, S) in q's dtype.
    """
    call, arrays = _door(
        q, k, None, "weights", mask=mask, bias=bias, causal=causal, window=window, q_offset=q_offset,
        kv_lengths=kv_lengths, q_segments=q_segments, kv_segments=kv_segments, sinks=sinks, scale=scale,
        softcap=softcap, dropout_rate=dropout_rate, dropout_key=dropout_key, kernel=kernel,
    )  # fmt: skip
    return _run(call, arrays)[0]


def attention_with_lse(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    q_offset: int | jax.Array | None = None,
    kv_lengths: jax.Array | None = None,
    q_segments: jax.Array | None = None,
    kv_segments: jax.Array | None = None,
    sinks: jax.Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    kernel: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """The output of `attention` and the logarithm of each query's whole denominator. Rules: core_numpy.attention.

    Shapes as in `attention`; lse (..., H, T), float32, or float64 for float64 inputs, with a gradient.
    """
    call, arrays = _door(
        q, k, v, "lse", mask=mask, bias=bias, causal=causal, window=window, q_offset=q_offset, kv_lengths=kv_lengths,
        q_segments=q_segments, kv_segments=kv_segments, sinks=sinks, scale=scale, softcap=softcap,
        dropout_rate=dropout_rate, dropout_key=dropout_key, kernel=kernel,
    )  # fmt: skip
    out, lse = _run(call, arrays)
    return out, lse


def merge_attention(outs: Sequence[jax.Array], lses: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Output and lse over all keys, from those over parts of the keys. Rules: core_numpy.attention.

    outs: (..., T, Dv) each, lses: (..., T) each -> (out, lse) of the same shapes; out in the dtype of outs.
    """
    check_merge(outs, lses)
    for name, parts in (("outs", outs), ("lses", lses)):
        for n, x in enumerate(parts):
            require_x64(f"{name}[{n}]", dtype_name(x), jax.config.jax_enable_x64)  # type: ignore[attr-defined]
    return _merge(tuple(outs), tuple(lses))


@jax.jit
def _merge(outs: tuple[jax.Array, ...], lses: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    acc = accumulation(outs[0].dtype)
    parts = jnp.stack([x.astype(acc) for x in lses])
    m = jax.lax.stop_gradient(parts.max(0))
    m = jnp.where(m == -jnp.inf, 0, m)
    powers = jnp.exp(parts - m)
    total = powers.sum(0)
    dead = total == 0
    total = jnp.where(dead, 1, total)
    shares = (powers / total)[..., None]
    # A part that saw no key counts nothing, whatever it holds: 0 * NaN would.
    out = sum(jnp.where(w == 0, 0, w * x.astype(acc)) for w, x in zip(shares, outs, strict=True))
    return jnp.asarray(out).astype(outs[0].dtype), jnp.where(dead, -jnp.inf, m + jnp.log(total))


def available_kernels() -> dict[str, Kernel]:
    """The kernels of this backend by name, with what each cannot serve; "cudnn" serves on an NVIDIA GPU only."""
    return dict(KERNELS)


def explain_kernel(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    q_offset: int | jax.Array | None = None,
    kv_lengths: jax.Array | None = None,
    q_segments: jax.Array | None = None,
    kv_segments: jax.Array | None = None,
    sinks: jax.Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    kernel: str = "auto",
) -> str:
    """Which kernel `attention` would take for these arguments on this device, and why: one sentence per kernel."""
    call, _ = _door(
        q, k, v, "out", mask=mask, bias=bias, causal=causal, window=window, q_offset=q_offset, kv_lengths=kv_lengths,
        q_segments=q_segments, kv_segments=kv_segments, sinks=sinks, scale=scale, softcap=softcap,
        dropout_rate=dropout_rate, dropout_key=dropout_key, kernel=kernel,
    )  # fmt: skip
    lines = []
    for name in KERNELS:
        why = reasons(name, call.asked)
        if name == call.kernel:
            lines.append(f"{name}: chosen; {WHAT[name]}.")
        else:
            lines.append(f"{name}: cannot serve: {'; '.join(why)}." if why else f"{name}: serves too; {WHAT[name]}.")
    return "\n".join(lines)


@dataclass(frozen=True)
class Call:
    """What is static in one call: the key under which it is compiled."""

    asked: Asked
    kernel: str
    highest: bool

    @property
    def plan(self) -> AttentionPlan:
        return self.asked.plan


def _door(q: Any, k: Any, v: Any, wants: str, *, kernel: str, **options: Any) -> tuple[Call, Terms]:
    """Check everything, choose the kernel, and part what is static from the arrays."""
    check_kernel(kernel, KERNELS)
    require_arrays(q=q, k=k, v=v, **options)
    plan = attention_plan(q, k, v, **options, values=values)
    named = ("mask", "bias", "q_offset", "kv_lengths", "q_segments", "kv_segments", "sinks")
    arrays = {"q": q, "k": k, "v": v} | {name: options[name] for name in named}
    arrays["q_offset"] = options["q_offset"] if plan.q_offset is None else None
    if plan.dropout_rate > 0 and wants != "weights":
        arrays["dropout_key"] = placed_key(options["dropout_key"])
    arrays = {name: x for name, x in arrays.items() if x is not None}
    for name, x in arrays.items():
        require_x64(name, dtype_name(x), jax.config.jax_enable_x64)  # type: ignore[attr-defined]
    asked = Asked(plan, frozenset(arrays) - {"q", "k", "v"}, wants, platform_of(q))
    if kernel == "auto":
        kernel = fastest(asked)
    else:
        refuse_kernel(kernel, reasons(kernel, asked))
    plan, arrays = _offset_apart(plan, arrays, isinstance(q, jax.core.Tracer))
    own_precision = jax.config.jax_default_matmul_precision is None  # type: ignore[attr-defined]
    return Call(replace(asked, plan=plan), kernel, own_precision), arrays


def _offset_apart(plan: AttentionPlan, arrays: dict[str, Any], traced: bool) -> tuple[AttentionPlan, dict[str, Any]]:
    """A q_offset that grows from call to call, as in decoding, must not compile each call anew: it becomes an array.

    0 and S - T are the usual static ones, and inside a trace nothing is compiled anew.
    """
    offset = plan.q_offset
    restricts = plan.causal or plan.window is not None
    if offset is None and not restricts:
        return plan, {name: x for name, x in arrays.items() if name != "q_offset"}
    if offset is None or traced or offset == 0 or (offset == plan.S - plan.T and plan.T > 1):
        return plan, arrays
    if not restricts:
        return replace(plan, q_offset=0), arrays
    return replace(plan, q_offset=None), arrays | {"q_offset": np.asarray(min(max(offset, -FAR), FAR), np.int32)}


@partial(jax.jit, static_argnums=0)
def _run(call: Call, arrays: Terms) -> tuple[jax.Array, ...]:
    """Lay the arrays out by batch, key/value head and group, run the kernel, and give the caller's shapes back."""
    plan, spec = call.plan, _spec(call)
    q = arrays["q"].reshape(spec.B, spec.G, spec.r, spec.T, spec.D)
    k = arrays["k"].reshape(spec.B, spec.G, spec.S, spec.D)
    v = arrays["v"].reshape(spec.B, spec.G, spec.S, spec.Dv) if "v" in arrays else None
    terms = _terms(call, spec, arrays)
    if v is None:
        return (dense(spec, q, k, None, terms)[2].astype(q.dtype).reshape(plan.scores_shape),)
    if call.kernel in ("xla", "cudnn"):
        return (_library(call, spec, q, k, v),)
    if call.kernel == "dense":
        out, lse, _ = dense(spec, q, k, v, terms)
    else:
        out, lse = blockwise(spec, q, k, v, terms)
    shape = plan.scores_shape[:-1]
    return out.reshape(*shape, spec.Dv), lse.reshape(shape)


def _spec(call: Call) -> Spec:
    plan = call.plan
    return Spec(
        B=prod(plan.batch),
        G=plan.G,
        r=plan.group,
        T=plan.T,
        S=plan.S,
        D=plan.D,
        Dv=plan.Dv,
        scale=plan.scale,
        softcap=plan.softcap,
        band=fold_band(plan.causal, plan.window, plan.q_offset, plan.T, plan.S),
        dropout=plan.dropout_rate if call.asked.wants != "weights" else 0.0,
        # bfloat16 inputs are exact in every format that a device multiplies in.
        highest=call.highest and plan.dtype != "bfloat16",
        on_cpu=call.asked.platform == "cpu",
    )


def _terms(call: Call, spec: Spec, arrays: Terms) -> Terms:
    """Optional arrays in the kernels' layout."""
    shapes: dict[str, tuple[int, ...]] = {
        "kv_lengths": (spec.B,),
        "q_segments": (spec.B, spec.T),
        "kv_segments": (spec.B, spec.S),
        "sinks": (spec.G, spec.r),
    }
    terms = {name: arrays[name].reshape(shape) for name, shape in shapes.items() if name in arrays}
    if "q_offset" in arrays:
        offset = jnp.clip(arrays["q_offset"], -FAR, FAR).astype(jnp.int32)
        terms["q_offset"] = jnp.broadcast_to(offset.reshape(-1), (spec.B,))
    if "kv_lengths" in terms:
        terms["kv_lengths"] = terms["kv_lengths"].astype(jnp.int32)
    for name in ("mask", "bias"):
        if name in arrays:
            terms[name] = _five_axes(call.plan, spec, arrays[name])
    if "dropout_key" in arrays:
        terms["dropout_key"] = arrays["dropout_key"]
    return terms


def _five_axes(plan: AttentionPlan, spec: Spec, x: jax.Array) -> jax.Array:
    """(T, S) or (..., H, T, S), each axis its size or 1 -> (B, G, r, T, S), likewise."""
    if x.ndim == 2:
        return x.reshape(1, 1, 1, *x.shape)
    heads = (plan.G, plan.group) if x.shape[-3] == plan.H and plan.H > 1 else (1, 1)
    batch = x.shape[:-3]
    if prod(batch) != 1 and batch != plan.batch:  # some of several batch axes: the merged axis needs them all
        x = jnp.broadcast_to(x, (*plan.batch, *x.shape[-3:]))
    return x.reshape(spec.B if prod(batch) != 1 else 1, *heads, *x.shape[-2:])


def _library(call: Call, spec: Spec, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """jax.nn.dot_product_attention, whose layout is (B, T, H, D)."""
    plan = call.plan
    window = None
    if plan.window is not None:
        left, right = (max(plan.T, plan.S) if side is None else min(side, FAR) for side in plan.window)
        window = (left, right)

    def compute() -> jax.Array:
        return jax.nn.dot_product_attention(
            jnp.moveaxis(q.reshape(spec.B, plan.H, spec.T, spec.D), 1, 2),
            jnp.moveaxis(k, 1, 2),
            jnp.moveaxis(v, 1, 2),
            scale=plan.scale,
            is_causal=plan.causal,
            local_window_size=window,
            implementation="cudnn" if call.kernel == "cudnn" else "xla",
        )

    if spec.highest:
        with jax.default_matmul_precision("highest"):
            out = compute()
    else:
        out = compute()
    return jnp.moveaxis(out, 2, 1).reshape(*plan.scores_shape[:-1], spec.Dv)
