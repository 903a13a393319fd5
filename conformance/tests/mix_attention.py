"""Mixed arguments of attention: rows in which every two choices of two different arguments meet at least once.

`ROWS` is plain data and `arguments(row)` plain NumPy in float64, so every package can be sent the same calls.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

CHOICES: dict[str, tuple[Any, ...]] = {
    "batch": ((2,), (), (2, 3), None),  # None: 2-D inputs, without a heads axis
    "heads": ((6, 3), (4, 4), (4, 1)),
    "lengths": ((4, 7), (1, 5), (5, 3), (6, 6)),
    "mask": ("none", "rank 2", "full", "keys"),
    "bias": ("none", "rank 2", "full", "heads", "rows", "-inf"),
    "causal": (False, True),
    "window": (None, (2, 1), (1, None), (None, 0), (0, 0)),
    "q_offset": ("number", "array", "negative"),
    "kv_lengths": (False, True),
    "segments": (False, True),
    "sinks": (False, True),
    "scale": (None, 1.0, -0.7, 0.0),
    "softcap": (None, 1.5),
    "dropout": (0.0, 0.4),
}


def _pairs(row: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
    return {(a, row[a], b, row[b]) for a, b in itertools.combinations(range(len(row)), 2)}


def _cover() -> list[dict[str, Any]]:
    """Greedy: of 40 random rows take the one with the most pairs not met yet, until all are met."""
    random = np.random.default_rng(20)
    sizes = [len(choices) for choices in CHOICES.values()]
    columns = itertools.combinations(range(len(sizes)), 2)
    missing = {(a, i, b, j) for a, b in columns for i in range(sizes[a]) for j in range(sizes[b])}
    rows = []
    while missing:
        candidates = [tuple(int(random.integers(n)) for n in sizes) for _ in range(40)]
        # One candidate holds a missing pair for certain, so that the search ends.
        a, i, b, j = min(missing)
        candidates[0] = tuple({a: i, b: j}.get(place, n) for place, n in enumerate(candidates[0]))
        best = max(candidates, key=lambda row: len(_pairs(row) & missing))
        missing -= _pairs(best)
        rows.append({name: CHOICES[name][n] for name, n in zip(CHOICES, best, strict=True)})
    return rows


ROWS = _cover()


def arguments(row: dict[str, Any], *, seed: int = 0) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """({"q", "k", "v"}, keywords) of a row; D = 5 and Dv = 3."""
    random = np.random.default_rng(seed)
    batch, flat = row["batch"] or (), row["batch"] is None
    (H, G), (T, S) = ((1, 1) if flat else row["heads"]), row["lengths"]

    def normal(*shape: int) -> np.ndarray:
        return random.normal(size=shape)

    q, k, v = normal(*batch, H, T, 5), normal(*batch, G, S, 5), normal(*batch, G, S, 3)
    # The full rank with every axis, with the keys' only, with the heads' and so on.
    shapes = {
        "rank 2": (T, S),
        "full": (*batch, H, T, S),
        "-inf": (*batch, H, T, S),
        "keys": (*batch, 1, 1, S),
        "heads": (*(1 for _ in batch), H, T, S),
        "rows": (*batch, 1, T, 1),
    }
    if flat:
        q, k, v = q[0], k[0], v[0]
        shapes = {"rank 2": (T, S), "full": (T, S), "-inf": (T, S), "keys": (1, S), "heads": (T, S), "rows": (T, 1)}
    keywords: dict[str, Any] = {"causal": row["causal"], "window": row["window"]}
    if row["mask"] != "none":
        keywords["mask"] = random.random(shapes[row["mask"]]) < 0.8
    if row["bias"] != "none":
        bias = normal(*shapes[row["bias"]])
        keywords["bias"] = np.where(random.random(bias.shape) < 0.2, -np.inf, bias) if row["bias"] == "-inf" else bias
    offsets = {
        "number": S - T,
        "array": random.integers(0, 3, size=batch),
        "negative": random.integers(-2, 1, size=batch),
    }
    keywords["q_offset"] = np.asarray(offsets[row["q_offset"]]) if row["q_offset"] != "number" else S - T
    if row["kv_lengths"]:
        keywords["kv_lengths"] = np.asarray(random.integers(0, S + 1, size=batch))
    if row["segments"]:
        keywords["q_segments"] = random.integers(-1, 2, size=(*batch, T))
        keywords["kv_segments"] = random.integers(-1, 2, size=(*batch, S))
    if row["sinks"]:
        keywords["sinks"] = np.asarray(random.normal(size=() if flat else (H,)))
    keywords |= {"scale": row["scale"], "softcap": row["softcap"], "dropout_rate": row["dropout"]}
    if row["dropout"]:
        keywords["dropout_key"] = np.array([7, seed + 1], dtype=np.uint32)
    return {"q": q, "k": k, "v": v}, keywords


def identity(row: dict[str, Any]) -> str:
    """A readable name of a row."""
    return "-".join(str(value).replace(" ", "") for value in row.values())
