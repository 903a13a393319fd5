"""Error budgets: how far rounding may take a right implementation, element by element.

Two kinds. For attention the bound is written out from running error analysis (`attention_bounds`,
`attention_gradient_bounds`). For every other function the first-order effect of rounding the inputs is measured on
the oracle itself (`perturbation_bounds`): random relative perturbations of one unit, as in Monte Carlo
arithmetic. docs/tolerance.md derives both and shows the calibration of the constants.

u is the unit roundoff: of the accumulation type (u_a) and of the output type (u_o).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
# The smallest normal number: below it a type keeps no relative accuracy, and kernels may flush to zero.
TINY = {"float16": 2.0**-14, "bfloat16": 2.0**-126, "float32": 2.0**-126, "float64": 2.0**-1022}
# The spacing below TINY: what rounding there costs where it is kept.
SUBNORMAL = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149, "float64": 2.0**-1074}

# Constants, calibrated on implementations that are not ours (docs/tolerance.md).
INNER = 4.0  # inner products: error <= INNER sqrt(n + 2) u sum |a| |b|, the probabilistic bound with head-room
STEP = 8.0  # a handful of elementary functions (exp, division, rescaling), each right to a few u
OUTPUT = 3.0  # the result's own rounding: a correctly rounded one uses a third
PERTURBED = 16.0  # roundings inside a function against those of its inputs
DEEP = 64.0  # the same for a model, each of whose layers rounds anew
# What half types keep between two products, and the partial sums of it. A rounding to nearest is off by u / sqrt(3) in
# the root mean square at most, by five of these in the largest of some thousand sums; three times that, since a right
# implementation uses a third: 8.7 u. Measured in torch: 2.0 u in such sums of weights, 2.1 u in a layer norm's bias.
STORED = 8.0
# float64 judges meaning: 1e-12 of the magnitudes involved, whatever the order of operations.
MEANING = 1e-12


def accumulation(dtype: str) -> str:
    """Scores, softmax and statistics are computed in float32 at least."""
    return "float64" if dtype == "float64" else "float32"


@dataclass(frozen=True)
class Terms:
    """What the attention bounds need, in float64 and per query head: all arrays (..., H, T, S) unless said.

    p: weights before dropout. kept: the factor that dropout applies, 1 without. delta: absolute error of each
    score. slope: derivative of the soft-cap.
    """

    p: np.ndarray
    kept: np.ndarray
    delta: np.ndarray
    slope: np.ndarray


def score_errors(q: np.ndarray, k: np.ndarray, scale: float, softcap: float | None, bias: np.ndarray | None, u: float):
    """delta and the soft-cap's slope, for q (..., H, T, D) and k (..., H, S, D) with heads already repeated."""
    D = q.shape[-1]
    with np.errstate(all="ignore"):
        raw = scale * (q @ np.swapaxes(k, -1, -2))
        magnitude = abs(scale) * (np.abs(q) @ np.swapaxes(np.abs(k), -1, -2))
        slope = np.ones_like(raw) if softcap is None else 1.0 - np.tanh(raw / softcap) ** 2
        score = raw if softcap is None else softcap * np.tanh(raw / softcap)
        delta = INNER * np.sqrt(D + 2.0) * u * magnitude * slope + STEP * u * np.abs(score)
        if bias is not None:
            finite = np.where(np.isfinite(bias), bias, 0.0)
            delta = delta + u * (np.abs(finite) + np.abs(score + finite))
    return np.nan_to_num(delta, nan=0.0, posinf=0.0, neginf=0.0), np.nan_to_num(slope, nan=0.0)


def _row(x: np.ndarray) -> np.ndarray:
    return x.sum(axis=-1, keepdims=True)


def weight_errors(terms: Terms, u: float) -> np.ndarray:
    """Of p: |dp_j| <= p_j (delta_j + sum_i p_i delta_i + c sqrt(S) u), from dp = p (ds - p . ds)."""
    S = terms.p.shape[-1]
    return terms.p * (terms.delta + _row(terms.p * terms.delta) + STEP * np.sqrt(S + 3.0) * u)


def attention_bounds(
    terms: Terms, v: np.ndarray | None, out: dict[str, np.ndarray], dtype: str
) -> dict[str, np.ndarray]:
    """Bounds of out, weights and lse, keyed like `out`. v (..., H, S, Dv) with heads repeated."""
    u, u_o = UNIT[accumulation(dtype)], UNIT[dtype]
    S = terms.p.shape[-1]
    dp = weight_errors(terms, u)
    seen = terms.p > 0
    # A weight below the smallest normal number may be lost; it then misses in the sum.
    lost = np.where(seen, TINY[accumulation(dtype)], 0.0)
    bounds = {}
    for name, value in out.items():
        if name == "weights":
            bounds[name] = dp + lost + OUTPUT * u_o * np.abs(value) + np.where(seen, 2.0 * SUBNORMAL[dtype], 0.0)
        elif name == "lse":
            finite = np.where(np.isfinite(value), np.abs(value), 0.0)
            some = seen.any(axis=-1)
            error = (terms.p * terms.delta).sum(axis=-1) + STEP * u * (np.sqrt(S + 3.0) + finite)
            bounds[name] = np.where(some, error, STEP * u * finite)
        else:
            assert v is not None
            v = np.where(np.isfinite(v), v, 0.0)
            size = np.abs(v)
            kept = terms.kept
            error = (kept * (dp + lost)) @ size + INNER * np.sqrt(S + 2.0) * u * ((kept * terms.p) @ size)
            # Inputs and results below the smallest normal number may be read and given as 0.
            # Asked of the values, not of the error: that of the smallest values is itself lost in float64.
            reached = (kept * seen) @ (size > 0) > 0
            error = error + np.where(reached, 2.0 * TINY[accumulation(dtype)] * (1.0 + _row(kept * terms.p)), 0.0)
            if dtype in ("float16", "bfloat16"):
                # Kernels for half types store the weights in the half type before the second product: a relative
                # error each, and below the smallest normal number an absolute one.
                error = error + (kept * np.where(seen, SUBNORMAL[dtype], 0.0)) @ size
                error = error + STORED * u_o * np.sqrt((kept * terms.p) ** 2 @ v**2)
            bounds[name] = error + OUTPUT * u_o * np.abs(value) + np.where(error > 0, 2.0 * SUBNORMAL[dtype], 0.0)
        if dtype == "float64":
            bounds[name] = bounds[name] + _meaning(name, terms, v, value)
    return bounds


def _meaning(name: str, terms: Terms, v: np.ndarray | None, value: np.ndarray) -> np.ndarray:
    if name == "weights":
        return MEANING * terms.p
    if name == "lse":
        return MEANING * np.where(np.isfinite(value), 1.0 + np.abs(value), 0.0)
    assert v is not None
    return MEANING * ((terms.kept * terms.p) @ np.abs(np.where(np.isfinite(v), v, 0.0)))


def attention_gradient_bounds(
    terms: Terms,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    grad_out: np.ndarray,
    grad_lse: np.ndarray | None,
    scale: float,
    dtype: str,
) -> dict[str, np.ndarray]:
    """Bounds of the gradients, before groups and broadcast axes are summed (which only adds them).

    dV = P^T dO;  dP = dO V^T;  dS = P (dP - rowsum(P dP) + dlse);  dQ = scale dS K;  dK = scale dS^T Q.
    Keys: q, k, v and "scores" (the bound of dS, whose sums bound the gradients of bias and sinks).
    """
    u, u_o = UNIT[accumulation(dtype)], UNIT[dtype]
    v = np.where(np.isfinite(v), v, 0.0)
    k = np.where(np.isfinite(k), k, 0.0)
    T, Dv, S = grad_out.shape[-2], v.shape[-1], k.shape[-2]
    kept, p, dp = terms.kept, terms.p, weight_errors(terms, u)
    upstream = np.abs(grad_out)
    # Half kernels keep weights, dS and the output in the half type between the passes.
    stored = STORED * u_o if dtype in ("float16", "bfloat16") else 0.0
    dP = kept * (grad_out @ np.swapaxes(v, -1, -2))
    dP_size = kept * (upstream @ np.swapaxes(np.abs(v), -1, -2))
    # What is below the smallest normal number may be lost on each way.
    flushed = TINY[accumulation(dtype)]
    dP_error = INNER * np.sqrt(Dv + 2.0) * u * dP_size + kept * flushed * _row(upstream)
    row = (upstream * np.abs(out)).sum(axis=-1, keepdims=True)
    centre = _row(p * dP)
    centre_error = _row(p * dP_error + dp * np.abs(dP)) + (INNER * np.sqrt(Dv + 2.0) * u + stored) * row
    extra = 0.0 if grad_lse is None else grad_lse[..., None]
    inner = dP - centre + extra
    dS = p * inner
    dS_error = dp * np.abs(inner) + p * (
        dP_error + centre_error + STEP * u * (np.abs(inner) + np.abs(dP) + np.abs(centre))
    )
    dS_error = dS_error + np.where(p > 0, flushed, 0.0) + np.minimum(p, flushed) * np.abs(inner)  # lost dS, lost p
    # A slope 1 - t^2 near 0 is a difference of numbers near 1, and a fast tanh is right to a few units there.
    bent = np.where(terms.slope < 1.0, 4.0 * STEP * u, 0.0)
    dS_error = dS_error * np.maximum(terms.slope, u) + (stored + STEP * u + bent) * np.abs(dS)
    dS = dS * terms.slope
    swap = np.swapaxes(dS_error, -1, -2), np.swapaxes(np.abs(dS), -1, -2)
    weight = kept * p
    bounds = {
        "q": abs(scale) * (dS_error @ np.abs(k) + INNER * np.sqrt(S + 2.0) * u * (np.abs(dS) @ np.abs(k))),
        "k": abs(scale) * (swap[0] @ np.abs(q) + INNER * np.sqrt(T + 2.0) * u * (swap[1] @ np.abs(q))),
        "v": np.swapaxes(
            kept * (dp + np.where(p > 0, flushed, 0.0)) + (stored + INNER * np.sqrt(T + 2.0) * u) * weight, -1, -2
        )
        @ upstream,
        "scores": dS_error,
    }
    if dtype == "float64":
        bounds["q"] += MEANING * abs(scale) * ((p * (dP_size + row)) @ np.abs(k))
        bounds["k"] += MEANING * abs(scale) * (np.swapaxes(p * (dP_size + row), -1, -2) @ np.abs(q))
        bounds["v"] += MEANING * (np.swapaxes(weight, -1, -2) @ upstream)
        bounds["scores"] = bounds["scores"] + MEANING * p * (dP_size + row)
    return bounds


def rounded_output(bound: np.ndarray, value: np.ndarray, dtype: str) -> np.ndarray:
    """Add the one rounding of the result to its own type; where bound and value are 0 the result is exactly 0."""
    own = OUTPUT * UNIT[dtype] * np.abs(value)
    # What is not 0 may be lost below the smallest normal number, and is rounded to the spacing there.
    lost = np.where((bound > 0) | (value != 0), 2.0 * SUBNORMAL[dtype] + TINY[accumulation(dtype)], 0.0)
    return bound + own + lost


def perturbation_bounds(
    evaluate: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]],
    arrays: dict[str, np.ndarray],
    results: dict[str, np.ndarray],
    dtype: str,
    *,
    draws: int = 6,
    seed: int = 0,
    constant: float = PERTURBED,
) -> dict[str, np.ndarray]:
    """Bounds of `results = evaluate(arrays)` from its own sensitivity.

    Every element x of the inputs is replaced by x (1 + h s), s = +-1 at random; the root mean square over the
    draws of the change, divided by h, is sqrt(sum_i (df/dx_i x_i)^2): what independent roundings of one unit
    do to the result. An element that never moves must be exact up to its own rounding.
    """
    h = 2.0**-26  # the difference keeps half of float64's digits, its curvature vanishes in them
    draw = np.random.Generator(np.random.Philox(seed))
    square = {name: np.zeros(value.shape) for name, value in results.items()}
    for _ in range(draws):
        moved = {name: x * (1.0 + h * draw.choice([-1.0, 1.0], x.shape)) for name, x in arrays.items()}
        for name, value in evaluate(moved).items():
            with np.errstate(invalid="ignore"):
                square[name] += np.nan_to_num((value - results[name]) / h, nan=0.0, posinf=0.0, neginf=0.0) ** 2
    u = UNIT[accumulation(dtype)]
    bounds = {}
    for name, value in results.items():
        moved_by = np.sqrt(square[name] / draws)
        finite = np.where(np.isfinite(value), np.abs(value), 0.0)
        # Few draws underestimate single elements: a fraction of the tensor's own mean joins where anything moved.
        typical = 0.1 * np.sqrt(np.mean(moved_by**2)) if moved_by.size else 0.0
        inner = np.where(moved_by > 0, constant * u * (moved_by + typical + finite), 0.0)
        bound = rounded_output(inner, finite, dtype)
        if dtype == "float64":
            bound = bound + np.where(moved_by > 0, MEANING * (moved_by + typical + finite), 0.0)
        bounds[name] = bound
    return bounds


def with_magnitudes(
    bounds: dict[str, np.ndarray], sizes: dict[str, np.ndarray], dtype: str, *, stored: bool = False
) -> dict[str, np.ndarray]:
    """Add the rounding of a formula's own terms, u times their magnitude (`magnitudes`).

    stored: between forward and backward, half types keep what they need in the half type: one more rounding
    of the terms there, to the half type.
    """
    u = STEP * UNIT[accumulation(dtype)]
    if stored and dtype in ("float16", "bfloat16"):
        u += STORED * UNIT[dtype]
    if dtype == "float64":
        u += MEANING
    return {
        name: bound + np.where(bound > 0, u * np.nan_to_num(sizes[name]), 0.0) if name in sizes else bound
        for name, bound in bounds.items()
    }
