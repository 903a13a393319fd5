"""From seconds to a verdict: medians, quartiles, and intervals that say when there is no winner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

# Of paired resamples; the 95 % interval's ends move by about 1 % of its width from one seed to another.
RESAMPLES = 4000
# Fewer rounds give intervals of a handful of distinct values.
ROUNDS_FOR_A_VERDICT = 5


def quartiles(seconds: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile."""
    low, middle, high = np.quantile(seconds, [0.25, 0.5, 0.75])
    return float(low), float(middle), float(high)


def spread(seconds: Sequence[float]) -> float:
    """How far apart the quartiles are, relative to the median."""
    low, middle, high = quartiles(seconds)
    return (high - low) / middle


def ratio_interval(slow: Sequence[float], fast: Sequence[float]) -> tuple[float, float, float]:
    """The ratio of the medians and its 95 % bootstrap interval, rounds resampled in pairs.

    Paired, because a disturbance of the machine lasts longer than one turn and hits both.
    """
    a, b = np.asarray(slow, dtype=np.float64), np.asarray(fast, dtype=np.float64)
    picks = np.random.default_rng(0).integers(0, len(a), size=(RESAMPLES, len(a)), endpoint=False)
    ratios = np.median(a[picks], axis=1) / np.median(b[picks], axis=1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(np.median(a) / np.median(b)), float(low), float(high)


def unpaired_interval(slow: Sequence[float], fast: Sequence[float]) -> tuple[float, float, float]:
    """As `ratio_interval`, for rounds of two runs: each is resampled by itself."""
    a, b = np.asarray(slow, dtype=np.float64), np.asarray(fast, dtype=np.float64)
    rng = np.random.default_rng(0)
    medians = [np.median(x[rng.integers(0, len(x), size=(RESAMPLES, len(x)))], axis=1) for x in (a, b)]
    low, high = np.quantile(medians[0] / medians[1], [0.025, 0.975])
    return float(np.median(a) / np.median(b)), float(low), float(high)


def loss_distance(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative distance over the updates that both made; infinite where a loss is not finite."""
    common = min(len(losses), len(reference))
    if common == 0:
        raise ValueError("no update that both made: nothing was compared")
    a, b = np.asarray(losses[:common]), np.asarray(reference[:common])
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("inf")
    return float(np.max(np.abs(a - b) / np.abs(b)))


def verdict(rounds: Mapping[str, Sequence[float]]) -> str:
    """One sentence: who won, or who cannot be told apart."""
    if not rounds:
        return "nobody finished"
    if len(rounds) == 1:
        return f"only {next(iter(rounds))} finished: there is no race"
    order = sorted(rounds, key=lambda name: quartiles(rounds[name])[1])
    first = order[0]
    if min(len(times) for times in rounds.values()) < ROUNDS_FOR_A_VERDICT:
        return f"no verdict: fewer than {ROUNDS_FOR_A_VERDICT} rounds"
    close = [name for name in order[1:] if ratio_interval(rounds[name], rounds[first])[1] <= 1.0]
    if close:
        return f"no winner: {', '.join([first, *close])} lie within the noise of each other"
    ratio, low, high = ratio_interval(rounds[order[1]], rounds[first])
    return f"{first} wins: {order[1]} takes {ratio:.2f} times as long (95 % interval {low:.2f} to {high:.2f})"
