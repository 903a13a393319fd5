"""The angles per position that rotary encodings turn by, and how they are stretched for longer texts.

With f_i = base^(-2i / dim), i = 0 .. dim/2 - 1, s = factor, L = original_max_length:

frequencies-1: without scaling f_i is the frequency, and the attention factor is 1.
frequencies-2: linear divides every frequency by s.
frequencies-3: ntk stretches the base to base s^(dim / (dim - 2)): f_i s^(-2i / (dim - 2)); f_0 = 1 stays.
frequencies-4: dynamic is ntk with s' = s n / L - (s - 1), n = max(length, L); without a length n = L, which changes
nothing. The length is the caller's: nothing is remembered between calls.
frequencies-5: yarn mixes, f_i / s and f_i, by a ramp over i: with c(r) = dim log(L / (2 pi r)) / (2 log base), those
up to max(floor(c(beta_fast)), 0) stay, those from min(ceil(c(beta_slow)), dim - 1) on are divided, linearly between.
frequencies-6: llama3 mixes by the wavelength w = 2 pi / f_i: t = (L / w - low) / (high - low), cut to [0, 1], with
low = low_freq_factor and high = high_freq_factor; the frequency is t f_i + (1 - t) f_i / s.
frequencies-7: longrope divides f_i by long_factors[i] where length > L, else, and without a length, by
short_factors[i].
frequencies-8: the attention factor is the one given, else 0.1 log(s) + 1 for yarn with s > 1,
sqrt(1 + log(s) / log(L)) for longrope with s > 1, and 1 for everything else.

Sources: Su et al. 2021 (RoPE); Chen et al. 2023 (linear); bloc97 2023 (ntk, dynamic); Peng et al. 2023 (YaRN);
Grattafiori et al. 2024 (Llama 3); Ding et al. 2024 (LongRoPE).
"""

from __future__ import annotations

import math

import numpy as np

from .contract.config import RotaryScaling


def scaled_frequencies(
    dim: int, base: float, scaling: RotaryScaling | None, length: int | None
) -> tuple[np.ndarray, float]:
    """float64 (dim/2,) and the attention factor, from checked arguments. Rules: frequencies-1 to frequencies-8."""
    i = np.arange(dim // 2, dtype=np.float64)
    plain = base ** (-2.0 * i / dim)
    if scaling is None:
        return plain, 1.0
    s, L = scaling.factor, scaling.original_max_length or 1
    if scaling.kind == "linear":
        scaled = plain / s
    elif scaling.kind == "ntk":
        scaled = plain * _stretch(i, dim, s)
    elif scaling.kind == "dynamic":
        scaled = plain * _stretch(i, dim, s * max(length or L, L) / L - (s - 1.0))
    elif scaling.kind == "yarn":
        divided = _yarn_ramp(i, dim, base, scaling)
        scaled = divided * plain / s + (1.0 - divided) * plain
    elif scaling.kind == "llama3":
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = np.clip((L * plain / (2.0 * math.pi) - low) / (high - low), 0.0, 1.0)
        scaled = kept * plain + (1.0 - kept) * plain / s
    else:
        factors = scaling.long_factors if (length or L) > L else scaling.short_factors
        scaled = plain / np.array(factors, dtype=np.float64)
    return scaled, attention_factor(scaling)


def attention_factor(scaling: RotaryScaling) -> float:
    """What the tables are multiplied by. Rules: frequencies-8."""
    s = scaling.factor
    if scaling.attention_factor is not None:
        return float(scaling.attention_factor)
    if scaling.kind == "yarn" and s > 1.0:
        return 0.1 * math.log(s) + 1.0
    if scaling.kind == "longrope" and s > 1.0:
        return math.sqrt(1.0 + math.log(s) / math.log(scaling.original_max_length or 1))
    return 1.0


def _stretch(i: np.ndarray, dim: int, s: float) -> np.ndarray:
    # dim = 2 has only i = 0, whose frequency any base leaves at 1.
    return s ** (-2.0 * i / max(dim - 2, 1))


def _yarn_ramp(i: np.ndarray, dim: int, base: float, scaling: RotaryScaling) -> np.ndarray:
    """frequencies-5: 0 where the frequency stays, 1 where it is divided."""
    L = scaling.original_max_length or 1

    def index_of(rotations: float) -> float:
        return dim * math.log(L / (2.0 * math.pi * rotations)) / (2.0 * math.log(base))

    low = max(math.floor(index_of(scaling.beta_fast)), 0)
    high = min(math.ceil(index_of(scaling.beta_slow)), dim - 1)
    # The published code widens an empty ramp by this much.
    width = high - low if high != low else 0.001
    return np.clip((i - low) / width, 0.0, 1.0)
