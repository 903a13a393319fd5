"""The angles per position that rotary encodings turn by, in float64. Formulas and rules: core_numpy.frequencies.

They are constants of a model, so NumPy computes them on the host: JAX has no float64 while x64 is off. A model hands
them to `rotary_tables` as they are, which loses nothing; `rotary_frequencies` gives them as a JAX array.
"""

from __future__ import annotations

import math

import numpy as np

from core_numpy.contract.config import RotaryScaling


def scaled_frequencies(
    dim: int, base: float, scaling: RotaryScaling | None, length: int | None
) -> tuple[np.ndarray, float]:
    """float64 (dim/2,) on the host and the attention factor, from checked arguments. Rules: core_numpy.frequencies."""
    plain = 1.0 / base ** (np.arange(0, dim, 2) / dim)
    if scaling is None:
        return plain, 1.0
    return plain * _change(plain, dim, base, scaling, length), attention_factor(scaling)


def attention_factor(scaling: RotaryScaling) -> float:
    """What the tables are multiplied by. Rules: core_numpy.frequencies."""
    if scaling.attention_factor is not None:
        return float(scaling.attention_factor)
    growth = math.log(max(scaling.factor, 1.0))
    if scaling.kind == "yarn":
        return 1.0 + 0.1 * growth
    if scaling.kind == "longrope" and growth > 0.0:
        return math.sqrt(1.0 + growth / math.log(scaling.original_max_length or 1))
    return 1.0


def _change(plain: np.ndarray, dim: int, base: float, scaling: RotaryScaling, length: int | None) -> np.ndarray:
    """What each frequency is multiplied by."""
    s, trained = scaling.factor, scaling.original_max_length or 1
    running = max(length or trained, trained)
    if scaling.kind == "linear":
        return np.full(plain.shape, 1.0 / s)
    if scaling.kind == "ntk":
        return _stretch(dim, s)
    if scaling.kind == "dynamic":
        return _stretch(dim, 1.0 + s * (running / trained - 1.0))
    if scaling.kind == "longrope":
        factors = scaling.long_factors if running > trained else scaling.short_factors
        return 1.0 / np.array(factors)
    kept = _kept_yarn(dim, base, scaling) if scaling.kind == "yarn" else _kept_llama3(plain, scaling)
    return kept + (1.0 - kept) / s


def _stretch(dim: int, s: float) -> np.ndarray:
    # dim = 2 has only the exponent 0, whose frequency any base leaves at 1.
    return (1.0 / s) ** (np.arange(0, dim, 2) / max(dim - 2, 1))


def _kept_yarn(dim: int, base: float, scaling: RotaryScaling) -> np.ndarray:
    """1 where the frequency stays, 0 where it is divided."""
    # Pair i turns base^(-2i / dim) L / (2 pi) times within the trained length L; solved for i.
    ends = [
        dim * math.log((scaling.original_max_length or 1) / (2.0 * math.pi * turns), base) / 2.0
        for turns in (scaling.beta_fast, scaling.beta_slow)
    ]
    low, high = max(math.floor(ends[0]), 0), min(math.ceil(ends[1]), dim - 1)
    # The published code widens an empty ramp by this much.
    width = high - low if high != low else 0.001
    return 1.0 - np.clip((np.arange(dim // 2) - low) / width, 0.0, 1.0)


def _kept_llama3(plain: np.ndarray, scaling: RotaryScaling) -> np.ndarray:
    turns = (scaling.original_max_length or 1) * plain / (2.0 * math.pi)
    return np.clip((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0.0, 1.0)
