"""A JAX run on several devices of one process, or one process of several: `parallel_jax.py OUT DEVICES JOB...`.

With RANK, WORLD_SIZE and MASTER_PORT set it is one process of WORLD_SIZE. The first writes what came out.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import jax
from parallel_cases import apart, batches, config_of, train_of

import backend_jax as B


def train(parallel: dict[str, int] | None, model: str, steps: int, **more: Any) -> tuple[Any, list[dict[str, Any]]]:
    config = train_of(parallel, **more)
    dtype = "float64" if config.precision == "float64" else "float32"
    trainer = B.Trainer(B.Transformer(config_of(model), seed=3, dtype=dtype), config)
    return trainer, [trainer.step(batch) for batch in batches(steps)]


def compared(parallel: dict[str, int], model: str = "plain", steps: int = 20, **more: Any) -> dict[str, Any]:
    """How far a run on several devices is from one on one."""
    alone, want = train(None, model, steps, **more)
    trainer, got = train(parallel, model, steps, **more)
    keys = ("loss", "grad_norm")
    reports = max(abs(a[k] / b[k] - 1.0) for a, b in zip(got, want, strict=True) for k in keys)
    params = apart(B.get_params(alone.model), B.get_params(trainer.model))
    if alone.ema is not None:
        params = max(params, apart(alone.ema, trainer.ema))
    counts = [(a["tokens"], a["lr"]) for a in got] == [(b["tokens"], b["lr"]) for b in want]
    return {"parallel": parallel, "model": model, "reports": reports, "params": params, "counts": counts}


def resumed(first: dict[str, int], then: dict[str, int] | None, folder: str, model: str = "small") -> dict[str, Any]:
    """Two updates in one layout, a checkpoint, and one more in another, against three on one device."""
    alone, _ = train(None, model, 3)
    trainer, _ = train(first, model, 2)
    path = trainer.save(folder)
    again = B.Trainer.load(folder, parallel=then)
    again.step(batches(3)[2])
    files = sorted(os.listdir(path))
    return {"params": apart(B.get_params(alone.model), B.get_params(again.model)), "updates": again.updates,
            "files": files}  # fmt: skip


def main(out: str, devices: int, jobs: list[str]) -> None:
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_num_cpu_devices", devices)
    if "RANK" in os.environ:
        jax.distributed.initialize(
            f"localhost:{os.environ['MASTER_PORT']}", int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
        )
    found = []
    for job in map(json.loads, jobs):
        found.append({"compared": compared, "resumed": resumed}[job.pop("do", "compared")](**job))
    if jax.process_index() == 0:
        with open(out, "w", encoding="utf-8") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
