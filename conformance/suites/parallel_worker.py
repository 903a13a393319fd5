"""One process of a run on several devices: `python -m conformance.suites.parallel_worker PACKAGE MODEL LAYOUT OUT`.

Started by torchrun, or for JAX alone or, with RANK, WORLD_SIZE and MASTER_PORT set, as one of several. The first writes
the records of all updates and the last parameters.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

import numpy as np

from .parallel import MODELS, TRAIN, data, initial


def main(package: str, model: str, parallel: str, out: str) -> None:
    if package == "backend_jax":
        import jax

        from backend_jax.processes import connect

        jax.config.update("jax_enable_x64", True)
        if "RANK" in os.environ:
            connect(f"localhost:{os.environ['MASTER_PORT']}", int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]))
    backend = importlib.import_module(package)
    made = backend.Transformer(backend.ModelConfig.from_dict(MODELS[model]), dtype="float64")
    backend.set_params(made, initial(model))
    trainer = backend.Trainer(made, backend.TrainConfig.from_dict({**TRAIN, "parallel": json.loads(parallel)}))
    records = [trainer.step(batch) for batch in data()]
    found = {name: np.array([float(r[name]) for r in records]) for name in ("loss", "grad_norm", "lr", "tokens")}
    found |= {f"final {name}": np.asarray(x) for name, x in backend.get_params(made).items()}
    if trainer.first:
        np.savez(out, **found)  # type: ignore[arg-type]
    if package == "backend_torch":
        import torch.distributed

        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
