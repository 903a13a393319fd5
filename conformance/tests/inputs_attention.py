"""Inputs of attention, and the comparison, that several tests of it share."""

from __future__ import annotations

import numpy as np


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Normal numbers; another shape or seed gives others."""
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def inputs(*, batch=(2,), H=6, G=3, T=4, S=7, D=5, Dv=8, seed=0, dtype=np.float64):
    """q (*batch, H, T, D), k (*batch, G, S, D) and v (*batch, G, S, Dv)."""
    q, k, v = (
        normal(*batch, H, T, D, seed=seed),
        normal(*batch, G, S, D, seed=seed),
        normal(*batch, G, S, Dv, seed=seed),
    )
    return q.astype(dtype), k.astype(dtype), v.astype(dtype)


def check_close(got, want, tolerance: float = 1e-12) -> None:
    """The same shape, and values within the tolerance, relative and absolute."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=tolerance, atol=tolerance)
