"""The speed that FLOPs utilisation is a share of: the backend's own matrix product, measured where it trains."""

from __future__ import annotations

import importlib
import time
from types import ModuleType
from typing import Any

import numpy as np

# One product must take this long for its launch not to matter; doubling the size until it does costs little more.
LONG_ENOUGH, LARGEST = 0.02, 8192


def measure_peak(backend: ModuleType, precision: str, device: Any) -> float:
    """FLOPs per second of a square product in `precision`, the best of three. The reference computes in float64."""
    if backend.__name__ == "core_numpy":
        make, wait = (lambda n: np.ones((n, n))), (lambda x: x)
    else:
        arrays = importlib.import_module(f"{backend.__name__}.arrays")
        wait = arrays.wait
        make = lambda n: arrays.from_numpy(np.ones((n, n), np.float32), dtype=precision, device=device)  # noqa: E731
    size = 256
    while True:
        x = make(size)
        wait(x @ x)
        seconds = []
        for _ in range(3):
            begin = time.perf_counter()
            wait(x @ x)
            seconds.append(time.perf_counter() - begin)
        if min(seconds) >= LONG_ENOUGH or size >= LARGEST:
            return 2.0 * size**3 / max(min(seconds), 1e-9)
        size *= 2
