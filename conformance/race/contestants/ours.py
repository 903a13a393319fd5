"""Our three packages, through their public names."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from ..task import SEED, Task
from .base import Batch, Contestant, Running

Work = Callable[[Batch], Any]


def _ours(package: str, compile: bool | str) -> Callable[[Task], Running]:
    def build(task: Task) -> Running:
        backend = importlib.import_module(package)
        device = "cuda" if package == "backend_torch" and task.device == "cuda" else None
        model = backend.Transformer(task.model, seed=SEED, device=device)
        backend.set_params(model, task.params())
        trainer = backend.Trainer(model, task.train.replace(compile=compile))
        if task.parallel is not None:
            return Running(lambda batch: trainer.step(batch)["loss"], _wait(package, model))
        passes = {"core_numpy": _numpy_passes, "backend_torch": _torch_passes, "backend_jax": _jax_passes}[package]
        backward, forward, wait = passes(model, trainer, task, compile is True)

        def decode(prompts: np.ndarray, new: int) -> Any:
            arrays = prompts if package == "core_numpy" else backend.from_numpy(prompts, device=device)
            return backend.generate(model, arrays, max_new=new)

        return Running(lambda batch: trainer.step(batch)["loss"], wait, backward, forward, decode)

    return build


def _numpy_passes(model: Any, trainer: Any, task: Task, compiled: bool) -> tuple[Work, Work, Callable[[], Any]]:
    """(loss and gradients, loss, wait) of a built model; the other two are alike."""
    import core_numpy

    del task, compiled
    return (
        lambda batch: core_numpy.loss_and_gradients(model, batch)[0],
        lambda batch: trainer.evaluate([batch])["loss"],
        lambda: None,
    )


def _torch_passes(model: Any, trainer: Any, task: Task, compiled: bool) -> tuple[Work, Work, Callable[[], Any]]:
    # The gradients stay tensors, as the peers' do: `loss_and_gradients` would make NumPy arrays of them.
    from ._torch import passes

    del trainer
    return passes(model, model, task, compiled=compiled, parameters=model.parameters())


def _jax_passes(model: Any, trainer: Any, task: Task, compiled: bool) -> tuple[Work, Work, Callable[[], Any]]:
    import jax
    from flax import nnx

    import backend_jax

    del compiled
    held: dict[str, Any] = {}
    matmul = task.train.matmul_precision

    def made() -> dict[str, Any]:
        # At the first call, after the updates: those donate the arrays that the model had before.
        if "params" not in held:
            graph, held["params"] = nnx.split(model)

            def loss(params: Any, tokens: Any, targets: Any) -> Any:
                with jax.default_matmul_precision(matmul):
                    return backend_jax.cross_entropy(nnx.merge(graph, params)(tokens), targets)

            held["gradients"], held["value"] = jax.jit(jax.value_and_grad(loss)), jax.jit(loss)
        return held

    def backward(batch: Batch) -> Any:
        value, held["grads"] = made()["gradients"](held["params"], batch["tokens"], batch["targets"])
        return value

    def forward(batch: Batch) -> Any:
        return made()["value"](held["params"], batch["tokens"], batch["targets"])

    def wait() -> None:
        # Not for the trainer's state, which one program makes with the parameters, and which a look takes apart.
        jax.block_until_ready((nnx.state(model), held.get("grads")))

    return backward, forward, wait


def _wait(package: str, model: Any) -> Callable[[], Any]:
    """On several devices of a CPU: torch's work is done when a step returns; JAX's may be on its way."""
    if package != "backend_jax":
        return lambda: None
    import jax
    from flax import nnx

    return lambda: jax.block_until_ready(nnx.state(model))


ALL = ("gpt", "gpt-unbiased", "llama")
OFFERS = frozenset({"bfloat16", "remat", "decode"})
SPREAD = OFFERS | {"devices"}
CONTESTANTS = [
    Contestant("numpy", _ours("core_numpy", False), ("numpy",), "the reference, in float64", "numpy", False, True, ALL,
               frozenset({"decode", "remat"})),
    Contestant("torch", _ours("backend_torch", False), ("torch",), "eager", "torch", False, True, ALL, SPREAD),
    Contestant("torch-compiled", _ours("backend_torch", True), ("torch",), "torch.compile", "torch", True, True, ALL,
               OFFERS),
    Contestant("jax", _ours("backend_jax", "auto"), ("jax", "flax"), "jit", "jax", True, True, ALL, SPREAD),
]  # fmt: skip
