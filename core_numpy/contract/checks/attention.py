"""The checks of `attention` and its relatives: one door for every backend.

`attention_plan` refuses what is wrong and returns what a kernel needs to know, as plain numbers. The backends
never look at an argument's shape again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from .common import (
    FLOATS,
    Values,
    came,
    dtype_name,
    is_integer,
    require_array,
    require_float,
    require_int,
    require_integer,
    require_number,
    require_shape,
)


@dataclass(frozen=True)
class AttentionPlan:
    """What the arguments of one attention call mean, as plain Python values.

    batch: the axes in front of the heads axis, () for 2-D and 3-D inputs. has_heads: False for 2-D inputs,
    whose H and G are 1. window: (left, right) or None where both sides are unbounded. q_offset: an int, or
    None where it is an array (per batch element). dtype: of q and of the output.
    """

    batch: tuple[int, ...]
    has_heads: bool
    H: int
    G: int
    T: int
    S: int
    D: int
    Dv: int
    dtype: str
    scale: float
    softcap: float | None
    causal: bool
    window: tuple[int | None, int | None] | None
    q_offset: int | None
    dropout_rate: float

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.H // self.G

    @property
    def scores_shape(self) -> tuple[int, ...]:
        """(..., H, T, S), or (T, S) for 2-D inputs."""
        return (*self.batch, *((self.H,) if self.has_heads else ()), self.T, self.S)


def attention_plan(
    q: Any,
    k: Any,
    v: Any | None,
    *,
    mask: Any = None,
    bias: Any = None,
    causal: Any = False,
    window: Any = None,
    q_offset: Any = None,
    kv_lengths: Any = None,
    q_segments: Any = None,
    kv_segments: Any = None,
    sinks: Any = None,
    scale: Any = None,
    softcap: Any = None,
    dropout_rate: Any = 0.0,
    dropout_key: Any = None,
    values: Values,
) -> AttentionPlan:
    """Check every argument of an attention call; v is None for `attention_weights`.

    Refused, with a TypeError for a type or dtype and a ValueError for a shape, a range or a combination; the sentence
    names the argument, what came and what would be right:

    q, k, v that are no floating arrays, of several dtypes, ranks or batch axes; head sizes of q and k that differ or
    are 0; heads of q that are no multiple of k's; heads or a length of v that are not k's. A mask that is not boolean,
    a bias that is not floating or holds NaN, and of both a shape that is neither (T, S) nor the scores' own with 1 in
    some places. A window that is no pair of sides from 0 on. Causality or a window with T != S and no q_offset. Lengths
    that are not one integer from 0 to S per batch element. Segments of one side alone, unsigned ones, other shapes.
    Sinks that are not one floating number per query head. A scale that is not finite, a soft cap that is not above 0,
    a dropout rate outside 0 to 1, and one above 0 without a key.
    """
    batch, has_heads, H, G, T, S, D, Dv = _sizes(q, k, v)
    shape = (*batch, *((H,) if has_heads else ()), T, S)
    if mask is not None:
        check_mask(mask, shape)
    if bias is not None:
        _check_bias_form(bias, shape)
    if not isinstance(causal, bool | np.bool_):
        raise TypeError(f"causal must be True or False; got {came(causal)}")
    window = check_window(window)
    offset = _check_offset(q_offset, bool(causal) or window is not None, T, S, batch, values)
    if kv_lengths is not None:
        _check_lengths_form(kv_lengths, batch)
    _check_segments(q_segments, kv_segments, batch, T, S)
    if sinks is not None:
        require_float("sinks", sinks)
        require_shape("sinks", sinks, (H,) if has_heads else (), "(one logit per query head)")
    check_attention_values(S, bias=bias, kv_lengths=kv_lengths, sinks=sinks, values=values)
    return AttentionPlan(
        batch, has_heads, H, G, T, S, D, Dv, dtype_name(q),
        scale=1.0 / math.sqrt(D) if scale is None else require_number("scale", scale, "a finite number or None"),
        softcap=_check_softcap(softcap),
        causal=bool(causal),
        window=window,
        q_offset=offset,
        dropout_rate=check_dropout(dropout_rate, dropout_key),
    )  # fmt: skip


def check_attention_values(S: int, *, bias: Any, kv_lengths: Any, sinks: Any, values: Values) -> None:
    """What a call of known form must still be asked: lengths from 0 to S, no NaN in bias or sinks.

    All else that `attention_plan` refuses follows from types, shapes, dtypes and numbers.
    """
    if bias is not None:
        _refuse_nan("bias", bias, values)
    if kv_lengths is not None:
        _check_lengths(kv_lengths, S, values)
    if sinks is not None:
        _refuse_nan("sinks", sinks, values)


def _sizes(q: Any, k: Any, v: Any | None) -> tuple[tuple[int, ...], bool, int, int, int, int, int, int]:
    arrays = {"q": q, "k": k} if v is None else {"q": q, "k": k, "v": v}
    for name, x in arrays.items():
        require_float(name, x)
    rank = len(q.shape)
    for name, x in arrays.items():
        if len(x.shape) != rank or rank < 2:
            wanted = "at least two axes" if rank < 2 else "the rank of q"
            shapes = ", ".join(f"{one} {tuple(y.shape)}" for one, y in {"q": q, name: x}.items())
            raise ValueError(f"{name} must have {wanted}: (length, size) or (..., heads, length, size); got {shapes}")
        if dtype_name(x) != dtype_name(q):
            raise TypeError(
                f"{name} must have the dtype of q ({dtype_name(q)}); got {dtype_name(x)}: convert one of them"
            )
    has_heads = rank > 2
    batch = tuple(int(n) for n in q.shape[:-3]) if has_heads else ()
    H, G = (int(q.shape[-3]), int(k.shape[-3])) if has_heads else (1, 1)
    T, D, S = int(q.shape[-2]), int(q.shape[-1]), int(k.shape[-2])
    for name, x in arrays.items():
        if has_heads and tuple(x.shape[:-3]) != batch:
            raise ValueError(
                f"{name} must have the batch axes of q, {batch}; got {tuple(x.shape[:-3])} (no broadcasting)"
            )
    if D == 0:
        raise ValueError(f"q must have a head size of at least 1; got q {tuple(q.shape)}")
    if k.shape[-1] != D:
        raise ValueError(f"k must have the head size of q, {D}; got k {tuple(k.shape)}")
    if H == 0 or G == 0 or H % G:
        raise ValueError(
            f"q must have a multiple of k's heads: query head h reads key/value head h // (H // G); "
            f"got H={H} query heads and G={G} key/value heads (the axes are ..., heads, length, size)"
        )
    if v is None:
        return batch, has_heads, H, G, T, S, D, D
    if has_heads and v.shape[-3] != G:
        raise ValueError(f"v must have as many heads as k, {G}; got v {tuple(v.shape)}")
    if v.shape[-2] != S:
        raise ValueError(f"v must have the length of k, {S}; got v {tuple(v.shape)}")
    return batch, has_heads, H, G, T, S, D, int(v.shape[-1])


def check_mask(mask: Any, shape: tuple[int, ...]) -> None:
    """A boolean mask of rank 2 or of the full rank of the scores' `shape`, each axis its size or 1."""
    require_array("mask", mask)
    if dtype_name(mask) not in ("bool", "bool_"):
        raise TypeError(
            f"mask must be boolean, True = may attend; got {came(mask)}. Numbers that are added to the scores go in "
            "bias=, and where they are 0 and -inf alone, mask == 0 says the same; a mask whose True means blocked is "
            "turned by from_blocked()"
        )
    _check_broadcast("mask", mask, shape)


def check_bias(bias: Any, shape: tuple[int, ...], values: Values) -> None:
    """A floating bias of rank 2 or of the full rank of the scores' `shape`, each axis its size or 1, without NaN."""
    _check_bias_form(bias, shape)
    _refuse_nan("bias", bias, values)


def _check_bias_form(bias: Any, shape: tuple[int, ...]) -> None:
    require_array("bias", bias)
    if dtype_name(bias) not in FLOATS:
        raise TypeError(
            f"bias must be floating, it is added to the scores; got {came(bias)}. A boolean mask goes in mask="
        )
    _check_broadcast("bias", bias, shape)


def _check_broadcast(name: str, x: Any, shape: tuple[int, ...]) -> None:
    """Rank 2 (T, S) or the full rank, each axis its size or 1."""
    rank, full = len(x.shape), len(shape)
    if rank not in (2, full):
        hint = ""
        if 2 < rank < full:
            first = tuple(x.shape)
            as_batch = (*first[:-2], *(1,) * (full - rank), *first[-2:])
            as_heads = (*(1,) * (full - rank), *first)
            hint = f"; if its first axis is batch, reshape to {as_batch}; if it is heads, to {as_heads}"
        raise ValueError(
            f"{name} must have rank 2 {shape[-2:]} or the full rank {full} {shape}; got shape {tuple(x.shape)}{hint}"
        )
    target = shape[-rank:]
    if any(size not in (1, want) for size, want in zip(x.shape, target, strict=True)):
        per_row = rank == 2 and full == 4 and tuple(x.shape) == (shape[0], shape[3])
        raise ValueError(
            f"{name} must broadcast to {target} (each axis its size or 1); got shape {tuple(x.shape)}"
            + (f"; of (batch, keys) make {name}[:, None, None, :]" if per_row else "")
        )


def check_window(window: Any) -> tuple[int | None, int | None] | None:
    """None, or (left, right) with at least one side bounded."""
    if window is None:
        return None
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise TypeError(f"window must be None or (left, right); got {came(window)}")
    left, right = (
        None if side is None else require_int(f"window's {name} side", side, 0)
        for name, side in zip(("left", "right"), window, strict=True)
    )
    return None if left is None and right is None else (left, right)


def _check_offset(q_offset: Any, restricts: bool, T: int, S: int, batch: tuple[int, ...], values: Values) -> int | None:
    if q_offset is None:
        if restricts and T != S:
            raise ValueError(
                f"q_offset must be given with causal or window where T != S (T={T}, S={S}): q_offset=0 is the top-left "
                f"reading of torch and JAX, q_offset={S - T} the bottom-right one of FlashAttention and of decoding"
            )
        return 0
    if isinstance(q_offset, bool | float | str):
        raise TypeError(f"q_offset must be an integer or an integer array of shape {batch}; got {came(q_offset)}")
    if isinstance(q_offset, int | np.integer):
        return int(q_offset)
    require_integer("q_offset", q_offset)
    if tuple(q_offset.shape) == () and batch == ():
        return _as_int(q_offset, values)
    require_shape("q_offset", q_offset, batch, "(one per batch element), or be an int")
    return None


def _as_int(x: Any, values: Values) -> int | None:
    read = values(x)
    return None if read is None else int(read)


def _check_lengths_form(kv_lengths: Any, batch: tuple[int, ...]) -> None:
    if not hasattr(kv_lengths, "dtype"):
        raise TypeError(
            f"kv_lengths must be an array; got {came(kv_lengths)}: integers of shape {batch}, one per batch element"
        )
    require_integer("kv_lengths", kv_lengths)
    require_shape("kv_lengths", kv_lengths, batch, "(one per batch element)")


def _check_lengths(kv_lengths: Any, S: int, values: Values) -> None:
    read = values(kv_lengths)
    if read is not None and read.size and (read.min() < 0 or read.max() > S):
        raise ValueError(
            f"kv_lengths must be from 0 to the key length {S}; got values from {read.min()} to {read.max()}"
        )


def _check_segments(q_segments: Any, kv_segments: Any, batch: tuple[int, ...], T: int, S: int) -> None:
    if (q_segments is None) != (kv_segments is None):
        given, missing = ("q_segments", "kv_segments") if kv_segments is None else ("kv_segments", "q_segments")
        raise ValueError(f"{missing} must be given with {given}: for self-attention pass the same array twice")
    if q_segments is None:
        return
    for name, x, length in (("q_segments", q_segments, T), ("kv_segments", kv_segments, S)):
        require_integer(name, x)
        if dtype_name(x).startswith("uint"):
            raise TypeError(f"{name} must hold signed integers, a negative id is padding; got {came(x)}")
        require_shape(name, x, (*batch, length), "(batch, length)")


def _refuse_nan(name: str, x: Any, values: Values) -> None:
    # Small arrays only: looking through a (T, S) bias at every step would cost as much as the attention.
    if math.prod(x.shape) > 4096:
        return
    read = values(x)
    if read is not None and np.isnan(read).any():
        raise ValueError(f"{name} must not hold NaN; got {came(x)} with NaN in it")


def _check_softcap(softcap: Any) -> float | None:
    if softcap is None:
        return None
    value = require_number("softcap", softcap, "a finite number above 0 or None")
    if value <= 0:
        raise ValueError(f"softcap must be a finite number above 0 or None; got {softcap!r}")
    return value


def check_dropout(rate: Any, key: Any, *, rate_name: str = "dropout_rate", key_name: str = "dropout_key") -> float:
    """A rate from 0 to 1, and a key where it is above 0: dropout is never silently off."""
    value = require_number(rate_name, rate, "a number from 0 to 1")
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{rate_name} must be a number from 0 to 1; got {rate!r}")
    if value > 0 and key is None:
        raise ValueError(f"{key_name} must be given with {rate_name} > 0; got {rate_name}={rate!r} and no key")
    if key is not None:
        check_key(key_name, key)
    return value


def check_key(name: str, key: Any) -> None:
    """A key is two uint32 words (torch, without uint32 arithmetic, keeps them in int64)."""
    array = hasattr(key, "dtype") and hasattr(key, "shape")
    if not array or tuple(key.shape) != (2,) or not is_integer(key):
        raise TypeError(f"{name} must be a key made by key(), split() or fold_in(): two 32-bit words; got {came(key)}")


def check_merge(outs: Any, lses: Any) -> None:
    """`merge_attention`: as many outputs as log-sum-exps, each lse the shape of its out without the last axis."""
    if not isinstance(outs, tuple | list) or not isinstance(lses, tuple | list) or len(outs) != len(lses) or not outs:
        raise ValueError(
            f"outs and lses must be two sequences of the same length, at least 1; got {came(outs)} and {came(lses)}"
        )
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        require_float(f"outs[{i}]", out)
        require_float(f"lses[{i}]", lse)
        require_shape(f"outs[{i}]", out, outs[0].shape, "(that of outs[0])")
        require_shape(f"lses[{i}]", lse, out.shape[:-1], f"(that of outs[{i}] without its last axis)")
        if dtype_name(out) != dtype_name(outs[0]):
            raise TypeError(f"outs[{i}] must have the dtype of outs[0] ({dtype_name(outs[0])}); got {dtype_name(out)}")
