"""`flax.linen.dot_product_attention`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from ..protocol import NotOffered
from .limits import equal_heads

FRAMEWORK = "jax"


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: Any = None,
    bias: Any = None,
) -> jax.Array:
    if q.ndim < 3:
        raise NotOffered("a heads axis is needed")
    equal_heads(q, k)
    q, k, v = (jnp.swapaxes(x, -2, -3) for x in (q, k, v))
    return jnp.swapaxes(linen.dot_product_attention(q, k, v, bias, mask), -2, -3)
