"""Comparisons: each says by what share of the budget it was off, and counts itself.

A comparison cannot pass by not being made: the runner fails a case whose tally is 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .budget import OUTPUT, TINY, UNIT

# Fewer different values than this say nothing about the rounding of all together.
MANY = 32
# Standard deviations by which a right result may be off: one in a million and a half by chance.
SIGMAS = 5.0


class Disagreement(Exception):
    """What came differs in a way that no rounding explains: shape, dtype, NaN, an exact value."""


@dataclass
class Tally:
    """How many comparisons a case made, and the largest share of a budget that any of them used.

    lacking: what of the case the target does not offer, where the rest of it was compared. worst: name and
    shares of the array with the largest one, or of that which was not exact. together: the largest share of what
    rounding leaves over all elements of a half type (`check_together`), and where.
    """

    count: int = 0
    share: float = 0.0
    where: str = ""
    shares: dict[str, float] = field(default_factory=dict)
    lacking: str = ""
    worst: tuple[str, np.ndarray] | None = None
    together: tuple[float, str] = (0.0, "")

    def add(self, name: str, share: float, where: str = "", shares: np.ndarray | None = None) -> None:
        self.count += 1
        self.shares[name] = max(share, self.shares.get(name, 0.0))
        if share > self.share or self.count == 1:
            self.share, self.where = share, f"{name}{where}"
            self.worst = None if shares is None else (name, shares)


def check_kind(name: str, got: np.ndarray, shape: tuple[int, ...], dtype: str | None) -> None:
    """Shape and dtype, exactly."""
    if not isinstance(got, np.ndarray):
        raise Disagreement(f"{name} must come back as an array; got {type(got).__name__}")
    if got.shape != shape:
        raise Disagreement(f"{name} must have shape {shape}; got {got.shape}")
    if dtype is not None and str(got.dtype) != dtype:
        raise Disagreement(f"{name} must have dtype {dtype}; got {got.dtype}")


def check_exact(tally: Tally, name: str, got: np.ndarray, want: np.ndarray) -> None:
    """Equality, for integers, booleans, bits and masked values; NaN equals NaN."""
    check_kind(name, got, want.shape, None)
    left, right = np.asarray(got, dtype=np.float64), np.asarray(want, dtype=np.float64)
    equal = (left == right) | (np.isnan(left) & np.isnan(right))
    if not equal.all():
        at = tuple(int(i) for i in np.argwhere(~equal)[0])
        tally.worst = name, np.where(equal, 0.0, np.inf)
        raise Disagreement(
            f"{name} must be exactly {float(right[at])!r} at {at}; got {float(left[at])!r} "
            f"({int((~equal).sum())} of {equal.size} differ)"
        )
    tally.add(name, 0.0)


def check_within(tally: Tally, name: str, got: np.ndarray, want: np.ndarray, bound: np.ndarray) -> float:
    """|got - want| <= bound for every element; where the bound is 0 the values are equal.

    The share (error / bound) goes to the tally and is returned; over 1 the runner fails the case. NaN and
    infinities must stand where the oracle has them.
    """
    check_kind(name, got, want.shape, None)
    value = np.asarray(got, dtype=np.float64)
    special = ~np.isfinite(want)
    if special.any() or not np.isfinite(value).all():
        same = (value == want) | (np.isnan(value) & np.isnan(want))
        wrong = (special | ~np.isfinite(value)) & ~same
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            tally.worst = name, np.where(wrong, np.inf, 0.0)
            raise Disagreement(f"{name} must be {float(want[at])!r} at {at}; got {float(value[at])!r}")
    with np.errstate(invalid="ignore"):
        error = np.where(special, 0.0, np.abs(value - want))
    exact = (bound == 0) & (error > 0)
    if exact.any():
        at = tuple(int(i) for i in np.argwhere(exact)[0])
        tally.worst = name, np.where(exact, np.inf, np.divide(error, bound, out=np.zeros_like(error), where=bound > 0))
        raise Disagreement(f"{name} must be exactly {float(want[at])!r} at {at}; got {float(value[at])!r}")
    shares = np.divide(error, bound, out=np.zeros_like(error), where=bound > 0)
    if not shares.size:
        tally.add(name, 0.0)
        return 0.0
    worst = np.unravel_index(int(np.argmax(shares)), shares.shape)
    place = ", ".join(str(int(i)) for i in worst)
    tally.add(name, float(shares[worst]), f"[{place}]" if place else "", shares)
    return float(shares[worst])


def check_together(tally: Tally, name: str, got: np.ndarray, want: np.ndarray, bound: np.ndarray, dtype: str) -> float:
    """Norm-wise, for results of a half type: their errors must look like those of rounding to nearest.

    Each element is off by what was rounded before, at most bound - own, and by its own rounding, own = 3 u |x| of the
    bound, of which rounding to nearest takes u |x| / sqrt(3) at most in the root mean square and nothing in the mean.
    So the root mean square of the shares of all elements, and their mean along the sign of x, have bounds far below 1:
    a result that is cut where it should be rounded is within the bound of every element and out of these.
    Elements whose mantissas are less than a unit of the type apart are rounded alike and count once: the weights of a
    row whose scores are almost equal say no more than one of them. The share goes to `tally.together`.
    """
    value, size = np.asarray(got, dtype=np.float64), np.abs(want)
    usable = np.isfinite(want) & np.isfinite(value) & (bound > 0) & (size > 4.0 * TINY[dtype])
    if not usable.any():
        return 0.0
    size, limit = size[usable], bound[usable]
    share = (value[usable] - want[usable]) * np.sign(want[usable]) / limit
    own = np.minimum(OUTPUT * UNIT[dtype] * size, limit) / limit
    rest, rounding = 1.0 - own, own / (OUTPUT * np.sqrt(3.0))
    _, place, often = np.unique(np.round(np.frexp(size)[0] / UNIT[dtype]), return_inverse=True, return_counts=True)
    number = len(often)
    if number < MANY:
        return 0.0

    def mean(x: np.ndarray) -> float:
        return float(np.mean(np.bincount(place.ravel(), x) / often))

    spread = np.sqrt(mean(share**2)) / (np.sqrt(mean((rounding + rest) ** 2)) * (1.0 + SIGMAS / np.sqrt(2.0 * number)))
    drift = abs(mean(share)) / (mean(rest) + SIGMAS * np.sqrt(mean(rounding**2) / number))
    worst = max((float(spread), f"{name} in the root mean square"), (float(drift), f"{name} in the mean"))
    tally.together = max(tally.together, worst)
    return worst[0]
