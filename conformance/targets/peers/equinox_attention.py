"""Equinox's attention function, which is for one head, mapped over the heads as its MultiheadAttention does."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from equinox.nn._attention import dot_product_attention, dot_product_attention_weights

from .limits import equal_heads

FRAMEWORK = "jax"


def _mapped(function: Any, arrays: tuple[jax.Array, ...], mask: Any) -> jax.Array:
    q, k = arrays[:2]
    if q.ndim == 2:
        return function(*arrays, mask)
    equal_heads(q, k)
    lead = q.shape[:-2]
    number = math.prod(lead)
    flat = [x.reshape(number, *x.shape[-2:]) for x in arrays]
    if mask is None:
        out = jax.vmap(function)(*flat)
    else:
        full = jnp.broadcast_to(mask, (*lead, q.shape[-2], k.shape[-2]))
        out = jax.vmap(function)(*flat, full.reshape(number, *full.shape[-2:]))
    return out.reshape(*lead, *out.shape[1:])


def attention(q: jax.Array, k: jax.Array, v: jax.Array, *, mask: Any = None) -> jax.Array:
    return _mapped(dot_product_attention, (q, k, v), mask)


def attention_weights(q: jax.Array, k: jax.Array, *, mask: Any = None) -> jax.Array:
    return _mapped(dot_product_attention_weights, (q, k), mask)
