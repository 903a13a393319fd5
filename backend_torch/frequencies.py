"""The angles per position that rotary encodings turn by, in float64. Formulas and rules: core_numpy.frequencies."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from core_numpy.contract.config import RotaryScaling


def scaled_frequencies(
    dim: int, base: float, scaling: RotaryScaling | None, length: int | None
) -> tuple[Tensor, float]:
    """float64 (dim/2,) on the CPU and the attention factor, from checked arguments. Rules: core_numpy.frequencies."""
    # On the CPU whatever the default device is: some accelerators have no float64.
    exponents = torch.arange(0, dim, 2, dtype=torch.float64, device="cpu")
    plain = torch.pow(base, -exponents / dim)
    if scaling is None:
        return plain, 1.0
    s, L = scaling.factor, scaling.original_max_length or 1
    running = L if length is None else length
    match scaling.kind:
        case "linear":
            scaled = plain / s
        case "ntk":
            scaled = plain * _stretch(exponents, dim, s)
        case "dynamic":
            scaled = plain * _stretch(exponents, dim, s * max(running, L) / L - (s - 1.0))
        case "yarn":
            scaled = torch.lerp(plain, plain / s, _yarn_ramp(exponents / 2, dim, base, scaling))
        case "llama3":
            turns = L * plain / (2.0 * math.pi)  # how often a frequency turns within the trained length
            kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
            scaled = torch.lerp(plain / s, plain, kept.clamp(0.0, 1.0))
        case _:
            factors = scaling.long_factors if running > L else scaling.short_factors
            scaled = plain / torch.tensor(factors, dtype=torch.float64, device="cpu")
    return scaled, attention_factor(scaling)


def attention_factor(scaling: RotaryScaling) -> float:
    """What the tables are multiplied by. Rules: core_numpy.frequencies."""
    if scaling.attention_factor is not None:
        return float(scaling.attention_factor)
    if scaling.factor <= 1.0:
        return 1.0
    if scaling.kind == "yarn":
        return 1.0 + math.log(scaling.factor) / 10.0
    if scaling.kind == "longrope":
        return math.sqrt(1.0 + math.log(scaling.factor, scaling.original_max_length or 1))
    return 1.0


def _stretch(exponents: Tensor, dim: int, s: float) -> Tensor:
    # dim = 2 has only the exponent 0, whose frequency any base leaves at 1.
    return torch.pow(s, -exponents / max(dim - 2, 1))


def _yarn_ramp(i: Tensor, dim: int, base: float, scaling: RotaryScaling) -> Tensor:
    """0 where the frequency stays, 1 where it is divided."""
    per_e_fold = dim / (2.0 * math.log(base))
    trained = (scaling.original_max_length or 1) / (2.0 * math.pi)
    low = max(math.floor(per_e_fold * math.log(trained / scaling.beta_fast)), 0)
    high = min(math.ceil(per_e_fold * math.log(trained / scaling.beta_slow)), dim - 1)
    # The published code widens an empty ramp by this much.
    width = high - low if high != low else 0.001
    return ((i - low) / width).clamp(0.0, 1.0)
