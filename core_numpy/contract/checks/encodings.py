"""The checks of the position encodings and of the embedding."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..config import ROTARY_LAYOUTS, SINUSOIDAL_LAYOUTS, RotaryScaling
from .common import (
    FLOATS,
    Values,
    came,
    require_choice,
    require_float,
    require_int,
    require_integer,
    require_number,
    require_shape,
)


def check_embed(table: Any, ids: Any, values: Values) -> None:
    """A table (V, W) and ids from 0 to V - 1: token ids, or positions into a learned table."""
    require_float("table", table)
    if len(table.shape) != 2:
        raise ValueError(f"table must have shape (V, W), one row per id; got {tuple(table.shape)}")
    require_integer("ids", ids)
    read = values(ids)
    if read is not None and read.size and (read.min() < 0 or read.max() >= table.shape[0]):
        raise ValueError(
            f"ids must be from 0 to {table.shape[0] - 1}, the rows of the table; "
            f"got values from {read.min()} to {read.max()}"
        )


def check_sinusoidal(positions: Any, width: Any, base: Any, layout: Any, dtype: Any) -> tuple[int, float]:
    """The width, at least 1, and the base, above 0."""
    require_integer("positions", positions)
    require_choice("layout", layout, SINUSOIDAL_LAYOUTS)
    require_choice("dtype", dtype, FLOATS)
    return require_int("width", width, 1), _base(base)


def check_frequencies(dim: Any, base: Any, scaling: Any, length: Any) -> tuple[int, float, int | None]:
    """dim, base and length as plain numbers; what a kind of scaling cannot work with is refused."""
    dim, base = require_int("dim", dim, 2), _base(base)
    if dim % 2:
        raise ValueError(f"dim must be even, rotary turns pairs of features; got {dim}")
    if length is not None:
        length = require_int("length", length, 1)
    if scaling is None:
        return dim, base, length
    if not isinstance(scaling, RotaryScaling):
        hint = "RotaryScaling.from_dict(...)" if isinstance(scaling, dict) else "RotaryScaling(kind='yarn', ...)"
        raise TypeError(f"scaling must be a RotaryScaling or None, such as {hint}; got {came(scaling)}")
    if scaling.kind == "longrope" and len(scaling.short_factors or ()) != dim // 2:
        raise ValueError(
            f"scaling must have {dim // 2} short and long factors, one per pair of the {dim} rotated features; "
            f"got {len(scaling.short_factors or ())}"
        )
    if scaling.kind == "longrope" and scaling.attention_factor is None and scaling.original_max_length == 1:
        raise ValueError("scaling must have original_max_length above 1 for longrope, or an attention_factor; got 1")
    if scaling.kind == "yarn" and not base > 1.0:
        raise ValueError(f"base must be above 1 for yarn, whose ramp divides by its logarithm; got {base:g}")
    return dim, base, length


def check_tables(positions: Any, frequencies: Any, attention_factor: Any) -> float:
    """Integer positions of any shape, frequencies (r,), and the attention factor, above 0."""
    require_integer("positions", positions)
    require_float("frequencies", frequencies)
    if len(frequencies.shape) != 1:
        raise ValueError(f"frequencies must have shape (dim/2,); got {tuple(frequencies.shape)}")
    return _positive("attention_factor", attention_factor)


def check_apply_rotary(x: Any, cos: Any, sin: Any, layout: Any) -> int:
    """How many features are rotated, 2 r; x (..., H, T, D) or (T, D), cos and sin (T, r) or (batch, T, r)."""
    for name, array in (("x", x), ("cos", cos), ("sin", sin)):
        require_float(name, array)
    require_choice("layout", layout, ROTARY_LAYOUTS)
    if len(x.shape) < 2:
        raise ValueError(f"x must have shape (..., heads, length, size) or (length, size); got {tuple(x.shape)}")
    length, size, batch = x.shape[-2], x.shape[-1], tuple(x.shape[:-3])
    sizes = tuple(cos.shape)
    fits = len(sizes) == 2 or (
        len(sizes) == 2 + len(batch) and all(have in (1, want) for have, want in zip(sizes[:-2], batch, strict=True))
    )
    if not fits or sizes[-2] != length:
        either = f"({length}, r)" + (f" or ({', '.join(map(str, (*batch, length)))}, r)" if batch else "")
        raise ValueError(f"cos must have shape {either} for x {tuple(x.shape)}; got {sizes}")
    require_shape("sin", sin, sizes, "(that of cos)")
    if 2 * sizes[-1] > size:
        raise ValueError(
            f"cos must rotate at most the head size of x ({size}), two features with each of its columns; got "
            f"{2 * sizes[-1]} features"
            + (": of a table that holds each angle twice, give the first half" if sizes[-1] == size else "")
        )
    return 2 * int(sizes[-1])


def check_permute(weight: Any, heads: Any, source: Any, target: Any, rotary_dim: Any) -> tuple[int, int, int]:
    """(heads, head size, rotated features) of a weight (in, heads * D) or a bias (heads * D,)."""
    require_float("weight", weight)
    if len(weight.shape) not in (1, 2):
        raise ValueError(f"weight must have shape (in, heads * D) or (heads * D,); got {tuple(weight.shape)}")
    heads = require_int("heads", heads, 1)
    require_choice("source", source, ROTARY_LAYOUTS)
    require_choice("target", target, ROTARY_LAYOUTS)
    size, odd = divmod(int(weight.shape[-1]), heads)
    if odd or size == 0:
        raise ValueError(f"weight must have a multiple of heads ({heads}) as its last axis; got {tuple(weight.shape)}")
    rotated = size if rotary_dim is None else require_int("rotary_dim", rotary_dim, 2)
    if rotated % 2:
        raise ValueError(f"rotary_dim must be even, rotary turns pairs of features; got {rotated}")
    if rotated > size:
        raise ValueError(f"rotary_dim must be at most the head size ({size}); got {rotated}")
    return heads, size, rotated


def check_slopes(heads: Any, dtype: Any) -> int:
    require_choice("dtype", dtype, FLOATS)
    return require_int("heads", heads, 1)


def check_distances(T: Any, S: Any, q_offset: Any) -> tuple[int, int]:
    """T and S as ints (S=None means T); q_offset an int or integers () or (B,)."""
    T = require_int("T", T, 0)
    S = T if S is None else require_int("S", S, 0)
    if isinstance(q_offset, bool | np.bool_):
        raise TypeError(f"q_offset must be an integer or an integer array of shape (B,); got {came(q_offset)}")
    if not isinstance(q_offset, int):
        require_integer("q_offset", q_offset)
        if len(q_offset.shape) > 1:
            raise ValueError(f"q_offset must be an integer or an integer array of shape (B,); got {came(q_offset)}")
    return T, S


def check_buckets(buckets: Any, max_distance: Any, bidirectional: Any) -> tuple[int, int]:
    """How many buckets serve one direction, and the distance from which on the last one does."""
    if not isinstance(bidirectional, bool | np.bool_):
        raise TypeError(f"bidirectional must be True or False; got {came(bidirectional)}")
    buckets = require_int("buckets", buckets, 2)
    if bidirectional and (buckets % 2 or buckets < 4):
        raise ValueError(
            f"buckets must be even and at least 4 where bidirectional: half serve each direction; got {buckets}"
        )
    each = buckets // 2 if bidirectional else buckets
    max_distance = require_int("max_distance", max_distance, 1)
    if max_distance <= each // 2:
        raise ValueError(
            f"max_distance must be above {each // 2}, the distances that have a bucket each; got {max_distance}"
        )
    return each, max_distance


def check_relative_table(table: Any, buckets: int) -> None:
    require_float("table", table)
    if len(table.shape) != 2 or table.shape[0] != buckets:
        raise ValueError(f"table must have shape ({buckets}, H), one row per bucket; got {tuple(table.shape)}")


def _base(base: Any) -> float:
    return _positive("base", base)


def _positive(name: str, x: Any) -> float:
    value = require_number(name, x, "a finite number above 0")
    if value <= 0:
        raise ValueError(f"{name} must be a finite number above 0; got {x!r}")
    return value
