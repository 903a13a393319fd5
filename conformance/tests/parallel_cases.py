"""What the tests of several devices train: one tiny model with everything on, on ragged rows."""

from __future__ import annotations

from typing import Any

import numpy as np

import core_numpy as C

MODEL: dict[str, Any] = {
    "vocab": 13, "width": 16, "heads": 4, "kv_heads": 2, "hidden": 12, "layers": 2, "max_length": 16,
    "positions": "rotary", "dropout": 0.2, "sinks": True, "qk_norm": True,
}  # fmt: skip
TRAIN: dict[str, Any] = {
    "steps": 20, "batch": 8, "accumulate": 2, "lr": 1e-2, "clip_norm": 0.5, "z_loss": 1e-2, "label_smoothing": 0.1,
    "precision": "float64", "ema": 0.9, "schedule": "cosine", "warmup": 3, "seed": 5,
}  # fmt: skip
# What changes of the model in a second run: biases by head, tied embeddings, a window.
OTHER: dict[str, Any] = {
    "positions": "relative", "tie_embeddings": True, "activation": "swiglu", "norm": "rms", "window": (3, 0),
    "sinks": False,
}  # fmt: skip


# What compiles in a second.
SMALL: dict[str, Any] = {"layers": 1, "dropout": 0.0, "sinks": False, "qk_norm": False}


def config_of(name: str) -> C.ModelConfig:
    return C.ModelConfig(**{**MODEL, **{"plain": {}, "other": OTHER, "small": SMALL}[name]})


def train_of(parallel: dict[str, int] | None, **more: Any) -> C.TrainConfig:
    return C.TrainConfig(**{**TRAIN, **more, "parallel": parallel})


def batches(count: int, rows: int = 8, T: int = 8, vocab: int = 13) -> list[dict[str, np.ndarray]]:
    """Rows that end at different places, so that the parts of a batch count different numbers of targets."""
    made = []
    for i in range(count):
        rng = np.random.default_rng(i)
        lengths = rng.integers(1, T + 1, rows)
        lengths[0] = T
        targets = rng.integers(0, vocab, (rows, T))
        targets[np.arange(T) >= lengths[:, None]] = -100
        made.append({"tokens": rng.integers(0, vocab, (rows, T)), "targets": targets, "lengths": lengths})
    return made


def apart(want: dict[str, np.ndarray], got: dict[str, np.ndarray]) -> float:
    """The largest difference of two sets of parameters, relative to 1 where they are smaller."""
    assert want.keys() == got.keys()
    return max(float(np.max(np.abs(want[n] - got[n]) / np.maximum(1.0, np.abs(want[n])))) for n in want)
