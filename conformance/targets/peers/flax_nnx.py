"""`flax.nnx.dot_product_attention`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..protocol import NotOffered
from .limits import aligned_top_left, equal_heads, equal_sizes

FRAMEWORK = "jax"
# As jax.nn, which it calls without dropout.
DTYPES = ("float32", "bfloat16", "float16")


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: Any = None,
    bias: Any = None,
    causal: bool = False,
    q_offset: Any = None,
) -> jax.Array:
    if q.ndim < 3:
        raise NotOffered("a heads axis is needed")
    equal_heads(q, k)
    equal_sizes(k, v)
    aligned_top_left(causal, q, k, q_offset)
    q, k, v = (jnp.swapaxes(x, -2, -3) for x in (q, k, v))
    return jnp.swapaxes(nnx.dot_product_attention(q, k, v, bias, mask, is_causal=causal), -2, -3)
