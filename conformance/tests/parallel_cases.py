"""What the tests of several devices train: one tiny model with everything on, on ragged rows."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

import core_numpy as C
from conformance.suites.parallel import MODEL, OTHER, TRAIN, batches

__all__ = ["MODEL", "OTHER", "TRAIN", "apart", "attention_over", "batches", "config_of", "free_port", "train_of"]

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


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return int(s.getsockname()[1])


def attention_over(framework: str, count: int, lengths: list[int], folder: Path) -> dict[int, int]:
    """Positions -> peak memory of a process, of `parallel_long.py` on so many; what comes out is compared there."""
    here, out = Path(__file__).parent, folder / f"{framework}-{count}.json"
    command = [sys.executable, str(here / "parallel_long.py"), framework, str(out), str(folder), *map(str, lengths)]
    # What is freed goes back at once, so that the peak is of what is held.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(here.parents[1]), "JAX_PLATFORMS": "cpu",
                   "MALLOC_MMAP_THRESHOLD_": str(1 << 20), "WORLD_SIZE": str(count),
                   "MASTER_PORT": str(free_port())}  # fmt: skip
    started = [
        subprocess.Popen(command, env=environment | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(count)
    ]
    words = [process.communicate(timeout=1500)[1] for process in started]
    assert all(process.returncode == 0 for process in started), "".join(said[-2000:] for said in words)
    said = json.loads(out.read_text())
    # float32 over as many keys, relative to the largest entry: measured 2e-6.
    assert len(said) == count and max(row["apart"] for row in said) <= 2e-5, said
    return {length: max(row["memory"][str(length)] for row in said) for length in lengths}
