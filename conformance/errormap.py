"""Where a result is off: each element's share of its error budget as one character, small enough to keep by the call.

    .        equal            a  up to 10 times the budget      d  up to 1e4 times
    0 to 9   tenths of it     b  up to 100 times                e  up to 1e5 times
                              c  up to 1000 times               f  more
    x        beyond measure: NaN, infinity, or a value that must be exact and is not

Long axes are pooled (the worst of a block stands for it); of many matrices the worst are kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np

SIDE, PANELS = 24, 4
LEVELS = ".0123456789abcdefx"


def error_map(name: str, shares: np.ndarray) -> dict[str, Any]:
    """{"name", "shape", "pool": [rows, columns that one character stands for], "panels": [{"at": place of the matrix
    in front of the last two axes, "rows": [...]}]}."""
    levels = _levels(np.asarray(shares, dtype=np.float64))
    if not levels.size:
        return {"name": name, "shape": list(levels.shape), "pool": [1, 1], "panels": []}
    matrices = levels.reshape(-1, *((1, 1, *levels.shape)[-2:]))
    lead = levels.shape[:-2]
    worst = sorted(np.argsort(-matrices.reshape(len(matrices), -1).max(axis=1, initial=0), kind="stable")[:PANELS])
    panels, pool = [], [1, 1]
    for i in worst:
        pooled, pool = _pooled(matrices[i])
        rows = ["".join(LEVELS[level] for level in row) for row in pooled]
        panels.append({"at": [int(j) for j in np.unravel_index(i, lead)] if lead else [], "rows": rows})
    return {"name": name, "shape": list(levels.shape), "pool": pool, "panels": panels}


def _levels(shares: np.ndarray) -> np.ndarray:
    """0 equal, 1 to 10 tenths of the budget, 11 to 16 powers of ten beyond it, 17 beyond measure."""
    with np.errstate(all="ignore"):
        within = 1 + np.minimum(np.floor(10.0 * shares), 9)
        beyond = 10 + np.clip(np.ceil(np.log10(shares)), 1, 6)
    levels = np.where(shares <= 0, 0, np.where(shares <= 1, within, beyond))
    return np.where(np.isfinite(shares), levels, 17).astype(np.int64)


def _pooled(matrix: np.ndarray) -> tuple[np.ndarray, list[int]]:
    pool = [max(1, -(-n // SIDE)) for n in matrix.shape]
    starts = [np.arange(0, n, step) for n, step in zip(matrix.shape, pool, strict=True)]
    return np.maximum.reduceat(np.maximum.reduceat(matrix, starts[0], axis=0), starts[1], axis=1), pool
