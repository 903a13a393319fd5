"""Cosine and sine of position times frequency in float32, with nothing lost at a position of a million.

In float32 the product p f keeps 24 bits; at p = 10^6 it is wrong by up to 0.03 rad. Here f / (2 pi) is turned into a
fraction of a turn in two 32-bit words; its product with an integer position, modulo one turn, is exact to 2^-32 turns
in wrapping uint32 arithmetic, and only the last step, within an eighth of a turn, is floating.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from .words import upper

# floor(2^320 / (2 pi)): enough bits for the largest float32, as in Payne and Hanek, "Radian reduction for
# trigonometric functions", 1983.
INVERSE = 0x28BE60DB9391054A7F09D5F47D4D377036D8A5664F10E4107F9458EAF7AEF1586DC91B8E909374B8
WORD = 1 << 32

# A float32 is m 2^(e - 150) with a 24-bit m. Row e holds 2^(e - 150) / (2 pi) turns modulo one, in 96 bits.
TURNS = np.array([[(INVERSE >> (374 - e + 32 * n)) % WORD for n in (2, 1, 0)] for e in range(256)], dtype=np.uint32)


def x64() -> bool:
    """Whether JAX has 64-bit types at the moment."""
    return bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]


def cos_sin(positions: jax.Array, frequencies: jax.Array | np.ndarray) -> tuple[jax.Array, jax.Array]:
    """cos(p f) and sin(p f): positions (...), frequencies (r,) -> two (..., r), float64 with x64 and else float32.

    A NumPy array of frequencies is read on the host, in float64; a JAX array may be traced and has a gradient.
    """
    if x64():
        return _wide(positions, frequencies)
    if isinstance(frequencies, np.ndarray):
        return _turn(positions, *_host_turns(frequencies), frequencies < 0)
    return _differentiable(frequencies.astype(jnp.float32), positions)


# One program where a table is made by itself, in place of one for each operation; inside others' programs no trace.
@partial(jax.jit, inline=True)
def _wide(positions: jax.Array, frequencies: jax.Array | np.ndarray) -> tuple[jax.Array, jax.Array]:
    angles = positions.astype(jnp.float64)[..., None] * jnp.asarray(frequencies, dtype=jnp.float64)
    return jnp.cos(angles), jnp.sin(angles)


@jax.custom_jvp
def _differentiable(frequencies: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    high, low = _device_turns(frequencies)
    return _turn(positions, high, low, frequencies < 0)


@_differentiable.defjvp
def _jvp(primals: tuple, tangents: tuple) -> tuple:
    # Words of integers have no derivative; that of the angle is the position.
    frequencies, positions = primals
    cos, sin = _differentiable(frequencies, positions)
    moved = positions.astype(jnp.float32)[..., None] * tangents[0]
    return (cos, sin), (-sin * moved, cos * moved)


def _host_turns(frequencies: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """|f| / (2 pi) modulo one turn, as (high, low) words of 32 bits, by exact integers."""
    words = []
    for f in frequencies:
        numerator, denominator = abs(float(f)).as_integer_ratio()
        words.append((numerator * INVERSE // (denominator << 256)) % (WORD * WORD))
    high, low = [w >> 32 for w in words], [w % WORD for w in words]
    return np.array(high, dtype=np.uint32), np.array(low, dtype=np.uint32)


@partial(jax.jit, inline=True)
def _device_turns(frequencies: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same from the bits of a float32: m times a row of TURNS, of which the upper two words are kept."""
    bits = jax.lax.bitcast_convert_type(frequencies, jnp.uint32)
    exponent = (bits >> 23) & 0xFF
    # Zero and subnormals have no implicit bit, but their row of TURNS is zero: no position turns by so little.
    m = (bits & 0x7FFFFF) | jnp.uint32(1 << 23)
    first, second, third = jnp.moveaxis(jnp.asarray(TURNS)[exponent], -1, 0)
    low = m * second + upper(m, third)
    carry = (low < m * second).astype(jnp.uint32)
    return m * first + upper(m, second) + carry, low


@partial(jax.jit, inline=True)
def _turn(
    positions: jax.Array, high: jax.Array | np.ndarray, low: jax.Array | np.ndarray, backwards: jax.Array | np.ndarray
) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of |p| times a fraction of a turn, the sine's sign changed where p or f is negative."""
    p = positions[..., None]
    unsigned = jnp.issubdtype(p.dtype, jnp.unsignedinteger)
    steps = (p if unsigned else jnp.abs(p.astype(jnp.int32))).astype(jnp.uint32)
    # Half a quadrant more, so that the quadrant is the nearest one and the rest is within an eighth of a turn.
    turn = steps * high + upper(steps, jnp.asarray(low)) + jnp.uint32(1 << 29)
    quadrant = turn >> 30
    rest = (turn & ((1 << 30) - 1)).astype(jnp.int32) - (1 << 29)
    angle = rest.astype(jnp.float32) * np.float32(2.0 * math.pi / WORD)
    c, s = jnp.cos(angle), jnp.sin(angle)
    odd = (quadrant & 1) == 1
    cos, sin = jnp.where(odd, s, c), jnp.where(odd, c, s)
    # Quadrants 0, 1, 2, 3: (c, s), (-s, c), (-c, -s), (s, -c).
    cos = jnp.where((quadrant == 1) | (quadrant == 2), -cos, cos)
    negative = (quadrant >= 2) ^ backwards ^ (p < 0)
    return cos, jnp.where(negative, -sin, sin)
