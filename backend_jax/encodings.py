"""How a model knows the order of its tokens, in JAX. Rules: core_numpy.encodings.

Positions, ids and offsets may be traced. While x64 is off there is no float64, and angles are reduced without loss
in integer arithmetic (`angles`).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from core_numpy.contract.buckets import bucket_starts
from core_numpy.contract.checks.common import require_x64
from core_numpy.contract.checks.encodings import (
    check_apply_rotary,
    check_buckets,
    check_distances,
    check_embed,
    check_frequencies,
    check_permute,
    check_relative_table,
    check_sinusoidal,
    check_slopes,
    check_tables,
)
from core_numpy.contract.config import RotaryScaling

from .angles import cos_sin, x64
from .arrays import values
from .frequencies import scaled_frequencies


def embed(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows of a table (V, W), ids integers (...) -> (..., W). Rules: core_numpy.encodings.

    Where ids are traced they cannot be refused; a row that does not exist then reads as NaN.
    """
    check_embed(table, ids, values)
    return jnp.asarray(table).at[ids].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


def sinusoidal_encoding(
    positions: jax.Array,
    width: int,
    *,
    base: float = 10000.0,
    layout: str = "interleaved",
    dtype: str = "float32",
) -> jax.Array:
    """Sines and cosines, positions integers (...) -> (..., width). Rules: core_numpy.encodings."""
    width, base = check_sinusoidal(positions, width, base, layout, dtype)
    require_x64("dtype", dtype, x64())
    cos, sin = cos_sin(jnp.asarray(positions), 1.0 / base ** (np.arange(0, width, 2) / width))
    return _joined(sin, cos, width, layout, dtype)


def rotary_frequencies(
    dim: int, *, base: float = 10000.0, scaling: RotaryScaling | None = None, length: int | None = None
) -> tuple[jax.Array, float]:
    """(dim/2,), float64 with x64 and else float32, and the attention factor. Rules: core_numpy.frequencies.

    In float32 a frequency is off by up to 3e-8 of itself, an angle at position p by p times as much. Where that
    matters, `frequencies.scaled_frequencies` has them in float64 on the host, and `rotary_tables` takes them so.
    """
    dim, base, length = check_frequencies(dim, base, scaling, length)
    frequencies, factor = scaled_frequencies(dim, base, scaling, length)
    return jnp.asarray(frequencies, dtype=jnp.float64 if x64() else jnp.float32), factor


def rotary_tables(
    positions: jax.Array, frequencies: jax.Array | np.ndarray, *, attention_factor: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines, positions integers (...), frequencies (r,) -> two (..., r), float64 with x64, else float32.

    The angle is exact for the frequencies given, at any position. Rules: core_numpy.encodings.
    """
    factor = check_tables(positions, frequencies, attention_factor)
    cos, sin = cos_sin(jnp.asarray(positions), frequencies)
    return factor * cos, factor * sin


def apply_rotary(x: jax.Array, cos: jax.Array, sin: jax.Array, *, layout: str = "half") -> jax.Array:
    """Turn pairs of features of x (..., H, T, D) by tables (T, r) or (batch, T, r) -> x's shape and dtype.

    Computed in float32 at least, float64 for float64. Rules: core_numpy.encodings.
    """
    rotated = check_apply_rotary(x, cos, sin, layout)
    return _rotate(x, cos, sin, rotated, layout)


def permute_rotary(
    weight: jax.Array, heads: int, *, source: str, target: str, rotary_dim: int | None = None
) -> jax.Array:
    """A canonical query or key weight (in, heads * D), or bias, reordered for the other layout. Rules: encodings."""
    heads, size, rotated = check_permute(weight, heads, source, target, rotary_dim)
    if source == target:
        return weight
    return _permute(weight, heads, size, rotated, source)


def alibi_slopes(heads: int, *, dtype: str = "float32") -> jax.Array:
    """How fast each head's attention falls with distance; (H,). Rules: core_numpy.encodings."""
    slopes = _slopes(check_slopes(heads, dtype))
    require_x64("dtype", dtype, x64())
    return jnp.asarray(slopes, dtype=dtype)


def alibi_bias(
    heads: int, T: int, S: int | None = None, *, q_offset: int | jax.Array = 0, dtype: str = "float32"
) -> jax.Array:
    """-slope |i + q_offset - j|: (H, T, S), or (B, H, T, S). Rules: core_numpy.encodings."""
    heads = check_slopes(heads, dtype)
    T, S = check_distances(T, S, q_offset)
    require_x64("dtype", dtype, x64())
    wide = jnp.float64 if x64() else jnp.float32
    distance = jnp.abs(_relative(T, S, q_offset))[..., None, :, :]
    return (jnp.asarray(_slopes(heads), dtype=wide)[:, None, None] * (-distance).astype(wide)).astype(dtype)


def relative_buckets(
    T: int,
    S: int | None = None,
    *,
    buckets: int = 32,
    max_distance: int = 128,
    bidirectional: bool = True,
    q_offset: int | jax.Array = 0,
) -> jax.Array:
    """T5's bucket of every pair: int32 (T, S), or (B, T, S). Rules: core_numpy.encodings."""
    each, max_distance = check_buckets(buckets, max_distance, bidirectional)
    return _buckets(*check_distances(T, S, q_offset), each, max_distance, bidirectional, q_offset)


def relative_bias(
    table: jax.Array,
    T: int,
    S: int | None = None,
    *,
    buckets: int = 32,
    max_distance: int = 128,
    bidirectional: bool = True,
    q_offset: int | jax.Array = 0,
) -> jax.Array:
    """T5's bias from a table (buckets, H): (H, T, S), or (B, H, T, S). Rules: core_numpy.encodings."""
    bucket = relative_buckets(
        T, S, buckets=buckets, max_distance=max_distance, bidirectional=bidirectional, q_offset=q_offset
    )
    check_relative_table(table, buckets)
    return jnp.moveaxis(jnp.asarray(table).at[bucket].get(mode="promise_in_bounds"), -1, -3)


@partial(jax.jit, static_argnames=("rotated", "layout"), inline=True)
def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, rotated: int, layout: str) -> jax.Array:
    wide = jnp.promote_types(x.dtype, jnp.float32)
    cos, sin = _over_heads(cos.astype(wide)), _over_heads(sin.astype(wide))
    turning, passing = x[..., :rotated].astype(wide), x[..., rotated:]
    if layout == "half":
        a, b = jnp.split(turning, 2, axis=-1)
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    else:
        a, b = turning[..., 0::2], turning[..., 1::2]
        turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(turning.shape)
    return jnp.concatenate([turned.astype(x.dtype), passing], axis=-1)


@partial(jax.jit, static_argnames=("heads", "size", "rotated", "source"), inline=True)
def _permute(weight: jax.Array, heads: int, size: int, rotated: int, source: str) -> jax.Array:
    by_head = weight.reshape(*weight.shape[:-1], heads, size)
    # (pair, member) in the interleaved layout is (member, pair) in the half layout.
    grid = (rotated // 2, 2) if source == "interleaved" else (2, rotated // 2)
    turning = by_head[..., :rotated].reshape(*by_head.shape[:-1], *grid).swapaxes(-1, -2)
    turning = turning.reshape(*by_head.shape[:-1], rotated)
    return jnp.concatenate([turning, by_head[..., rotated:]], axis=-1).reshape(weight.shape)


@partial(jax.jit, static_argnames=("width", "layout", "dtype"), inline=True)
def _joined(sin: jax.Array, cos: jax.Array, width: int, layout: str, dtype: str) -> jax.Array:
    if layout == "interleaved":
        # An odd width has one sine more: the last cosine is cut off.
        out = jnp.stack([sin, cos], axis=-1).reshape(*sin.shape[:-1], -1)[..., :width]
    else:
        out = jnp.concatenate([sin, cos[..., : width // 2]], axis=-1)
    return out.astype(dtype)


def _over_heads(table: jax.Array) -> jax.Array:
    """(batch, T, r) -> (batch, 1, T, r); (T, r) stays."""
    return table if table.ndim == 2 else table[..., None, :, :]


@partial(jax.jit, static_argnames=("T", "S", "each", "max_distance", "bidirectional"), inline=True)
def _buckets(T: int, S: int, each: int, max_distance: int, bidirectional: bool, q_offset: int | jax.Array) -> jax.Array:
    relative = _relative(T, S, q_offset)
    distance = jnp.abs(relative) if bidirectional else jnp.maximum(-relative, 0)
    # A start past the largest int32 is one that no distance reaches.
    starts = np.array([start for start in bucket_starts(each, max_distance) if start < 2**31], dtype=np.int32)
    bucket = jnp.searchsorted(jnp.asarray(starts), distance, side="right").astype(jnp.int32)
    return jnp.where(relative > 0, bucket + each, bucket) if bidirectional else bucket


def _slopes(heads: int) -> np.ndarray:
    """float64 on the host."""
    below = 1 << (heads.bit_length() - 1)
    # Every second slope of the next power of two, beginning with its first.
    exponents = [*range(2, 2 * below + 1, 2), *range(1, 2 * (heads - below), 2)]
    return np.exp2(-4.0 * np.array(exponents) / below)


def _relative(T: int, S: int, q_offset: int | jax.Array) -> jax.Array:
    """j - (i + q_offset): int32 (T, S), or (B, T, S)."""
    start = jnp.asarray(q_offset, dtype=jnp.int32)[..., None, None]
    return jnp.arange(S, dtype=jnp.int32)[None, :] - (jnp.arange(T, dtype=jnp.int32)[:, None] + start)
