"""Faults of embeddings, sinusoids, ALiBi and relative positions."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

import core_numpy as core
from core_numpy import gradients as right

from .faults import Fault, Row, from_rows


# --- embeddings
def embed_last_wins(grad: np.ndarray, table: np.ndarray, ids: np.ndarray) -> dict[str, np.ndarray]:
    """A row used twice keeps the last gradient."""
    found = np.zeros_like(table)
    found[ids] = grad
    return {"table": found}


def embed_clamped(table: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return table[np.clip(ids, 0, len(table) - 1)]


# --- sinusoids
def _sinusoid(change: Any) -> dict[str, Any]:
    """change(p, i, width, base) -> angles."""

    def sinusoidal_encoding(
        positions: np.ndarray,
        width: int,
        *,
        base: float = 10000.0,
        layout: str = "interleaved",
        dtype: str = "float32",
    ) -> np.ndarray:
        sines = (width + 1) // 2
        angles = change(positions.astype(np.float64)[..., None], np.arange(sines), width, base).astype(np.float64)
        out = np.empty((*positions.shape, width))
        s, c = np.sin(angles), np.cos(angles[..., : width - sines])
        if layout == "interleaved":
            out[..., 0::2], out[..., 1::2] = s, c
        else:
            out[..., :sines], out[..., sines:] = s, c
        return out.astype(dtype)

    return {"sinusoidal_encoding": sinusoidal_encoding}


def _angle(p: np.ndarray, i: np.ndarray, width: int, base: float) -> np.ndarray:
    return p * base ** (-2.0 * i / width)


def _angle_float32(p: np.ndarray, i: np.ndarray, width: int, base: float) -> np.ndarray:
    return p.astype(np.float32) * np.float32(base) ** (np.float32(-2.0) * i.astype(np.float32) / np.float32(width))


def _other_layout(positions: np.ndarray, width: int, *, layout: str = "interleaved", **rest: Any) -> np.ndarray:
    other = "concatenated" if layout == "interleaved" else "interleaved"
    return core.sinusoidal_encoding(positions, width, layout=other, **rest)


def _cosine_first(positions: np.ndarray, width: int, **rest: Any) -> np.ndarray:
    even = core.sinusoidal_encoding(positions, width + width % 2, **rest)
    if rest.get("layout", "interleaved") == "concatenated":
        return np.roll(even, even.shape[-1] // 2, axis=-1)[..., :width]
    return even.reshape(*even.shape[:-1], -1, 2)[..., ::-1].reshape(even.shape)[..., :width]


def _padded(positions: np.ndarray, width: int, **rest: Any) -> np.ndarray:
    """An odd width is one less, and a column of zeros."""
    even = core.sinusoidal_encoding(positions, width - width % 2, **rest)
    return np.concatenate([even, np.zeros((*even.shape[:-1], width % 2), even.dtype)], axis=-1)


# --- ALiBi
def slopes_closed_form(heads: int, *, dtype: str = "float32") -> np.ndarray:
    return (2.0 ** (-8.0 * np.arange(1, heads + 1) / heads)).astype(dtype)


def slopes_sorted(heads: int, *, dtype: str = "float32") -> np.ndarray:
    return np.sort(core.alibi_slopes(heads, dtype=dtype))[::-1].copy()


def slopes_from_one(heads: int, *, dtype: str = "float32") -> np.ndarray:
    return (core.alibi_slopes(heads, dtype=dtype) * 2.0 ** (8.0 / (1 << (heads.bit_length() - 1)))).astype(dtype)


def slopes_cut(heads: int, *, dtype: str = "float32") -> np.ndarray:
    """The next power's first slopes."""
    return core.alibi_slopes(1 << (heads - 1).bit_length(), dtype=dtype)[:heads]


def _alibi(change: Any) -> dict[str, Any]:
    def alibi_bias(heads: int, T: int, S: int | None = None, *, q_offset: Any = 0, dtype: str = "float32") -> Any:
        distance = np.arange(T if S is None else S)[None, :] - (np.arange(T)[:, None] + q_offset)
        slopes = core.alibi_slopes(heads, dtype="float64")[:, None, None]
        return change(slopes, distance.astype(np.float64), q_offset).astype(dtype)

    return {"alibi_bias": alibi_bias}


# --- relative positions
def _buckets(change: Any) -> dict[str, Any]:
    """change(distance, each, max_distance) -> bucket within a direction; the rest as it should be."""

    def relative_buckets(
        T: int,
        S: int | None = None,
        *,
        buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        q_offset: int = 0,
    ) -> np.ndarray:
        relative = np.arange(T if S is None else S)[None, :] - (np.arange(T)[:, None] + q_offset)
        each = buckets // 2 if bidirectional else buckets
        distance = np.abs(relative) if bidirectional else np.maximum(-relative, 0)
        found = change(distance, each, max_distance)
        return (found + each * (relative > 0) * bidirectional).astype(np.int32)

    return {"relative_buckets": relative_buckets}


def _logarithmic(distance: np.ndarray, exact: int, last: int, max_distance: int) -> np.ndarray:
    """exact for what is below, then logarithmic up to `last`, not limited."""
    with np.errstate(divide="ignore"):
        ratio = np.log(np.maximum(distance, 1) / exact) / math.log(max_distance / exact)
    return np.where(distance < exact, distance, exact + np.floor(ratio * (last - exact))).astype(np.int64)


def _unlimited(distance: np.ndarray, each: int, max_distance: int) -> np.ndarray:
    return _logarithmic(distance, each // 2, each, max_distance)


def _rounded(distance: np.ndarray, each: int, max_distance: int) -> np.ndarray:
    """Rounded to the nearest bucket, not down."""
    exact = each // 2
    ratio = np.log(np.maximum(distance, 1) / exact) / math.log(max_distance / exact)
    far = exact + np.rint(ratio * (each - exact))
    return np.where(distance < exact, distance, np.minimum(far, each - 1))


def _linear(distance: np.ndarray, each: int, max_distance: int) -> np.ndarray:
    return np.minimum(distance, each - 1)


def _all_logarithmic(distance: np.ndarray, each: int, max_distance: int) -> np.ndarray:
    """Half as many exact ones."""
    return np.minimum(_logarithmic(distance, each // 4 or 1, each, max_distance), each - 1)


def _half_logs(distance: np.ndarray, each: int, max_distance: int) -> np.ndarray:
    exact = each // 2
    log = np.log(np.maximum(distance, 1) / exact).astype(ml_dtypes.bfloat16).astype(np.float64)
    far = exact + np.floor(log / math.log(max_distance / exact) * (each - exact))
    return np.where(distance < exact, distance, np.minimum(far, each - 1))


def buckets_other_way(T: int, S: int | None = None, *, q_offset: int = 0, **rest: Any) -> np.ndarray:
    """Keys before the query take the upper half; causal buckets count the future."""
    size = T if S is None else S
    return core.relative_buckets(size, T, q_offset=-q_offset, **rest).T.copy()


def buckets_without_offset(T: int, S: int | None = None, *, q_offset: int = 0, **rest: Any) -> np.ndarray:
    return core.relative_buckets(T, S, **rest)


def bias_of_first_head(table: np.ndarray, T: int, S: int | None = None, **rest: Any) -> np.ndarray:
    return core.relative_bias(np.broadcast_to(table[:, :1], table.shape).copy(), T, S, **rest)


def bias_scaled(table: np.ndarray, T: int, S: int | None = None, **rest: Any) -> np.ndarray:
    bias = core.relative_bias(table, T, S, **rest)
    return (bias.astype(np.float64) / math.sqrt(table.shape[1])).astype(table.dtype)


def bias_gradient_mean(grad: np.ndarray, table: np.ndarray, T: int, S: int | None = None, **rest: Any) -> Any:
    found = right.relative_bias_vjp(grad, table, T, S, **rest)["table"].astype(np.float64)
    ids, counts = np.unique(core.relative_buckets(T, S, **rest), return_counts=True)
    found[ids] /= counts[:, None]
    return {"table": found.astype(table.dtype)}


_ROWS: list[Row] = [
    ("embed-last-wins", "a row that is used twice keeps one gradient",
     "subtle", {"gradients.embed_vjp": embed_last_wins},
     "the table's gradient keeps the last use of a row; the contract is the sum over all uses"),
    ("embed-clamps", "an index past the table clamps in silence [jax 3774]",
     "rare", {"embed": embed_clamped},
     "ids past the table are clamped; the contract is an error"),
    ("sinusoid-order", "sines and cosines in the other order [tensor2tensor 391]",
     "blatant", {"sinusoidal_encoding": _other_layout},
     "the two layouts are exchanged; the contract is sin, cos, sin, cos for interleaved and all sines first otherwise"),
    ("sinusoid-cosine-first", "the cosine before the sine",
     "blatant", {"sinusoidal_encoding": _cosine_first},
     "cosines come before sines; the contract is the sine first"),
    ("sinusoid-exponent", "the exponent divides by n - 1 [tensor2tensor 1423]",
     "subtle", _sinusoid(lambda p, i, w, b: p * b ** (-i / max((w + 1) // 2 - 1, 1))),
     "the exponent divides by the number of pairs less one; the contract is base^(-2i / width)"),
    ("sinusoid-exponent-half", "the exponent without its 2",
     "blatant", _sinusoid(lambda p, i, w, b: p * b ** (-i / w)),
     "the exponent lacks its factor 2; the contract is base^(-2i / width)"),
    ("sinusoid-odd", "an odd width is padded with zeros [pyaptamer 607]",
     "rare", {"sinusoidal_encoding": _padded},
     "an odd width is padded with zeros; the contract is one sine more than cosines"),
    ("sinusoid-base", "the base is ignored",
     "subtle", _sinusoid(lambda p, i, w, b: _angle(p, i, w, 10000.0)),
     "the base is ignored; the contract is base^(-2i / width)"),
    ("sinusoid-from-one", "positions from 1",
     "blatant", _sinusoid(lambda p, i, w, b: _angle(p + 1, i, w, b)),
     "positions are one too large; the contract is the position as given"),
    ("sinusoid-absolute", "a negative position loses its sign",
     "rare", _sinusoid(lambda p, i, w, b: _angle(np.abs(p), i, w, b)),
     "a negative position loses its sign; the contract is any integer"),
    ("sinusoid-half-positions", "positions past 256 in bfloat16 [transformers 29285]",
     "rare", _sinusoid(lambda p, i, w, b: _angle(p.astype(ml_dtypes.bfloat16).astype(np.float64), i, w, b)),
     "positions are rounded to bfloat16; the contract is that they are never rounded"),
    ("sinusoid-float32-angle", "angles in float32 drift at far positions [transformers 29285]",
     "rare", _sinusoid(_angle_float32),
     "angles are computed in float32; the contract is float64, or a reduction without loss"),
    ("alibi-closed-form", "2^(-8h/n) for every n [mlx 3071]",
     "rare", {"alibi_slopes": slopes_closed_form},
     "slopes follow 2^(-8h/n) for every n; the contract is the power of two below, then every second of the next"),
    ("alibi-sorted", "slopes in falling order [CROMA 12]",
     "rare", {"alibi_slopes": slopes_sorted},
     "slopes are sorted; the contract is those of the power of two below first, then the others"),
    ("alibi-cut", "the first slopes of the next power of two",
     "rare", {"alibi_slopes": slopes_cut},
     "slopes are the first of the next power of two; the contract is the power below, then every second of the next"),
    ("alibi-from-one", "slopes that start at 1",
     "blatant", {"alibi_slopes": slopes_from_one},
     "slopes start at 1; the contract is 2^(-8/n)"),
    ("alibi-sign", "the bias grows with the distance",
     "blatant", _alibi(lambda m, d, o: m * np.abs(d)),
     "the bias grows with the distance; the contract is -slope |i + q_offset - j|"),
    ("alibi-one-sided", "no penalty after the query",
     "subtle", _alibi(lambda m, d, o: m * np.minimum(d, 0.0)),
     "keys after the query have bias 0; the contract is -slope |i + q_offset - j| on both sides"),
    ("alibi-signed", "the signed distance",
     "subtle", _alibi(lambda m, d, o: m * d),
     "the bias is slope (j - i), positive after the query; the contract is -slope |i + q_offset - j|"),
    ("alibi-key-position", "slope times the key's position, right up to a row's constant",
     "subtle", _alibi(lambda m, d, o: m * np.broadcast_to(np.arange(d.shape[-1]), d.shape)),
     "the bias is slope j; the contract is -slope |i + q_offset - j|"),
    ("alibi-offset", "the offset is ignored",
     "subtle", _alibi(lambda m, d, o: -m * np.abs(d + o)),
     "q_offset is ignored; the contract is -slope |i + q_offset - j|"),
    ("relative-direction", "the halves for the two directions swapped",
     "subtle", {"relative_buckets": buckets_other_way},
     "the direction is turned round; the contract is j - (i + q_offset), keys after the query in the upper half"),
    ("relative-offset", "the offset is ignored",
     "subtle", {"relative_buckets": buckets_without_offset},
     "q_offset is ignored; the contract is j - (i + q_offset)"),
    ("relative-not-limited", "an index that is not limited [candle 1312]",
     "rare", _buckets(_unlimited),
     "far distances go past the last bucket; the contract is that the last one holds all beyond"),
    ("relative-rounded", "rounded to the nearest bucket",
     "rare", _buckets(_rounded),
     "logarithmic buckets are rounded to the nearest; the contract is downwards"),
    ("relative-linear", "no logarithmic buckets",
     "rare", _buckets(_linear),
     "all buckets hold one distance; the contract is the first half, then logarithmic ones"),
    ("relative-few-exact", "a quarter of the buckets exact",
     "subtle", _buckets(_all_logarithmic),
     "too few buckets hold one distance; the contract is the first n // 2"),
    ("relative-half-logs", "logarithms in bfloat16 [candle 1312]",
     "rare", _buckets(_half_logs),
     "bucket edges come from logarithms in bfloat16; the contract is whole numbers"),
    ("relative-first-head", "one column of the table for all heads",
     "subtle", {"relative_bias": bias_of_first_head},
     "all heads use the table's first column; the contract is one column per head"),
    ("relative-scaled", "the bias is scaled",
     "subtle", {"relative_bias": bias_scaled},
     "the relative bias is divided by sqrt(heads); the contract is the table's own entry"),
    ("relative-gradient-mean", "the table's gradient averages over the pairs of a bucket",
     "subtle", {"gradients.relative_bias_vjp": bias_gradient_mean},
     "the table's gradient is a mean over a bucket's pairs; the contract is their sum"),
]  # fmt: skip


def faults() -> list[Fault]:
    return from_rows(_ROWS)
