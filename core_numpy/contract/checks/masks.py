"""The checks of the mask builders."""

from __future__ import annotations

from typing import Any

import numpy as np

from .common import (
    FLOATS,
    Values,
    came,
    dtype_name,
    require_array,
    require_choice,
    require_int,
    require_integer,
    require_shape,
)


def check_grid(T: Any, S: Any, q_offset: Any) -> tuple[int, int]:
    """T and S as ints (S=None means T), with q_offset None, an int, or integers (B,)."""
    T = require_int("T", T, 0)
    S = T if S is None else require_int("S", S, 0)
    if q_offset is None:
        if T != S:
            raise ValueError(
                f"q_offset must be given where T != S (T={T}, S={S}): q_offset=0 is the top-left reading of torch and "
                f"JAX, q_offset={S - T} the bottom-right one of FlashAttention and of decoding"
            )
        return T, S
    if isinstance(q_offset, bool | np.bool_ | float | str):
        raise TypeError(f"q_offset must be an integer or an integer array of shape (B,); got {came(q_offset)}")
    if isinstance(q_offset, int):
        return T, S
    require_integer("q_offset", q_offset)
    if len(q_offset.shape) > 1:
        raise ValueError(f"q_offset must be an integer or an integer array of shape (B,); got {came(q_offset)}")
    return T, S


def check_side(name: str, side: Any) -> int | None:
    """One side of a window: a non-negative int, or None for unbounded."""
    return None if side is None else require_int(name, side, 0)


def check_counts(name: str, counts: Any, S: int, values: Values) -> None:
    """One count of keys per batch element, from 0 to S."""
    require_integer(name, counts)
    if len(counts.shape) != 1:
        raise ValueError(f"{name} must have shape (B,), one per batch element; got {tuple(counts.shape)}")
    read = values(counts)
    if read is not None and read.size and (read.min() < 0 or read.max() > S):
        raise ValueError(f"{name} must be from 0 to the key length {S}; got values from {read.min()} to {read.max()}")


def check_lengths(lengths: Any, S: Any, values: Values) -> int:
    S = require_int("S", S, 0)
    check_counts("lengths", lengths, S, values)
    return S


def check_prefix(prefix_lengths: Any, q_offset: Any, S: int, values: Values) -> None:
    check_counts("prefix_lengths", prefix_lengths, S, values)
    if len(getattr(q_offset, "shape", ())) == 1:
        require_shape("q_offset", q_offset, prefix_lengths.shape, "(that of prefix_lengths), or be an int")


def check_tokens(tokens: Any, pad_id: Any) -> int:
    """Tokens (B, S) of integers, and the integer that stands for padding."""
    _require_rows("tokens", tokens)
    return require_int("pad_id", pad_id)


def check_segment_ids(q_segments: Any, kv_segments: Any) -> None:
    """Signed integers (B, T) and (B, S)."""
    for name, x in (("q_segments", q_segments), ("kv_segments", kv_segments)):
        _require_rows(name, x)
        if dtype_name(x).startswith("uint"):
            raise TypeError(f"{name} must hold signed integers, a negative id is padding; got {came(x)}")
    require_shape("kv_segments", kv_segments, (q_segments.shape[0], kv_segments.shape[1]), "(the batch of q_segments)")


def _require_rows(name: str, x: Any) -> None:
    require_integer(name, x)
    if len(x.shape) != 2:
        raise ValueError(f"{name} must have shape (batch, length); got {tuple(x.shape)}")


def check_boolean(name: str, mask: Any) -> None:
    require_array(name, mask)
    if dtype_name(mask) not in ("bool", "bool_"):
        raise TypeError(f"{name} must be boolean; got {came(mask)}: say what its numbers mean, as in mask != 0")


def check_masks(masks: tuple[Any, ...]) -> None:
    """Boolean masks of rank 2 or of one common full rank, that broadcast."""
    shapes = []
    for n, mask in enumerate(masks):
        check_boolean(f"masks[{n}]", mask)
        shapes.append(tuple(mask.shape))
    ranks = sorted({len(shape) for shape in shapes})
    if len(ranks) > 2 or (len(ranks) == 2 and ranks[0] != 2):
        raise ValueError(
            f"masks must have rank 2 (T, S) or one common full rank; got shapes {shapes}: write batch and heads out, "
            "as in mask[:, None, None, :] or mask[:, None]"
        )
    try:
        np.broadcast_shapes(*shapes)
    except ValueError:
        raise ValueError(f"masks must broadcast to one shape; got {shapes}") from None


def check_bias_dtype(dtype: Any) -> None:
    if not isinstance(dtype, str):
        raise TypeError(f"dtype must be a name, one of {', '.join(map(repr, FLOATS))}; got {came(dtype)}")
    require_choice("dtype", dtype, FLOATS)


def check_padding(padding: Any) -> None:
    """Booleans (B, S), True = real token."""
    check_boolean("padding", padding)
    if len(padding.shape) != 2:
        raise ValueError(f"padding must have shape (batch, length), True = real token; got {tuple(padding.shape)}")
