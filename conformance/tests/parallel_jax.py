"""A JAX run on several devices of one process, or one process of several: `parallel_jax.py OUT DEVICES JOB...`.

With RANK, WORLD_SIZE and MASTER_PORT set it is one process of WORLD_SIZE. The first writes what came out.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from parallel_cases import apart, batches, config_of, refusals, train_of

import backend_jax as B
from backend_jax import parallel as layouts
from backend_jax import place
from backend_jax import ring as ring_of
from backend_jax.parallel import make_mesh
from backend_jax.processes import connect
from backend_jax.ring import Ring, ring_attention
from conformance.devices.collectives import collectives, routes, summed
from core_numpy.contract.parallel import Layout


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


def compiled(parallel: dict[str, int], window: list[int] | None = None, length: int = 16) -> dict[str, Any]:
    """What the compiled update of a small model sends on several devices: `length` positions, one batch of 8 rows."""
    config = config_of("small").replace(window=None if window is None else tuple(window), max_length=length)
    trainer = B.Trainer(B.Transformer(config, dtype="float64"), train_of(parallel, accumulate=1, ema=None))
    with place.spread_over(trainer.mesh, True), jax.default_matmul_precision("highest"):
        scalars = (np.uint32(1), np.float64(1e-3), np.float64(1.0))
        arrays = trainer._arrays(batches(1, T=length)[0])
        lowered = trainer._program.step.lower(trainer._params, trainer.state, arrays, *scalars)
        text = lowered.compile().as_text()
    return {"sent": summed(collectives(text)), "routes": sorted(routes(text))}


OPTIONS: dict[str, Any] = {
    "scale": None, "softcap": None, "bias": None, "causal": True, "window": None, "sinks": None, "kv_lengths": None,
    "q_segments": None, "dropout_rate": 0.0, "dropout_key": None,
}  # fmt: skip


def with_gradients(function: Any) -> Any:
    """(q, k, v, gradient of what comes out) -> what comes out, and the gradients of q, k and v."""

    def work(q: Any, k: Any, v: Any, grad: Any) -> Any:
        out, pull = jax.vjp(function, q, k, v)
        return out, *pull(grad)

    return work


def ring(cases: list[dict[str, Any]], length: int) -> list[dict[str, Any]]:
    """How far attention over the context axis, all devices, is from the whole; and the legs in which keys travel."""
    count, rng, found = jax.device_count(), np.random.default_rng(0), []
    arrays = [rng.standard_normal((2, heads, length, 4)) for heads in (4, 2, 2, 4)]
    more = {"sinks": rng.standard_normal(4), "kv_lengths": np.array([length, length - 3]), "softcap": 3.0,
            "q_segments": np.sort(rng.integers(0, 3, (2, length)), 1)}  # fmt: skip
    for case in cases:
        options = OPTIONS | (more if case.pop("more", False) else {}) | case
        ring_of.LEAST = options.pop("least", 2048)
        window = options["window"] = None if options["window"] is None else tuple(options["window"])
        causal, segments = options["causal"], options["q_segments"]
        order = place.columns_of(Layout(context=count), length, causal)
        named = {name: x for name, x in options.items() if name not in ("bias", "q_segments")}

        def whole(q: Any, k: Any, v: Any, segments: Any = segments, named: Any = named) -> Any:
            return B.attention(q, k, v, q_segments=segments, kv_segments=segments, **named)

        def spread(q: Any, k: Any, v: Any, options: Any = options, order: Any = order) -> Any:
            out = ring_attention(*(x[:, :, order] for x in (q, k, v)), dict(options))
            return out[:, :, np.argsort(order)]

        want = jax.jit(with_gradients(whole))(*arrays)
        with place.spread_over(make_mesh(Layout(context=count)), causal):
            got = jax.jit(with_gradients(spread))(*arrays)
        apart = max(float(np.max(np.abs(a - b))) for a, b in zip(want, got, strict=True))
        here = Ring(count, length, 4, causal, window, (), None)
        found.append({"apart": apart, "legs": here.legs(), "shares": here.shares})
    return found


def room(counts: list[int], length: int) -> list[int]:
    """Bytes that XLA sets aside on a device for attention, forward and backward, over so many; 1 is the whole."""
    found = []
    for count in counts:
        mesh = make_mesh(Layout(context=count), jax.devices()[:count])
        sharding = NamedSharding(mesh, PartitionSpec(None, None, "context", None))
        if count == 1:
            work = with_gradients(lambda q, k, v: B.attention(q, k, v, causal=True))
        else:
            work = with_gradients(lambda q, k, v: ring_attention(q, k, v, dict(OPTIONS)))
        with place.spread_over(mesh, True):
            x = jax.ShapeDtypeStruct((1, 1, length, 64), np.float32, sharding=sharding)
            said: Any = jax.jit(work, out_shardings=sharding).lower(x, x, x, x).compile().memory_analysis()
        found.append(said.argument_size_in_bytes + said.output_size_in_bytes + said.temp_size_in_bytes)
    return found


def evaluated(parallel: dict[str, int], model: str = "plain") -> dict[str, Any]:
    """What a trainer in a layout and one on one device make of the same ragged rows; the last fill no batch."""
    rows = [*batches(2), *batches(1, rows=3), *batches(1, rows=5, T=7)]
    alone, trainer = train(None, model, 1)[0], train(parallel, model, 1)[0]
    want, got = alone.evaluate(rows), trainer.evaluate(rows)
    return {"apart": abs(got["loss"] / want["loss"] - 1.0), "counts": [want["tokens"], got["tokens"]]}


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


def continued(parallel: dict[str, int], folder: str, model: str = "small", steps: int = 3) -> dict[str, Any]:
    """A run that goes on from somebody's checkpoint in a layout and is saved, against one that never stopped."""
    alone, _ = train(None, model, steps)
    again = B.Trainer.load(folder, parallel=parallel)
    for batch in batches(steps)[again.updates :]:
        again.step(batch)
    again.save(folder)
    return {"params": apart(B.get_params(alone.model), B.get_params(again.model)), "updates": again.updates}


def killed(parallel: dict[str, int], folder: str, victim: int) -> dict[str, Any]:
    """One process kills itself before the third update; the others' error is their end."""
    trainer, _ = train(parallel, "small", 2)
    trainer.save(folder)
    if jax.process_index() == victim:
        with open(os.path.join(folder, "killed.txt"), "w", encoding="utf-8") as file:
            file.write(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    return trainer.step(batches(3)[2])


def begun(
    parallel: dict[str, int], version: str | None = None, weights: int = 0, given: int | None = None, **more: Any
) -> None:
    """Make a trainer, as a process of another version does it; weights: the seed of its parameters; given: a batch."""
    if version is not None:
        layouts.__version__ = version
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
        with open(os.path.join(folder, f"said-{jax.process_index()}.json"), "w", encoding="utf-8") as file:
            json.dump({"said": str(error), "ended": time.time()}, file)
        raise


def main(out: str, devices: int, jobs: list[str]) -> None:
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_num_cpu_devices", devices)
    if "RANK" in os.environ:
        connect(f"localhost:{os.environ['MASTER_PORT']}", int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]))
    works: dict[str, Any] = {
        "compared": compared, "compiled": compiled, "ring": ring, "room": room, "resumed": resumed,
        "evaluated": evaluated,
        "continued": continued, "killed": killed,
        "until": until, "begun": begun,
        "refused": lambda: refusals(B),
    }  # fmt: skip
    found = [works[job.pop("do", "compared")](**job) for job in map(json.loads, jobs)]
    if jax.process_index() == 0:
        with open(out, "w", encoding="utf-8") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
