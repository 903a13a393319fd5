"""One process of a torch run on several: `torchrun ... parallel_torch.py OUT JOB...`; the first writes what came out.

A job is JSON: {"model", "parallel", "steps", and more of the TrainConfig}.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from parallel_cases import apart, batches, config_of, refusals, train_of

import backend_torch as B
from backend_torch import processes, ring


def train(parallel: dict[str, int] | None, model: str, steps: int, **more: Any) -> tuple[Any, list[dict[str, Any]]]:
    config = train_of(parallel, **more)
    dtype = "float64" if config.precision == "float64" else "float32"
    trainer = B.Trainer(B.Transformer(config_of(model), seed=3, dtype=dtype), config)
    return trainer, [trainer.step(batch) for batch in batches(steps)]


def shared(parallel: dict[str, int], model: dict[str, Any], length: int) -> dict[str, Any]:
    """How far a run whose keys travel in several shares is from one on one process."""
    ring.LEAST = 1
    config = B.ModelConfig.from_dict({**config_of("plain").to_dict(), "max_length": length, **model})
    rows = batches(2, T=length)
    found = []
    for layout in (None, parallel):
        trainer = B.Trainer(B.Transformer(config, seed=3, dtype="float64"), train_of(layout))
        found.append(([trainer.step(batch)["grad_norm"] for batch in rows], B.get_params(trainer.model)))
    here = ring.Ring(None, 0, parallel["context"], length, config.is_causal)
    norms = max(abs(a / b - 1.0) for a, b in zip(*(norms for norms, _ in found), strict=True))
    return {"shares": here.shares, "apart": max(norms, apart(*(params for _, params in found)))}


def compared(parallel: dict[str, int], model: str = "plain", steps: int = 20, **more: Any) -> dict[str, Any]:
    """How far a run on several processes is from one on one."""
    alone, want = train(None, model, steps, **more)
    trainer, got = train(parallel, model, steps, **more)
    keys = ("loss", "grad_norm")
    reports = max(abs(a[k] / b[k] - 1.0) for a, b in zip(got, want, strict=True) for k in keys)
    params = apart(B.get_params(alone.model), B.get_params(trainer.model))
    if alone.ema is not None:
        params = max(params, apart(alone.ema, trainer.ema))
    counts = [(a["tokens"], a["lr"]) for a in got] == [(b["tokens"], b["lr"]) for b in want]
    return {"parallel": parallel, "model": model, "reports": reports, "params": params, "counts": counts}


def sent(parallel: dict[str, int], model: str = "small", **more: Any) -> dict[str, Any]:
    """What one update sends, counted as it is sent."""
    from conformance.devices.sent import Sent

    trainer, _ = train(parallel, model, 1, **more)
    with Sent() as counted:
        trainer.step(batches(1)[0])
    return {"parallel": parallel, "sent": counted.summed(), "buffer": trainer.flat.data.numel()}


def partners(window: list[int] | None, length: int) -> dict[str, Any]:
    """To whom each process sends in an update whose rows are spread over all of them, and how many messages."""
    from conformance.devices.sent import Sent

    config = config_of("small").replace(window=None if window is None else tuple(window), max_length=length)
    layout = {"context": int(os.environ["WORLD_SIZE"])}
    trainer = B.Trainer(B.Transformer(config, seed=3, dtype="float64"), train_of(layout))
    with Sent() as counted:
        trainer.step(batches(1, T=length)[0])
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, counted.to)
    return {"to": said}


def evaluated(parallel: dict[str, int], model: str = "plain") -> dict[str, Any]:
    """What a trainer in a layout and one on one device make of the same ragged rows; the last fill no batch."""
    rows = [*batches(2), *batches(1, rows=3), *batches(1, rows=5, T=7)]
    alone, trainer = train(None, model, 1)[0], train(parallel, model, 1)[0]
    want, got = alone.evaluate(rows), trainer.evaluate(rows)
    return {"apart": abs(got["loss"] / want["loss"] - 1.0), "counts": [want["tokens"], got["tokens"]]}


def resumed(first: dict[str, int], then: dict[str, int] | None, folder: str) -> dict[str, Any]:
    """Five updates in one layout, a checkpoint, and three more in another, against eight on one process."""
    alone, _ = train(None, "plain", 8)
    trainer, _ = train(first, "plain", 5)
    trainer.save(folder)
    again = B.Trainer.load(folder, parallel=then)
    for batch in batches(8)[5:]:
        again.step(batch)
    return {"params": apart(B.get_params(alone.model), B.get_params(again.model)), "updates": again.updates}


def saved(parallel: dict[str, int], folder: str, model: str = "small", steps: int = 2) -> dict[str, Any]:
    """Some updates in a layout, and a checkpoint."""
    trainer, _ = train(parallel, model, steps)
    return {"path": str(trainer.save(folder))}


def killed(parallel: dict[str, int], folder: str) -> dict[str, Any]:
    """The last process kills itself in the fourth update; says how the others end, and after how long."""
    trainer, _ = train(parallel, "plain", 2)
    trainer.save(folder)
    trainer.step(batches(3)[2])
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        trainer.step(batches(4)[3])
    except ConnectionError as error:
        said = str(error)
    result = {"said": said, "seconds": time.monotonic() - began}
    with open(os.path.join(folder, f"said-{dist.get_rank()}.json"), "w", encoding="utf-8") as file:
        json.dump(result, file)
    os._exit(0)  # a group with a dead process cannot be taken down in order


def begun(
    parallel: dict[str, int], version: str | None = None, weights: int = 0, given: int | None = None, **more: Any
) -> None:
    """Make a trainer, as a process of another version does it; weights: the seed of its parameters; given: a batch."""
    if version is not None:
        processes.__version__ = version
    trainer = B.Trainer(B.Transformer(config_of("small"), seed=weights, dtype="float64"), train_of(parallel, **more))
    if given is not None:
        trainer.step(batches(given + 1)[given])


def until(parallel: dict[str, int], folder: str) -> None:
    """Updates, each saved, until another process is lost; says how that ends, and when."""
    trainer = B.Trainer(B.Transformer(config_of("small"), dtype="float64"), train_of(parallel, steps=100_000))
    trainer.step(batches(1)[0])
    try:
        for batch in itertools.cycle(batches(4)):
            trainer.save(folder)
            trainer.step(batch)
    except ConnectionError as error:
        said = {"said": str(error), "ended": time.time()}
    with open(os.path.join(folder, f"said-{dist.get_rank()}.json"), "w", encoding="utf-8") as file:
        json.dump(said, file)
    os._exit(0)  # a group with a dead process cannot be taken down in order


def main(out: str, jobs: list[str]) -> None:
    torch.set_num_threads(1)
    works: dict[str, Any] = {
        "begun": begun, "compared": compared, "shared": shared,
        "sent": sent, "partners": partners, "resumed": resumed,
        "evaluated": evaluated, "saved": saved, "killed": killed, "until": until,
        "refused": lambda: refusals(B),
    }  # fmt: skip
    found = []
    for job in map(json.loads, jobs):
        found.append(works[job.pop("do", "compared")](**job))
    if dist.get_rank() == 0:
        with open(out, "w", encoding="utf-8") as file:
            json.dump(found, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
