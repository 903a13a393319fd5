"""Our three packages, through their public names."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from ..task import SEED, Task
from .base import Contestant, Running


def _ours(package: str, compile: bool | str) -> Callable[[Task], Running]:
    def build(task: Task) -> Running:
        backend = importlib.import_module(package)
        model = backend.Transformer(task.model, seed=SEED)
        backend.set_params(model, task.params())
        trainer = backend.Trainer(model, task.train.replace(compile=compile))

        def finish() -> None:
            if package != "core_numpy":
                importlib.import_module(f"{package}.arrays").wait(backend.get_params(model))

        return Running(lambda batch: trainer.step(batch)["loss"], finish)

    return build


CONTESTANTS = [
    Contestant("numpy", _ours("core_numpy", False), ("numpy",), "the reference, in float64"),
    Contestant("torch", _ours("backend_torch", False), ("torch",), "eager"),
    Contestant("torch-compiled", _ours("backend_torch", True), ("torch",), "torch.compile"),
    Contestant("jax", _ours("backend_jax", "auto"), ("jax", "flax"), "jit"),
]
