"""The one rounding at the end: the reference computes in float64, whatever comes in."""

from __future__ import annotations

from typing import Any

import numpy as np


def rounded(x: Any, dtype: Any) -> np.ndarray:
    """`x` (float64) in `dtype`, rounded once, to nearest with ties to even; x itself where that is float64.

    NumPy casts float64 to float16, float32 directly, but ml_dtypes casts to bfloat16 by way of float32, which
    rounds twice: 1 + 2⁻⁸ + 2⁻⁴⁰ would become 1, not 1 + 2⁻⁷. Rounding to odd on the way to float32 (a
    float32 that is not exact gets an odd last bit) keeps what the second rounding has to know.
    Source: Boldo and Melquiond, "When double rounding is odd", 2005.
    """
    dtype = np.dtype(dtype)
    if dtype == np.float64:
        return np.asarray(x, dtype)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if dtype.name != "bfloat16":
            return np.asarray(x).astype(dtype)
        exact = np.asarray(x, dtype=np.float64)
        near = exact.astype(np.float32)
        even = (near.view(np.uint32) & 1) == 0
        towards = np.where(exact > near, np.float32(np.inf), np.float32(-np.inf))
        odd = np.where((near != exact) & even, np.nextafter(near, towards), near)
        return odd.astype(dtype)
