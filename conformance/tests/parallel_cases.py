"""What the tests of several devices train: one tiny model with everything on, on ragged rows."""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import core_numpy as C
from conformance.suites.parallel import MODEL, OTHER, TRAIN, batches

__all__ = [
    "MODEL",
    "OTHER",
    "REFUSED",
    "TRAIN",
    "apart",
    "batches",
    "check_interrupted_together",
    "check_unlike",
    "config_of",
    "free_port",
    "interrupted",
    "killed_at_random",
    "refusals",
    "train_of",
]

# What compiles in a second.
SMALL: dict[str, Any] = {"layers": 1, "dropout": 0.0, "sinks": False, "qk_norm": False}


# On two devices: (layout, of the model, of the training, positions, what is said before the first update).
REFUSED: list[tuple[dict[str, int], dict[str, Any], dict[str, Any], int, str]] = [
    ({"data": 3}, {}, {}, 8, '(2); {"data": 3} needs 3'),
    ({"tensor": 2}, {"heads": 1, "kv_heads": 1}, {}, 8, "heads must be a multiple of the tensor axis (2)"),
    ({"tensor": 2}, {"kv_heads": 1}, {}, 8, "kv_heads must be a multiple of the tensor axis (2)"),
    ({"tensor": 2}, {"hidden": 9}, {}, 8, "hidden must be a multiple of the tensor axis (2)"),
    ({"data": 2}, {}, {"batch": 6}, 8, "batch / accumulate must be a multiple of data x fsdp (2)"),
    ({"fsdp": 2}, {}, {"batch": 10}, 8, "batch / accumulate must be a multiple of data x fsdp (2)"),
    ({"context": 2}, {}, {}, 6, "tokens must have a length that is a multiple of 4"),
]


def refusals(backend: Any) -> list[str]:
    """What a package says to each of them."""
    said = []
    for parallel, model, train, length, _ in REFUSED:
        made = backend.Transformer(C.ModelConfig.from_dict({**MODEL, **SMALL, **model}), dtype="float64")
        try:
            backend.Trainer(made, train_of(parallel, **train)).step(batches(1, T=length)[0])
        except ValueError as error:
            said.append(str(error))
        else:
            said.append("nothing")
    return said


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


# What two processes have unlike, one after the other, and what both say of it.
UNLIKE: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"lr": 0.01}, {"lr": 0.02}, "TrainConfig: process {other} has {{'lr': 0.0{theirs}}}"),
    ({"version": "1.0"}, {"version": "2.0"}, "version of attention-conformance: process {other} has '{theirs}.0'"),
    ({"weights": 1}, {"weights": 2}, "parameters: process {other} has 'of digest "),
    ({"given": 0}, {"given": 1}, "first batch: process {other} has {{'tokens': 'int64 (8, 8) of digest "),
]


def check_unlike(command: list[str], more: dict[str, str]) -> None:
    """Two processes, started with `command` and a job each, end with a clear error where they are not alike."""
    for *unlike, words in UNLIKE:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2]),
                       "WORLD_SIZE": "2", "MASTER_PORT": str(free_port()), **more}  # fmt: skip
        started = [
            subprocess.Popen(
                [*command, json.dumps({"do": "begun", "parallel": {"data": 2}, **own})],
                env=environment | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True,
            )
            for rank, own in enumerate(unlike)
        ]  # fmt: skip
        said = [process.communicate(timeout=280)[1] for process in started]
        for rank, text in enumerate(said):
            want = words.format(other=1 - rank, theirs=2 - rank)
            assert started[rank].returncode == 1 and f"ValueError: all processes must have the same {want}" in text, (
                text[-3000:]
            )


def killed_at_random(command: list[str], more: dict[str, str], folder: Path, seed: int) -> str:
    """Two processes that step and save in turns; one is killed at any moment. What the other one says of its end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2]),
                   "WORLD_SIZE": "2", "MASTER_PORT": str(free_port()), **more}  # fmt: skip
    started = [
        subprocess.Popen(command, env=environment | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    draw = random.Random(seed)
    victim = draw.randrange(2)
    try:
        until = time.monotonic() + 400
        while not list(folder.glob("step-*/checkpoint.json")):
            assert time.monotonic() < until and all(process.poll() is None for process in started)
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 3))
        started[victim].kill()
        killed = time.time()
        words = started[1 - victim].communicate(timeout=300)[1]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    file = folder / f"said-{1 - victim}.json"
    assert file.is_file(), words[:6000]
    said = json.loads(file.read_text())
    assert said["ended"] - killed < 60
    return str(said["said"])


def interrupted(package: str, folder: Path) -> list[tuple[int, str]]:
    """Two processes of a long run, of which the second alone is interrupted: exit status and output of both."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2]),
                   "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "WORLD_SIZE": "2",
                   "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}  # fmt: skip
    train = ["train", "--steps", "100000", "--plain", "--batch", "4", "--checkpoint-every", "2", "--parallel", "fsdp=2"]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", package, *train, "--out", str(folder)], env=environment | {"RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        until = time.monotonic() + 280
        while not list(folder.glob("step-*/checkpoint.json")):
            assert time.monotonic() < until and all(process.poll() is None for process in started)
            time.sleep(0.01)
        started[1].send_signal(signal.SIGINT)
        said = [process.communicate(timeout=200)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    return [(process.returncode, text) for process, text in zip(started, said, strict=True)]


def check_interrupted_together(package: str, folder: Path) -> None:
    """Ctrl-C of one of two processes ends both after the same update, which is saved."""
    first, second = interrupted(package, folder)
    assert first[0] == second[0] == 130, first[1] + second[1]
    updates = importlib.import_module(package).Trainer.load(folder).updates
    assert updates >= 2 and f"interrupted: saved {folder} after update {updates}; go on with --resume" in first[1]
