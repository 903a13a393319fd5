"""`jax.nn.dot_product_attention`, implementation "xla". Its residual, the log-sum-exp, carries no gradient and has the
keys' dtype, and is not offered here."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..protocol import NotOffered
from .limits import aligned_top_left, equal_sizes

FRAMEWORK = "jax"
# Its softmax is in float32 whatever comes in: it does not offer float64.
DTYPES = ("float32", "bfloat16", "float16")


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: Any = None,
    bias: Any = None,
    causal: bool = False,
    window: Any = None,
    q_offset: Any = None,
    kv_lengths: Any = None,
    scale: float | None = None,
) -> jax.Array:
    if q.ndim not in (3, 4):
        raise NotOffered(f"three or four axes only; the case has {q.ndim}")
    equal_sizes(k, v)
    aligned_top_left(causal or window is not None, q, k, q_offset)
    if window is not None and None in window:
        raise NotOffered("windows with two sides only")
    if kv_lengths is not None and q.ndim != 4:
        raise NotOffered("lengths with a batch axis only")

    def full(x: Any) -> Any:  # masks and biases must have four axes
        return x if x is None or x.ndim == 4 else x[(None,) * (4 - x.ndim)]

    def turned(x: jax.Array) -> jax.Array:
        return jnp.swapaxes(x, -2, -3)

    sides = None if window is None else (int(window[0]), int(window[1]))
    out = jax.nn.dot_product_attention(
        turned(q), turned(k), turned(v), full(bias), full(mask), scale=scale, is_causal=causal,
        key_value_seq_lengths=kv_lengths, local_window_size=sides, implementation="xla",
    )  # fmt: skip
    return turned(out)
