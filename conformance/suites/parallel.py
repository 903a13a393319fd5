"""Layouts over devices: twenty updates of a trainer on several devices against the reference's on one.

`conformance run --suite parallel`. A row is a model and a layout, on two or four devices. Ragged rows, accumulation,
clipping, dropout, z-loss, smoothing, an average and a schedule are on. Losses, norms, rates, counts and every last
parameter are judged in float64 to the budget of any training run (models.py): the loss is a mean over all counted
targets and no mean of means, and random numbers do not depend on the layout.

torch has a process for each device. JAX has one process with that many devices of the host, and at the level "full"
also two processes that share them. Processes are kept from row to row, while rows have as many devices.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..compare import Disagreement, Tally, check_within
from ..memory import remembered
from ..models import Arrays, ModelCase, expected_of
from ..race.process import Process, WorkerFailed
from ..reference import reference
from ..rows import LEVELS, Pattern, matches
from ..runner import Result, judged
from ..targets.protocol import NotOffered, Target
from . import OutsideCase

# Seconds for one row: importing a framework in four processes and compiling, on two busy cores.
TIMEOUT = 600.0
# Package, devices and processes -> the processes of these that are there.
_crews: dict[tuple[str, int, int], list[Process]] = {}
MODEL: dict[str, Any] = {
    "vocab": 13, "width": 16, "heads": 4, "kv_heads": 2, "hidden": 12, "layers": 2, "max_length": 16,
    "positions": "rotary", "dropout": 0.2, "sinks": True, "qk_norm": True,
}  # fmt: skip
# What changes of the model in a second run: biases by head, tied embeddings, a window.
OTHER: dict[str, Any] = {
    "positions": "relative", "tie_embeddings": True, "activation": "swiglu", "norm": "rms", "window": [3, 0],
    "sinks": False,
}  # fmt: skip
MODELS = {"plain": MODEL, "other": MODEL | OTHER}
TRAIN: dict[str, Any] = {
    "steps": 20, "batch": 8, "accumulate": 2, "lr": 1e-2, "clip_norm": 0.5, "z_loss": 1e-2, "label_smoothing": 0.1,
    "precision": "float64", "ema": 0.9, "schedule": "cosine", "warmup": 3, "seed": 5,
}  # fmt: skip
# Model, layout, and from which level on.
ROWS: tuple[tuple[str, dict[str, int], str], ...] = (
    ("plain", {"data": 2}, "quick"),
    ("plain", {"fsdp": 2}, "quick"),
    ("plain", {"tensor": 2}, "quick"),
    ("plain", {"context": 2}, "quick"),
    ("other", {"data": 2}, "full"),
    ("other", {"fsdp": 2}, "full"),
    ("other", {"tensor": 2}, "full"),
    ("other", {"context": 2}, "full"),
    ("plain", {"data": 2, "fsdp": 2}, "quick"),
    ("plain", {"fsdp": 4}, "full"),
    ("plain", {"context": 4}, "full"),
    ("plain", {"data": 2, "tensor": 2}, "full"),
    ("plain", {"fsdp": 2, "tensor": 2}, "full"),
    ("plain", {"fsdp": 2, "context": 2}, "full"),
    ("plain", {"context": 2, "tensor": 2}, "full"),
)


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


@dataclass(frozen=True)
class LayoutCase(OutsideCase):
    """model: a name of MODELS. parallel: the layout, as `TrainConfig.parallel` has it."""

    model: str
    parallel: Mapping[str, int]
    level: str = "quick"
    function: str = "Trainer"
    rules: tuple[str, ...] = ("training-1", "training-3")

    @property
    def id(self) -> str:  # type: ignore[override]
        return f"parallel/{self.model}/" + "-".join(f"{axis}{size}" for axis, size in self.parallel.items())

    @property
    def devices(self) -> int:
        return int(np.prod(list(self.parallel.values())))

    @property
    def row(self) -> ModelCase:
        """The same run on one device, as a row of training."""
        return ModelCase(f"parallel/{self.model}", self.rules, "", MODELS[self.model], train=dict(TRAIN))

    def judge(self, target: Target, level: str) -> Iterator[Result]:
        """Once for each way in which the framework has so many devices; in float64."""
        ways = [self.devices] if target.framework == "torch" else [1]
        if target.framework == "jax" and LEVELS.index(level) >= LEVELS.index("full") and self.devices == 4:
            ways.append(2)
        for processes in ways:
            kernel = f"{processes} process{'es' if processes > 1 else ''}"
            yield judged(self, target, "float64", kernel, partial(self._compare, target, processes))

    def _compare(self, target: Target, processes: int, tally: Tally) -> None:
        if target.name not in ("backend_torch", "backend_jax"):
            raise NotOffered("it trains on one device: no TrainConfig.parallel")
        want, bounds = remembered(("layout", self.model), lambda: expected_of(self.row, initial(self.model), data()))
        got = answers(target.name, self, processes)
        if list(got) != list(want):
            raise Disagreement(f"training must report {list(want)}; got {list(got)}")
        for name, value in want.items():
            check_within(tally, name, got[name], value, bounds[name])


def cases(level: str = "quick", pattern: Pattern = None) -> list[LayoutCase]:
    """The rows of the level that have `pattern` in their id."""
    found = [LayoutCase(*row) for row in ROWS if LEVELS.index(row[2]) <= LEVELS.index(level)]
    return [case for case in found if matches(pattern, case.id, case.function)]


def initial(model: str) -> Arrays:
    """The parameters that every run starts from: the reference's own."""
    core = reference()
    return core.get_params(core.Transformer(core.ModelConfig.from_dict(MODELS[model]), seed=3, dtype="float64"))


def data() -> list[Arrays]:
    return batches(TRAIN["steps"])


def answers(package: str, case: LayoutCase, processes: int) -> Arrays:
    """Records and last parameters of a package's run in this layout, in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.npz"
        command = {"do": "train", "package": package, "model": case.model, "parallel": dict(case.parallel)}
        key = (package, case.devices, processes)
        crew = _crew(*key)
        for member in crew:
            member.send(command | {"out": str(out)})
        failed = []
        for member in crew:
            try:
                member.answer("train")
            except WorkerFailed as error:
                failed.append(str(error))
        if failed:
            for member in _crews.pop(key):
                member.close()
            # Those that waited for the one that failed say only that it has gone.
            raise Disagreement(next((text for text in failed if "waited for another one" not in text), failed[0]))
        with np.load(out) as found:
            return dict(found)


def _crew(package: str, devices: int, processes: int) -> list[Process]:
    """Processes for so many devices; those for another number are ended. They end with this one."""
    for key in [key for key in _crews if key[:2] != (package, devices)]:
        for member in _crews.pop(key):
            member.close()
    key = (package, devices, processes)
    if key not in _crews:
        shared = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "localhost", "MASTER_PORT": str(_free_port())}
        if package == "backend_jax":
            flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices // processes}"
            shared |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip()}
        _crews[key] = [
            Process(
                threads=1, timeout=TIMEOUT, variables=shared | {"RANK": str(rank)},
                module="conformance.suites.parallel_worker",
            )
            for rank in range(processes)
        ]  # fmt: skip
    return _crews[key]


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return int(s.getsockname()[1])
