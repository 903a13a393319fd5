"""SciPy's special functions, imported when first called: that takes longer than NumPy and all of this package do."""

from __future__ import annotations

import numpy as np


def expit(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)) without overflow."""
    from scipy import special

    return special.expit(x)


def ndtr(x: np.ndarray) -> np.ndarray:
    """The normal distribution function, right in both tails."""
    from scipy import special

    return special.ndtr(x)


def erfinv(x: np.ndarray) -> np.ndarray:
    """The inverse of the error function."""
    from scipy import special

    return special.erfinv(x)
