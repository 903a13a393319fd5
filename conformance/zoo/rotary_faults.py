"""Faults of rotary encodings: frequencies and their scalings, tables, rotation, the permutation of weights."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

import core_numpy as core
from core_numpy import gradients as right

from .faults import Fault, Row, from_rows


# --- frequencies
def _frequencies(change: Any) -> dict[str, Any]:
    """change(dim, base, scaling, length) -> frequencies, factor."""

    def rotary_frequencies(dim: int, *, base: float = 10000.0, scaling: Any = None, length: int | None = None) -> Any:
        return change(dim, base, scaling, length)

    return {"rotary_frequencies": rotary_frequencies}


def _own(dim: int, base: float, scaling: Any = None, length: int | None = None) -> tuple[np.ndarray, float]:
    return core.rotary_frequencies(dim, base=base, scaling=scaling, length=length)


def _of_kind(kind: str, change: Any) -> dict[str, Any]:
    """change(dim, base, scaling, length) for scalings of one kind, the right answer for the others."""
    return _frequencies(
        lambda dim, base, scaling, length: (
            change(dim, base, scaling, length)
            if scaling is not None and scaling.kind == kind
            else _own(dim, base, scaling, length)
        )
    )


def _replaced(**fields: Any) -> Any:
    return lambda dim, base, scaling, length: _own(dim, base, scaling.replace(**fields), length)


def _without_factor(dim: int, base: float, scaling: Any, length: int | None) -> tuple[np.ndarray, float]:
    return _own(dim, base, scaling, length)[0], 1.0


def _exponent(of: Any) -> dict[str, Any]:
    def plain(dim: int, base: float, scaling: Any, length: int | None) -> tuple[np.ndarray, float]:
        if scaling is not None:
            return _own(dim, base, scaling, length)
        return base ** (-of(np.arange(dim // 2, dtype=np.float64), dim)), 1.0

    return _frequencies(plain)


def _ntk_exponent(dim: int, base: float, scaling: Any, length: int | None) -> tuple[np.ndarray, float]:
    """The base stretched by the factor itself."""
    return _own(dim, base * scaling.factor)


def _dynamic_remembers(dim: int, base: float, scaling: Any, length: int | None) -> tuple[np.ndarray, float]:
    return _own(dim, base, scaling, max(length or 1, 4 * scaling.original_max_length))


def _dynamic_ratio(dim: int, base: float, scaling: Any, length: int | None) -> tuple[np.ndarray, float]:
    """The running length over the original one, without what is taken off."""
    L = scaling.original_max_length
    return _own(dim, base, core.RotaryScaling(kind="ntk", factor=scaling.factor * max(length or L, L) / L))


def _yarn_inverted(dim: int, base: float, scaling: Any, length: int | None) -> tuple[np.ndarray, float]:
    plain, (mixed, factor) = _own(dim, base)[0], _own(dim, base, scaling, length)
    return plain + plain / scaling.factor - mixed, factor


def _yarn_exact(dim: int, base: float, scaling: Any, length: int | None) -> tuple[np.ndarray, float]:
    """The ramp's ends are not rounded to whole pairs."""
    L, i = scaling.original_max_length, np.arange(dim // 2)
    low, high = (
        dim * math.log(L / (2.0 * math.pi * r)) / (2.0 * math.log(base)) for r in (scaling.beta_fast, scaling.beta_slow)
    )
    low, high = max(low, 0.0), min(high, dim - 1.0)
    ramp = np.clip((i - low) / max(high - low, 1e-3), 0.0, 1.0)
    plain = _own(dim, base)[0]
    return ramp * plain / scaling.factor + (1.0 - ramp) * plain, _own(dim, base, scaling, length)[1]


def _llama_step(dim: int, base: float, scaling: Any, length: int | None) -> tuple[np.ndarray, float]:
    plain = _own(dim, base)[0]
    turns = scaling.original_max_length * plain / (2.0 * math.pi)
    return np.where(turns > scaling.high_freq_factor, plain, plain / scaling.factor), 1.0


def _long_multiplied(dim: int, base: float, scaling: Any, length: int | None) -> tuple[np.ndarray, float]:
    plain, (scaled, factor) = _own(dim, base)[0], _own(dim, base, scaling, length)
    return plain * plain / scaled, factor


# --- tables
def _tables(change: Any) -> dict[str, Any]:
    """change(p, f, factor) -> cos, sin."""

    def rotary_tables(positions: np.ndarray, frequencies: np.ndarray, *, attention_factor: float = 1.0) -> Any:
        return change(positions.astype(np.float64)[..., None], frequencies.astype(np.float64), attention_factor)

    return {"rotary_tables": rotary_tables}


def _turn(angles: np.ndarray, factor: float) -> tuple[np.ndarray, np.ndarray]:
    return factor * np.cos(angles), factor * np.sin(angles)


def _half(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


# --- rotation
def rotate_other_layout(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, *, layout: str = "half") -> np.ndarray:
    return core.apply_rotary(x, cos, sin, layout="interleaved" if layout == "half" else "half")


def rotate_back(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, *, layout: str = "half") -> np.ndarray:
    return core.apply_rotary(x, cos, -sin, layout=layout)


def rotate_last(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, *, layout: str = "half") -> np.ndarray:
    """The last features turn, the first pass."""
    start = x.shape[-1] - 2 * cos.shape[-1]
    return np.concatenate([x[..., :start], core.apply_rotary(x[..., start:], cos, sin, layout=layout)], axis=-1)


def rotate_rest_lost(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, *, layout: str = "half") -> np.ndarray:
    out = core.apply_rotary(x, cos, sin, layout=layout)
    out[..., 2 * cos.shape[-1] :] = 0
    return out


def rotate_pairs_across(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, *, layout: str = "half") -> np.ndarray:
    """Halves of the whole head, though only some features turn: pairs (i, i + D / 2)."""
    r, D = cos.shape[-1], x.shape[-1]
    if layout != "half" or 2 * r == D or D % 2:
        return core.apply_rotary(x, cos, sin, layout=layout)
    order = np.concatenate([np.arange(r), D // 2 + np.arange(r), np.arange(r, D // 2), np.arange(D // 2 + r, D)])
    turned = core.apply_rotary(x[..., order], cos, sin, layout=layout)
    return turned[..., np.argsort(order)]


def rotate_first_row(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, *, layout: str = "half") -> np.ndarray:
    if cos.ndim > 2:
        cos, sin = cos[0], sin[0]
    return core.apply_rotary(x, cos, sin, layout=layout)


def rotate_in_half(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, *, layout: str = "half") -> np.ndarray:
    """Tables cast down to the half type first."""
    if x.dtype in (np.float64, np.float32):
        return core.apply_rotary(x, cos, sin, layout=layout)
    return core.apply_rotary(x, *(t.astype(ml_dtypes.bfloat16) for t in (cos, sin)), layout=layout)


def rotate_gradient_forward(grad: np.ndarray, x: np.ndarray, cos: np.ndarray, sin: np.ndarray, **rest: Any) -> Any:
    return right.apply_rotary_vjp(grad, x, cos, -sin, **rest)


# --- the permutation of weights
def permute_inverse(weight: np.ndarray, heads: int, *, source: str, target: str, **rest: Any) -> np.ndarray:
    return core.permute_rotary(weight, heads, source=target, target=source, **rest)


def permute_nothing(weight: np.ndarray, heads: int, *, source: str, target: str, **rest: Any) -> np.ndarray:
    return weight.copy()


def permute_one_head(weight: np.ndarray, heads: int, *, source: str, target: str, **rest: Any) -> np.ndarray:
    return core.permute_rotary(weight, 1, source=source, target=target)


def permute_all(weight: np.ndarray, heads: int, *, source: str, target: str, rotary_dim: Any = None) -> np.ndarray:
    return core.permute_rotary(weight, heads, source=source, target=target)


def permute_rows(weight: np.ndarray, heads: int, *, source: str, target: str, **rest: Any) -> np.ndarray:
    """(out, in), as the other framework has it: the wrong axis where this one's is last."""
    if weight.ndim < 2 or weight.shape[0] % (2 * heads):
        return core.permute_rotary(weight, heads, source=source, target=target, **rest)
    return core.permute_rotary(weight.T.copy(), heads, source=source, target=target).T.copy()


_ROWS: list[Row] = [
    ("frequencies-exponent", "the exponent without its 2",
     "blatant", _exponent(lambda i, dim: i / dim),
     "the exponent of the frequencies is i / dim; the contract is base^(-2i / dim)"),
    ("frequencies-n-less-one", "the exponent divides by n - 1 [tensor2tensor 1423]",
     "subtle", _exponent(lambda i, dim: i / max(dim // 2 - 1, 1)),
     "the exponent of the frequencies divides by the number of pairs less one; the contract is base^(-2i / dim)"),
    ("frequencies-base", "the base is lost [SpecForge 651]",
     "blatant", _frequencies(lambda dim, base, scaling, length: _own(dim, 10000.0, scaling, length)),
     "the base is ignored and 10000 used; the contract is base^(-2i / dim)"),
    ("scaling-ignored", "a scaling that is parsed and dropped [Megatron-LM 6305]",
     "blatant", _frequencies(lambda dim, base, scaling, length: _own(dim, base)),
     "the scaling is ignored; the contract is its formula"),
    ("scaling-factor-ignored", "the factor is parsed and a default used [Megatron-LM 6305]",
     "subtle", _frequencies(lambda dim, base, scaling, length: _own(
         dim, base, None if scaling is None else scaling.replace(factor=8.0), length)),
     "the scaling's factor is dropped and 8 used; the contract is the factor that is given"),
    ("scaling-linear-multiplies", "the factor multiplies",
     "blatant", _of_kind("linear", lambda d, b, s, n: (_own(d, b)[0] * s.factor, 1.0)),
     "linear scaling multiplies by the factor; the contract divides every frequency by it"),
    ("scaling-ntk-exponent", "the base stretched by the factor alone",
     "subtle", _of_kind("ntk", _ntk_exponent),
     "ntk stretches the base by the factor; the contract is factor^(dim / (dim - 2))"),
    ("scaling-dynamic-static", "dynamic scaling at a longest length seen [transformers 25104]",
     "subtle", _of_kind("dynamic", _dynamic_remembers),
     "dynamic scaling remembers a longest length; the contract is the running length alone"),
    ("scaling-dynamic-ratio", "dynamic scaling without what is taken off [transformers 25104]",
     "subtle", _of_kind("dynamic", _dynamic_ratio),
     "dynamic scaling takes s n / L; the contract is s n / L - (s - 1)"),
    ("scaling-yarn-factor", "YaRN without its attention factor",
     "subtle", _of_kind("yarn", _without_factor),
     "yarn lacks its attention factor; the contract is 0.1 log(s) + 1"),
    ("scaling-yarn-inverted", "YaRN's ramp the other way",
     "blatant", _of_kind("yarn", _yarn_inverted),
     "yarn's ramp is turned round; the contract keeps the high frequencies and divides the low ones"),
    ("scaling-yarn-exact", "YaRN's ramp not rounded to whole pairs",
     "rare", _of_kind("yarn", _yarn_exact),
     "the ends of yarn's ramp are not rounded; the contract is floor and ceil"),
    ("scaling-yarn-betas", "YaRN's betas ignored",
     "subtle", _of_kind("yarn", _replaced(beta_fast=32.0, beta_slow=1.0)),
     "yarn's beta_fast and beta_slow are ignored; the contract reads both"),
    ("scaling-llama3-step", "Llama 3's scaling without the smooth part",
     "rare", _of_kind("llama3", _llama_step),
     "llama3 scaling has no smooth part; the contract mixes between the two wavelengths"),
    ("scaling-llama3-limits", "Llama 3's limits ignored",
     "subtle", _of_kind("llama3", _replaced(low_freq_factor=1.0, high_freq_factor=4.0)),
     "llama3's low_freq_factor and high_freq_factor are ignored; the contract reads both"),
    ("scaling-longrope-short", "LongRoPE's short factors at any length",
     "subtle", _of_kind("longrope", lambda d, b, s, n: _own(d, b, s, None)),
     "longrope never takes its long factors; the contract takes them where the length is above the original one"),
    ("scaling-longrope-multiplies", "LongRoPE's factors multiply",
     "blatant", _of_kind("longrope", _long_multiplied),
     "longrope multiplies by its factors; the contract divides"),
    ("scaling-longrope-factor", "LongRoPE without its attention factor",
     "subtle", _of_kind("longrope", _without_factor),
     "longrope lacks its attention factor; the contract is sqrt(1 + log(s) / log(L))"),
    ("tables-factor-ignored", "the attention factor is ignored",
     "blatant", _tables(lambda p, f, a: _turn(p * f, 1.0)),
     "the attention factor is ignored; the contract multiplies cosine and sine by it"),
    ("tables-factor-cosine", "the attention factor on the cosine alone",
     "subtle", _tables(lambda p, f, a: (a * np.cos(p * f), np.sin(p * f))),
     "the attention factor multiplies the cosine alone; the contract multiplies both"),
    ("tables-swapped", "sine and cosine swapped",
     "blatant", _tables(lambda p, f, a: _turn(p * f, a)[::-1]),
     "the tables come back as (sin, cos); the contract is (cos, sin)"),
    ("tables-half", "a table kept in bfloat16 [transformers 29285]",
     "subtle", _tables(lambda p, f, a: tuple(_half(t) for t in _turn(p * f, a))),
     "the tables are rounded to bfloat16; the contract is float32 at least"),
    ("tables-half-positions", "positions past 256 in bfloat16 [transformers 29285]",
     "rare", _tables(lambda p, f, a: _turn(_half(p) * f, a)),
     "positions are rounded to bfloat16; the contract is that they are never rounded"),
    ("tables-float32-angle", "angles in float32 drift at far positions [transformers 29285]",
     "rare", _tables(lambda p, f, a: _turn((p.astype(np.float32) * f.astype(np.float32)).astype(np.float64), a)),
     "angles are rounded to float32; the contract is float64, or a reduction without loss"),
    ("tables-first-row", "one vector of positions for the whole batch [unsloth 4078]",
     "subtle", _tables(lambda p, f, a: _turn((np.broadcast_to(p[:1], p.shape) if p.ndim > 2 else p) * f, a)),
     "all batch elements use the first one's positions; the contract is each its own"),
    ("rotary-other-layout", "halves for neighbours [transformers 25199]",
     "blatant", {"apply_rotary": rotate_other_layout},
     "the two layouts are exchanged; the contract pairs (i, i + n) for half and (2i, 2i + 1) for interleaved"),
    ("rotary-sign", "the rotation turns the other way",
     "blatant", {"apply_rotary": rotate_back},
     "the rotation has the wrong sign; the contract is (a cos - b sin, b cos + a sin)"),
    ("rotary-last-features", "partial rotation of the last features",
     "subtle", {"apply_rotary": rotate_last},
     "the last features turn; the contract is the first"),
    ("rotary-rest-lost", "features past the rotated ones are lost",
     "subtle", {"apply_rotary": rotate_rest_lost},
     "features past the rotated ones are lost; the contract passes them unchanged"),
    ("rotary-pairs-across", "partial rotation pairs across the whole head",
     "subtle", {"apply_rotary": rotate_pairs_across},
     "pairs are (i, i + D / 2) though fewer features turn; the contract is halves of the rotated features"),
    ("rotary-first-row", "one table for the whole batch [unsloth 4078]",
     "subtle", {"apply_rotary": rotate_first_row},
     "all batch elements use the first one's table; the contract is each its own"),
    ("rotary-half-table", "tables cast down to bfloat16 [transformers 29285]",
     "rare", {"apply_rotary": rotate_in_half},
     "tables are rounded to bfloat16 for half types; the contract is float32 at least"),
    ("rotary-gradient-forward", "the gradient turns forward, not back",
     "blatant", {"gradients.apply_rotary_vjp": rotate_gradient_forward},
     "the gradient is rotated forward; the contract rotates it back"),
    ("permute-inverse", "the inverse permutation [transformers 25199]",
     "rare", {"permute_rotary": permute_inverse},
     "the permutation is the inverse one; the contract goes from source to target"),
    ("permute-forgotten", "the permutation is forgotten [transformers 25199]",
     "blatant", {"permute_rotary": permute_nothing},
     "weights are not permuted; the contract reorders the rotated features of each head"),
    ("permute-one-head", "all heads permuted as one [nanotron 427]",
     "blatant", {"permute_rotary": permute_one_head},
     "all heads are permuted as one; the contract is head by head"),
    ("permute-all-features", "features that do not turn are permuted too",
     "rare", {"permute_rotary": permute_all},
     "rotary_dim is ignored; the contract moves the rotated features alone"),
    ("permute-other-axis", "the input axis is permuted, as for (out, in) weights [nntile 370]",
     "rare", {"permute_rotary": permute_rows},
     "the first axis is permuted; the contract is the last, (in, heads D)"),
]  # fmt: skip


def faults() -> list[Fault]:
    return from_rows(_ROWS)
