"""The vector-Jacobian products of the encodings that have inputs to differentiate.

Each takes the gradient of the output and the function's own arguments, computes in float64 and gives a dict: one
gradient for each array argument that has one, of its shape and dtype. Integers (ids, positions) have none, and
`sinusoidal_encoding`, `alibi_bias` and `relative_buckets` have nothing else.
"""

from __future__ import annotations

import numpy as np

from ..contract.checks.encodings import (
    check_apply_rotary,
    check_embed,
    check_permute,
    check_relative_table,
    check_tables,
)
from ..encodings import relative_buckets
from ..rotary_pairs import over_heads, pairs, rotary_order
from ..rounding import rounded

Gradients = dict[str, np.ndarray]


def embed_vjp(grad_out: np.ndarray, table: np.ndarray, ids: np.ndarray) -> Gradients:
    """dtable[v] = sum of dout over the places where ids = v; the order of the sum is the order of the places."""
    check_embed(table, ids, np.asarray)
    return {"table": rounded(_scatter(grad_out, ids, table.shape[0]), table.dtype)}


def rotary_tables_vjp(
    grad_cos: np.ndarray,
    grad_sin: np.ndarray,
    positions: np.ndarray,
    frequencies: np.ndarray,
    *,
    attention_factor: float = 1.0,
) -> Gradients:
    """dfrequency_i = factor sum_p p (dsin cos(p f_i) - dcos sin(p f_i))."""
    factor = check_tables(positions, frequencies, attention_factor)
    p = positions.astype(np.float64)[..., None]
    angles = p * frequencies.astype(np.float64)
    terms = factor * p * (grad_sin.astype(np.float64) * np.cos(angles) - grad_cos.astype(np.float64) * np.sin(angles))
    return {"frequencies": rounded(terms.reshape(-1, frequencies.size).sum(axis=0), frequencies.dtype)}


def apply_rotary_vjp(
    grad_out: np.ndarray, x: np.ndarray, cos: np.ndarray, sin: np.ndarray, *, layout: str = "half"
) -> Gradients:
    """The rotation by the opposite angle:

    da = da' cos + db' sin,   db = db' cos - da' sin,   dcos = sum a da' + b db',   dsin = sum a db' - b da'

    where the sums go over the axes along which the tables were broadcast.
    """
    rotated = check_apply_rotary(x, cos, sin, layout)
    c, s = over_heads(cos), over_heads(sin)
    first, second = pairs(rotated, layout)
    wide, dx = x.astype(np.float64), grad_out.astype(np.float64)
    a, b = wide[..., first], wide[..., second]
    da, db = dx[..., first].copy(), dx[..., second].copy()
    dx[..., first], dx[..., second] = da * c + db * s, db * c - da * s
    return {
        "x": rounded(dx, x.dtype),
        "cos": rounded(_sum_to(a * da + b * db, c.shape).reshape(cos.shape), cos.dtype),
        "sin": rounded(_sum_to(a * db - b * da, s.shape).reshape(sin.shape), sin.dtype),
    }


def permute_rotary_vjp(
    grad_out: np.ndarray, weight: np.ndarray, heads: int, *, source: str, target: str, rotary_dim: int | None = None
) -> Gradients:
    """The gradient, permuted back."""
    heads, size, rotated = check_permute(weight, heads, source, target, rotary_dim)
    back = rotary_order(size, rotated, target, source)
    by_head = grad_out.reshape(*weight.shape[:-1], heads, size)
    return {"weight": by_head[..., back].reshape(weight.shape).astype(weight.dtype)}


def relative_bias_vjp(
    grad_out: np.ndarray,
    table: np.ndarray,
    T: int,
    S: int | None = None,
    *,
    buckets: int = 32,
    max_distance: int = 128,
    bidirectional: bool = True,
    q_offset: int | np.ndarray = 0,
) -> Gradients:
    """dtable[n, h] = sum of dbias[h, i, j] over the pairs whose bucket is n."""
    bucket = relative_buckets(
        T, S, buckets=buckets, max_distance=max_distance, bidirectional=bidirectional, q_offset=q_offset
    )
    check_relative_table(table, buckets)
    return {"table": rounded(_scatter(np.moveaxis(grad_out, -3, -1), bucket, buckets), table.dtype)}


def _scatter(grad: np.ndarray, rows: np.ndarray, count: int) -> np.ndarray:
    """Sums of the rows of grad (..., W) that belong to each of `count` rows, in float64."""
    total = np.zeros((count, grad.shape[-1]))
    np.add.at(total, rows, grad.astype(np.float64))
    return total


def _sum_to(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The sum over the axes along which an array of `shape` was broadcast to x."""
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    return x.sum(axis=tuple(n for n, size in enumerate(shape) if size == 1), keepdims=True)
