"""How a model knows the order of its tokens: added tables, rotations, and biases on the scores.

encodings-1: embed gives row id of the table; an id below 0 or past the table is an error, never clamped or wrapped.
encodings-2: a sinusoid of position p and pair i has the angle p base^(-2i / width), i = 0 .. ceil(width/2) - 1.
encodings-3: interleaved puts the sine of pair i at 2i and its cosine at 2i + 1; concatenated puts all sines first. An
odd width has ceil(width/2) sines and floor(width/2) cosines.
encodings-4: positions are integers of any shape, negative ones included; they are never rounded to a short float.
encodings-5: rotary tables are attention_factor times cosine and sine of position times frequency.
encodings-6: rotation turns pair (a, b) of features to (a cos - b sin, b cos + a sin): in the half layout of r = 2n
rotated features the pairs are (i, i + n), in the interleaved one (2i, 2i + 1).
encodings-7: features past the rotated ones pass unchanged.
encodings-8: permute_rotary reorders the rotated features of each head, so that rotating with `target` what the
permuted weight gives is the permuted result of rotating with `source`: scores of queries and keys stay.
encodings-9: ALiBi's slopes for n heads, n a power of two, are 2^(-8 h / n), h = 1 .. n; otherwise those of the power
of two below, followed by every second one, from the first, of the next power's. They are not sorted.
encodings-10: the ALiBi bias is -slope |i + q_offset - j|, for keys before and after the query alike.
encodings-11: the relative position is j - (i + q_offset). Bidirectional: half of the buckets serve each direction, keys
after the query the upper half. Causal: keys after the query fall in bucket 0.
encodings-12: of a direction's n buckets the first n // 2 hold one distance each, the rest grow logarithmically up to
max_distance, and the last holds all beyond. Where a logarithm would decide at an edge, whole numbers do
(`contract.buckets`).
encodings-13: relative_bias is the table's row of each pair's bucket, head by head, unscaled.

Sources: Vaswani et al. 2017 (sinusoids); Su et al. 2021 (rotary); Press et al. 2022 and its code (ALiBi); Raffel et al.
2020 and its code (T5).
"""

from __future__ import annotations

import numpy as np

from .contract.buckets import bucket_starts
from .contract.checks.encodings import (
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
from .contract.config import RotaryScaling
from .contract.tensor_file import numpy_dtype
from .frequencies import scaled_frequencies
from .rotary_pairs import over_heads, pairs, rotary_order
from .rounding import rounded


def embed(table: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Rows of a table: token embeddings, or learned positions with positions as ids.

        out[...] = table[ids[...]]

    table (V, W), ids integers (...) -> (..., W) of the table's dtype. Refuses ids below 0 or from V on. encodings-1.
    """
    check_embed(table, ids, np.asarray)
    return table[ids]


def sinusoidal_encoding(
    positions: np.ndarray,
    width: int,
    *,
    base: float = 10000.0,
    layout: str = "interleaved",
    dtype: str = "float32",
) -> np.ndarray:
    """Sines and cosines of geometrically falling frequencies.

        angle_i = p base^(-2i / width);   out = sin(angle_0), cos(angle_0), sin(angle_1), ...

    positions integers (...) -> (..., width) of `dtype`, computed in float64 and rounded once. Refuses positions that
    are not integers, an unknown layout or dtype, base not above 0. Rules: encodings-2, encodings-3, encodings-4.
    """
    width, base = check_sinusoidal(positions, width, base, layout, dtype)
    sines = (width + 1) // 2
    angles = positions.astype(np.float64)[..., None] * base ** (-2.0 * np.arange(sines) / width)
    out = np.empty((*positions.shape, width))
    if layout == "interleaved":
        out[..., 0::2], out[..., 1::2] = np.sin(angles), np.cos(angles[..., : width - sines])
    else:
        out[..., :sines], out[..., sines:] = np.sin(angles), np.cos(angles[..., : width - sines])
    return rounded(out, numpy_dtype(dtype))


def rotary_frequencies(
    dim: int, *, base: float = 10000.0, scaling: RotaryScaling | None = None, length: int | None = None
) -> tuple[np.ndarray, float]:
    """Angles per position of each pair of `dim` rotated features, and what the tables are to be multiplied by.

        f_i = base^(-2i / dim), then stretched by `scaling`

    `length` is the running length, which dynamic and longrope read.
    -> float64 (dim/2,), float. Refuses an odd dim, base not above 0, a scaling that is no RotaryScaling or has another
    number of factors than dim/2. Rules: core_numpy.frequencies.
    """
    dim, base, length = check_frequencies(dim, base, scaling, length)
    return scaled_frequencies(dim, base, scaling, length)


def rotary_tables(
    positions: np.ndarray, frequencies: np.ndarray, *, attention_factor: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of every position's angles.

        cos = attention_factor cos(p f),   sin = attention_factor sin(p f)

    positions integers (...), frequencies (r,) -> two float64 (..., r). Refuses positions that are not integers.
    Rules: encodings-4, encodings-5.
    """
    factor = check_tables(positions, frequencies, attention_factor)
    angles = positions.astype(np.float64)[..., None] * frequencies.astype(np.float64)
    return factor * np.cos(angles), factor * np.sin(angles)


def apply_rotary(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, *, layout: str = "half") -> np.ndarray:
    """Turn pairs of features by each position's angle.

        (a, b) -> (a cos - b sin, b cos + a sin)

    x (..., H, T, D) or (T, D); cos and sin (T, r) or (batch, T, r), batch axes of size 1 broadcasting; the first 2 r
    features turn -> x's shape and dtype, computed in float64. Refuses 2 r > D, an unknown layout. Rules: encodings-6,
    encodings-7.
    """
    rotated = check_apply_rotary(x, cos, sin, layout)
    cos, sin = over_heads(cos), over_heads(sin)
    first, second = pairs(rotated, layout)
    out = x.astype(np.float64)
    a, b = out[..., first].copy(), out[..., second].copy()
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return rounded(out, x.dtype)


def permute_rotary(
    weight: np.ndarray, heads: int, *, source: str, target: str, rotary_dim: int | None = None
) -> np.ndarray:
    """A query or key projection made for one rotary layout, reordered for the other.

        head by head:  target[first_target] = source[first_source],   target[second_target] = source[second_source]

    weight (in, heads * D) or bias (heads * D,) -> the same shape and dtype; a q/k-norm weight (D,) with heads=1.
    `rotary_dim` is the number of rotated features where it is less than D. Rules: encodings-8.
    """
    heads, size, rotated = check_permute(weight, heads, source, target, rotary_dim)
    order = rotary_order(size, rotated, source, target)
    return weight.reshape(*weight.shape[:-1], heads, size)[..., order].reshape(weight.shape)


def alibi_slopes(heads: int, *, dtype: str = "float32") -> np.ndarray:
    """How fast each head's attention falls with distance: (H,) of `dtype`. Refuses heads below 1. encodings-9."""
    return rounded(_slopes(check_slopes(heads, dtype)), numpy_dtype(dtype))


def alibi_bias(
    heads: int, T: int, S: int | None = None, *, q_offset: int | np.ndarray = 0, dtype: str = "float32"
) -> np.ndarray:
    """A bias that falls linearly with the distance of key and query.

        bias[h, i, j] = -slope_h |i + q_offset - j|

    -> (H, T, S) of `dtype`; with offsets (B,) of integers (B, H, T, S). S=None means T. encodings-9, encodings-10.
    """
    heads = check_slopes(heads, dtype)
    distance = np.abs(_relative(*check_distances(T, S, q_offset), q_offset))[..., None, :, :]
    return rounded(_slopes(heads)[:, None, None] * -distance, numpy_dtype(dtype))


def relative_buckets(
    T: int,
    S: int | None = None,
    *,
    buckets: int = 32,
    max_distance: int = 128,
    bidirectional: bool = True,
    q_offset: int | np.ndarray = 0,
) -> np.ndarray:
    """T5's bucket of every pair of query and key, from j - (i + q_offset).

    -> int32 (T, S); with offsets (B,) of integers (B, T, S). Refuses an odd number of buckets where bidirectional, and
    a max_distance within the distances that have a bucket each. Rules: encodings-11, encodings-12.
    """
    each, max_distance = check_buckets(buckets, max_distance, bidirectional)
    relative = _relative(*check_distances(T, S, q_offset), q_offset)
    distance = np.abs(relative) if bidirectional else np.maximum(-relative, 0)
    bucket = np.searchsorted(bucket_starts(each, max_distance), distance, side="right")
    if bidirectional:
        bucket = bucket + each * (relative > 0)
    return bucket.astype(np.int32)


def relative_bias(
    table: np.ndarray,
    T: int,
    S: int | None = None,
    *,
    buckets: int = 32,
    max_distance: int = 128,
    bidirectional: bool = True,
    q_offset: int | np.ndarray = 0,
) -> np.ndarray:
    """T5's bias: one learned number per head and bucket.

        bias[h, i, j] = table[bucket(i, j), h]

    table (buckets, H) -> (H, T, S) of its dtype; with offsets (B,) (B, H, T, S). Rules: encodings-13.
    """
    bucket = relative_buckets(
        T, S, buckets=buckets, max_distance=max_distance, bidirectional=bidirectional, q_offset=q_offset
    )
    check_relative_table(table, buckets)
    return np.moveaxis(table[bucket], -1, -3)


def _slopes(heads: int) -> np.ndarray:
    """encodings-9, in float64."""
    below = 1 << (heads.bit_length() - 1)
    own = 2.0 ** (-8.0 * np.arange(1, below + 1) / below)
    following = 2.0 ** (-8.0 * np.arange(1, 2 * below + 1) / (2 * below))
    return np.concatenate([own, following[0::2][: heads - below]])


def _relative(T: int, S: int, q_offset: int | np.ndarray) -> np.ndarray:
    """j - (i + q_offset): (T, S), or (B, T, S)."""
    start = np.asarray(q_offset, dtype=np.int64)[..., None, None]
    return np.arange(S)[None, :] - (np.arange(T)[:, None] + start)
