"""Which kernel serves which arguments: a table to read. Rules for a kernel's refusal: each row says when and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import jax

from core_numpy.contract.checks.attention import AttentionPlan
from core_numpy.contract.checks.kernels import Kernel


@dataclass(frozen=True)
class Asked:
    """What a kernel has to serve. given: names of the optional arguments that are there. wants: "out", "lse" or
    "weights". platform: "cpu", "gpu" or "tpu"."""

    plan: AttentionPlan
    given: frozenset[str]
    wants: str
    platform: str


Row = tuple[Callable[[Asked], bool], str]

# jax.nn.dot_product_attention gives the mean of all values where a query may attend to nothing, lets NaN in a hidden
# value through, stops the gradient of its lse and computes a float64 softmax in float32: it stays where none matters.
LIBRARY: tuple[Row, ...] = (
    (lambda a: a.wants == "weights", "it gives no weights"),
    (lambda a: a.wants == "lse", "it gives no lse with a gradient"),
    (lambda a: a.plan.dtype == "float64", "it computes the softmax in float32"),
    (lambda a: a.plan.dtype == "float16" and a.platform != "gpu", "its float16 products compile for GPUs only"),
    (lambda a: a.plan.Dv != a.plan.D, "it takes values of the head size only"),
    (lambda a: a.plan.softcap is not None, "it has no softcap"),
    (lambda a: "sinks" in a.given, "it has no sinks"),
    (lambda a: a.plan.dropout_rate > 0, "it has no dropout by key"),
    (lambda a: bool(a.given & {"mask", "bias"}), "with a mask or bias a query that sees nothing gets the mean, not 0"),
    (lambda a: bool(a.given & {"kv_lengths", "q_segments"}), "it lets NaN in padding through"),
    (lambda a: 0 in (*a.plan.batch, a.plan.T, a.plan.S, a.plan.Dv), "it takes no empty axes"),
    (
        lambda a: (a.plan.causal or a.plan.window is not None) and (a.plan.T != a.plan.S or a.plan.q_offset != 0),
        "with causal or window it takes T = S and q_offset=0 only",
    ),
)

CUDNN: tuple[Row, ...] = (
    (lambda a: a.platform != "gpu", "it needs an NVIDIA GPU"),
    (lambda a: a.plan.dtype not in ("float16", "bfloat16"), "it takes float16 and bfloat16 only"),
    (lambda a: a.plan.D % 8 != 0 or a.plan.D > 128, "it takes head sizes that are multiples of 8 up to 128"),
    (lambda a: a.plan.window is not None and not a.plan.causal, "it takes a window with causal=True only"),
    (
        lambda a: a.plan.window is not None and a.plan.window[1] not in (0, None),
        "it takes windows without a right side only",
    ),
)

BLOCKWISE: tuple[Row, ...] = ((lambda a: a.wants == "weights", "it never holds the weights"),)

REFUSES: dict[str, tuple[Row, ...]] = {
    "cudnn": LIBRARY + CUDNN,
    "xla": LIBRARY,
    "blockwise": BLOCKWISE,
    "dense": (),
}

WHAT = {
    "cudnn": "cuDNN's fused attention through jax.nn.dot_product_attention",
    "xla": "jax.nn.dot_product_attention as XLA compiles it",
    "blockwise": "own blocks with hand-written derivatives, memory linear in T and S",
    "dense": "the formula, all scores at once, differentiable any number of times",
}

KERNELS: dict[str, Kernel] = {
    name: Kernel(
        name,
        tuple(why for _, why in rows),
        twice=name in ("xla", "dense"),
        shields="keys",
        weights="stored" if name == "xla" else "wide",
    )
    for name, rows in REFUSES.items()
}


def reasons(name: str, asked: Asked) -> list[str]:
    """Why a kernel cannot serve what is asked; empty where it can."""
    return [why for refuses, why in REFUSES[name] if refuses(asked)]


def fastest(asked: Asked) -> str:
    """The kernel that "auto" means. Measured on CPUs (conformance.race.attention_jax): blockwise at every size.

    On a GPU or TPU short rows are one product each and XLA's own fusion serves; long ones would not fit.
    """
    if asked.wants == "weights":
        return "dense"
    for name in preference(asked):
        if not reasons(name, asked):
            return name
    return "dense"


# Scores of 64 MiB in float32 for one head: above it the quadratic kernels cost more memory than the arrays they serve.
QUADRATIC = 1 << 24


def preference(asked: Asked) -> tuple[str, ...]:
    if asked.platform == "cpu":
        return ("blockwise",)
    return ("cudnn", "xla", "blockwise") if asked.plan.T * asked.plan.S <= QUADRATIC else ("cudnn", "blockwise")


# What a trace is for, where it is not for JAX's default device.
_lowering: ContextVar[str | None] = ContextVar("lowering", default=None)


@contextmanager
def lowering_for(platform: str) -> Iterator[None]:
    """Inside, traces choose their kernels as on that platform, which need not be here: for `jax.export` and AOT."""
    token = _lowering.set(platform)
    try:
        yield
    finally:
        _lowering.reset(token)


def platform_of(x: object) -> str:
    """Where a call will run: the device of a concrete array, else JAX's default. "gpu" for CUDA and ROCm."""
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
        platform = next(iter(x.devices())).platform
    else:
        platform = _lowering.get() or jax.default_backend()
    return "gpu" if platform in ("cuda", "rocm") else platform
