"""Our three packages, through their public names."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

import numpy as np

from ..task import SEED, Task
from .base import Batch, Contestant, Running


def _ours(package: str, compile: bool | str) -> Callable[[Task], Running]:
    def build(task: Task) -> Running:
        backend = importlib.import_module(package)
        device = "cuda" if package == "backend_torch" and task.device == "cuda" else None
        model = backend.Transformer(task.model, seed=SEED, device=device)
        backend.set_params(model, task.params())
        trainer = backend.Trainer(model, task.train.replace(compile=compile))

        def finish() -> None:
            if package != "core_numpy":
                importlib.import_module(f"{package}.arrays").wait(backend.get_params(model))

        def forward(batch: Batch) -> float:
            return float(trainer.evaluate([batch])["loss"])

        def backward(batch: Batch) -> float:
            return float(backend.loss_and_gradients(model, batch)[0])

        def decode(prompts: np.ndarray, new: int) -> Sequence[int]:
            arrays = prompts if package == "core_numpy" else backend.arrays.from_numpy(prompts, device=device)
            return backend.generate(model, arrays, max_new=new)

        return Running(lambda batch: trainer.step(batch)["loss"], finish, backward, forward, decode)

    return build


ALL = ("gpt", "gpt-unbiased", "llama")
OFFERS = frozenset({"bfloat16", "remat", "decode"})
CONTESTANTS = [
    Contestant("numpy", _ours("core_numpy", False), ("numpy",), "the reference, in float64", "numpy", False, True, ALL,
               frozenset({"decode", "remat"})),
    Contestant("torch", _ours("backend_torch", False), ("torch",), "eager", "torch", False, True, ALL, OFFERS),
    Contestant("torch-compiled", _ours("backend_torch", True), ("torch",), "torch.compile", "torch", True, True, ALL,
               OFFERS),
    Contestant("jax", _ours("backend_jax", "auto"), ("jax", "flax"), "jit", "jax", True, True, ALL, OFFERS),
]  # fmt: skip
