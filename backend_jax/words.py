"""Products of 32-bit words that need 64 bits, for when JAX has none."""

from __future__ import annotations

import jax


def upper(a: jax.Array, b: jax.Array) -> jax.Array:
    """The upper 32 of the 64 bits of a b, uint32, by the schoolbook product of halves of 16 bits."""
    a0, a1, b0, b1 = a & 0xFFFF, a >> 16, b & 0xFFFF, b >> 16
    middle = (a0 * b0 >> 16) + (a1 * b0 & 0xFFFF) + (a0 * b1 & 0xFFFF)
    return a1 * b1 + (a1 * b0 >> 16) + (a0 * b1 >> 16) + (middle >> 16)
