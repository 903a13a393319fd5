"""Boolean masks for `attention`, True = may attend. Rules: core_numpy.masks.

Native: sizes are static, everything else may be traced; values of lengths are checked where they are concrete.
"""

from __future__ import annotations

from functools import reduce

import jax
import jax.numpy as jnp

from core_numpy.contract.checks import masks as checks
from core_numpy.contract.checks.common import require_x64

from .arrays import values


def causal_mask(T: int, S: int | None = None, *, q_offset: int | jax.Array | None = None) -> jax.Array:
    """j <= i + q_offset -> (T, S) bool; with offsets (B,) (B, 1, T, S). Rules: core_numpy.masks."""
    T, S = checks.check_grid(T, S, q_offset)
    i, j = _positions(T, S, q_offset)
    return j <= i


def sliding_window_mask(
    T: int, S: int | None = None, *, left: int | None, right: int | None, q_offset: int | jax.Array | None = None
) -> jax.Array:
    """i + q_offset - left <= j <= i + q_offset + right -> (T, S) bool; with offsets (B,) (B, 1, T, S).

    None leaves a side unbounded. Rules: core_numpy.masks.
    """
    T, S = checks.check_grid(T, S, q_offset)
    left, right = checks.check_side("left", left), checks.check_side("right", right)
    i, j = _positions(T, S, q_offset)
    visible = jnp.ones(jnp.broadcast_shapes(i.shape, j.shape), dtype=jnp.bool_)
    if left is not None:
        visible = visible & (i - left <= j)
    if right is not None:
        visible = visible & (j <= i + right)
    return visible


def padding_mask(lengths: jax.Array, S: int) -> jax.Array:
    """j < length; lengths (B,) -> (B, 1, 1, S) bool. Rules: core_numpy.masks."""
    S = checks.check_lengths(lengths, S, values)
    return jnp.arange(S) < jnp.asarray(lengths)[:, None, None, None]


def padding_mask_from_tokens(tokens: jax.Array, pad_id: int) -> jax.Array:
    """tokens != pad_id; tokens (B, S) -> (B, 1, 1, S) bool. Rules: core_numpy.masks."""
    pad_id = checks.check_tokens(tokens, pad_id)
    return (jnp.asarray(tokens) != pad_id)[:, None, None, :]


def segment_mask(q_segments: jax.Array, kv_segments: jax.Array | None = None) -> jax.Array:
    """Equal ids that are not negative; (B, T), (B, S) or None for the same -> (B, 1, T, S) bool.

    Rules: core_numpy.masks.
    """
    kv_segments = q_segments if kv_segments is None else kv_segments
    checks.check_segment_ids(q_segments, kv_segments)
    of_q, of_k = jnp.asarray(q_segments)[:, None, :, None], jnp.asarray(kv_segments)[:, None, None, :]
    return (of_q == of_k) & (of_q >= 0)


def prefix_mask(
    T: int, S: int | None, prefix_lengths: jax.Array, *, q_offset: int | jax.Array | None = None
) -> jax.Array:
    """j < prefix or j <= i + q_offset; prefix_lengths (B,) -> (B, 1, T, S) bool. Rules: core_numpy.masks."""
    T, S = checks.check_grid(T, S, q_offset)
    checks.check_prefix(prefix_lengths, q_offset, S, values)
    i, j = _positions(T, S, q_offset)
    return (j < jnp.asarray(prefix_lengths)[:, None, None, None]) | (j <= i)


def combine_masks(*masks: jax.Array | None) -> jax.Array | None:
    """Logical and of boolean masks that broadcast; None is ignored. Rules: core_numpy.masks."""
    given = tuple(mask for mask in masks if mask is not None)
    checks.check_masks(given)
    return reduce(jnp.logical_and, given) if given else None


def from_blocked(mask: jax.Array) -> jax.Array:
    """True = blocked -> True = may attend. Rules: core_numpy.masks."""
    checks.check_boolean("mask", mask)
    return jnp.logical_not(mask)


def mask_to_bias(mask: jax.Array, dtype: str) -> jax.Array:
    """0 where a pair may attend, -inf where not; mask's shape, dtype by name. Rules: core_numpy.masks.

    float64 needs x64 switched on.
    """
    checks.check_boolean("mask", mask)
    checks.check_bias_dtype(dtype)
    require_x64("dtype", dtype, jax.config.jax_enable_x64)  # type: ignore[attr-defined]
    return jnp.where(mask, jnp.zeros((), dtype), jnp.full((), -jnp.inf, dtype))


def positions_from_mask(padding: jax.Array) -> jax.Array:
    """Real tokens so far minus 1, at least 0; padding (B, S) bool -> (B, S) int32. Rules: core_numpy.masks."""
    checks.check_padding(padding)
    return jnp.maximum(jnp.cumsum(padding, axis=1, dtype=jnp.int32) - 1, 0)


def _positions(T: int, S: int, q_offset: int | jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Positions of the queries, (T, 1) or (B, 1, T, 1), and of the keys, (S,)."""
    # One integer type for all, so that narrow or unsigned offsets neither wrap nor promote.
    offset = jnp.asarray(0 if q_offset is None else q_offset).astype(jnp.arange(0).dtype)
    if offset.ndim == 1:
        offset = offset[:, None, None, None]
    return jnp.arange(T)[:, None] + offset, jnp.arange(S)
