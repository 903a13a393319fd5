"""`mlx.core.fast.scaled_dot_product_attention` on the CPU, gradients by `mlx.core.vjp`."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np

from ..protocol import NotOffered
from .limits import aligned_bottom_right, one_batch_axis, one_of_mask_and_bias

FRAMEWORK = "numpy"
# "The softmax operation is performed in float32 regardless of the input precision": it does not offer float64.
DTYPES = ("float32", "bfloat16", "float16")
mx.set_default_device(mx.cpu)


def _in(x: np.ndarray) -> Any:
    if x.dtype == ml_dtypes.bfloat16:
        return mx.array(np.ascontiguousarray(x).view(np.uint16)).view(mx.bfloat16)
    # Without the dtype, float64 becomes float32.
    return mx.array(np.ascontiguousarray(x), dtype=getattr(mx, "bool_" if x.dtype == bool else str(x.dtype)))


def _out(x: Any) -> np.ndarray:
    if x.dtype == mx.bfloat16:
        return np.array(x.view(mx.uint16)).view(ml_dtypes.bfloat16)
    return np.array(x)


def _function(
    q: np.ndarray, k: np.ndarray, mask: Any, bias: Any, causal: bool, q_offset: Any, sinks: Any, scale: float | None
) -> Any:
    """The call as a function of q, k, v in MLX's arrays, and of a bias and sinks where there are such."""
    one_batch_axis(q)
    aligned_bottom_right(causal, q, k, q_offset)
    given = one_of_mask_and_bias(mask, bias)
    if causal and given is not None:
        raise NotOffered("a causal flag or a mask, not both")
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    chosen = "causal" if causal else None if given is None else _in(given)

    def call(q: Any, k: Any, v: Any, more: dict[str, Any]) -> Any:
        shown = more.get("bias", chosen)
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=shown, sinks=more.get("sinks"))

    return call, {name: _in(x) for name, x in (("bias", bias), ("sinks", sinks)) if x is not None}


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    mask: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    causal: bool = False,
    q_offset: Any = None,
    sinks: np.ndarray | None = None,
    scale: float | None = None,
) -> np.ndarray:
    call, more = _function(q, k, mask, bias, causal, q_offset, sinks, scale)
    return _out(call(*map(_in, (q, k, v)), more))


def _attention_vjp(
    grad: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    mask: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    causal: bool = False,
    q_offset: Any = None,
    sinks: np.ndarray | None = None,
    scale: float | None = None,
) -> dict[str, np.ndarray]:
    call, more = _function(q, k, mask, bias, causal, q_offset, sinks, scale)
    names = ["q", "k", "v", *more]

    def flat(*leaves: Any) -> Any:
        return call(*leaves[:3], dict(zip(more, leaves[3:], strict=True)))

    _, grads = mx.vjp(flat, [*map(_in, (q, k, v)), *more.values()], [_in(grad)])
    return {name: _out(x) for name, x in zip(names, grads, strict=True)}


gradients = SimpleNamespace(attention_vjp=_attention_vjp)
