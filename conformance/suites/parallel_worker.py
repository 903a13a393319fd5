"""One process of runs on several devices, asked as `race.worker` is: RANK, WORLD_SIZE and MASTER_PORT say which one.

    {"do": "train", "package": p, "model": name, "parallel": layout, "out": file}   -> {}

The first writes the records of all updates and the last parameters into the file.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np

from ..race.worker import serve
from .parallel import MODELS, TRAIN, data, initial


def answer(command: dict[str, Any]) -> dict[str, Any]:
    package, model = command["package"], command["model"]
    if package == "backend_jax":
        _begin_jax()
    backend = importlib.import_module(package)
    made = backend.Transformer(backend.ModelConfig.from_dict(MODELS[model]), dtype="float64")
    backend.set_params(made, initial(model))
    trainer = backend.Trainer(made, backend.TrainConfig.from_dict({**TRAIN, "parallel": command["parallel"]}))
    records = [trainer.step(batch) for batch in data()]
    found = {name: np.array([float(r[name]) for r in records]) for name in ("loss", "grad_norm", "lr", "tokens")}
    found |= {f"final {name}": np.asarray(x) for name, x in backend.get_params(made).items()}
    if trainer.first:
        np.savez(command["out"], **found)  # type: ignore[arg-type]
    return {}


def _begin_jax() -> None:
    """Before the first row: 64 bits, and the other processes."""
    import jax

    from backend_jax.processes import connect

    jax.config.update("jax_enable_x64", True)
    count = int(os.environ["WORLD_SIZE"])
    if count > 1 and not jax.distributed.is_initialized():
        connect(f"localhost:{os.environ['MASTER_PORT']}", count, int(os.environ["RANK"]))


if __name__ == "__main__":
    serve(answer, end_at_errors=True)
