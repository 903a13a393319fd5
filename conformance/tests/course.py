"""The course's task as a training run that tests share: one block learns whether the first digit comes again."""

from __future__ import annotations

from typing import Any

import numpy as np

from core_numpy import ModelConfig, TrainConfig
from core_numpy.contract.data import Batch, repeat_task

# No biases of keys: their gradient is 0 but for rounding, and AdamW makes a whole step of a rounding.
MODEL = ModelConfig(vocab=10, width=32, heads=4, layers=1, max_length=8, kind="encoder", head="classifier", classes=2,
                    attention_bias=False)  # fmt: skip
# Down to 0 at the end, so that it settles instead of wandering around the solution.
TRAIN = TrainConfig(steps=1200, batch=64, lr=5e-3, weight_decay=0.01, warmup=100, schedule="linear")


def batches(steps: int, *, start: int = 0, seed: int = 1) -> list[Batch]:
    """Batches start to start + steps - 1 of the run: fresh rows each."""
    whole = repeat_task(TRAIN.batch * (start + steps), seed=seed)
    rows = [slice(n * TRAIN.batch, (n + 1) * TRAIN.batch) for n in range(start, start + steps)]
    return [{name: x[part] for name, x in whole.items()} for part in rows]


def trainer(B: Any, precision: str, *, seed: int = 0, **fields: Any) -> Any:
    """A trainer at the start of the run."""
    dtype = "float64" if precision == "float64" else "float32"
    config = TRAIN.replace(precision=precision, seed=seed, **fields)
    return B.Trainer(B.Transformer(MODEL, seed=seed, dtype=dtype), config)


def distance(one: dict[str, np.ndarray], two: dict[str, np.ndarray]) -> float:
    """How far two sets of parameters are apart, relative to the second's length."""
    apart = sum(float(np.sum(np.square(one[name].astype(np.float64) - two[name]))) for name in two)
    return float(np.sqrt(apart / sum(float(np.sum(np.square(x, dtype=np.float64))) for x in two.values())))
