"""What the tests of several devices train: one tiny model with everything on, on ragged rows."""

from __future__ import annotations

from typing import Any

import numpy as np

import core_numpy as C
from conformance.suites.parallel import MODEL, OTHER, TRAIN, batches

__all__ = ["MODEL", "OTHER", "TRAIN", "apart", "batches", "config_of", "train_of"]

# What compiles in a second.
SMALL: dict[str, Any] = {"layers": 1, "dropout": 0.0, "sinks": False, "qk_norm": False}


def config_of(name: str) -> C.ModelConfig:
    return C.ModelConfig.from_dict({**MODEL, **{"plain": {}, "other": OTHER, "small": SMALL}[name]})


def train_of(parallel: dict[str, int] | None, **more: Any) -> C.TrainConfig:
    return C.TrainConfig(**{**TRAIN, **more, "parallel": parallel})


def apart(want: dict[str, np.ndarray], got: dict[str, np.ndarray]) -> float:
    """The largest difference of two sets of parameters, relative to 1 where they are smaller."""
    assert want.keys() == got.keys()
    return max(float(np.max(np.abs(want[n] - got[n]) / np.maximum(1.0, np.abs(want[n])))) for n in want)
