"""Training on several devices, of one process or of many. What the axes mean: core_numpy.contract.parallel.

Native: parameters, moments and batches are arrays spread over a `Mesh` by `NamedSharding`s, and the compiled update is
the one of a single device: XLA puts the communication in. So random numbers, means and norms are those of the whole
batch by themselves. One process with many devices needs nothing else; many processes call `processes.connect` or
`jax.distributed.initialize` first, and each is given the whole batch.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import flax
import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from core_numpy.contract import __version__
from core_numpy.contract.checkpoints import checkpoint_path, finish_shards
from core_numpy.contract.config import TrainConfig
from core_numpy.contract.parallel import (
    AXES,
    Layout,
    batch_digests,
    check_alike,
    check_layout,
    check_parallel_batch,
    parameters_digest,
)
from core_numpy.contract.shards import MODEL_SLOT, open_shards, shard_name, write_shard

from . import place
from .arrays import to_numpy
from .folding import Folding
from .model import Transformer, named_parameters
from .program import Program
from .training import Trainer

# Which axis of a parameter lies over the tensor axis: what is by heads or by hidden features.
TENSOR_AXIS = {
    "query.weight": 1, "key.weight": 1, "value.weight": 1, "output.weight": 0, "query.bias": 0, "key.bias": 0,
    "value.bias": 0, "sinks": 0, "up.weight": 1, "gate.weight": 1, "down.weight": 0, "up.bias": 0, "gate.bias": 0,
}  # fmt: skip


# By which an error of a collective between processes is known: their engines, and gRPC's words for a broken wait.
BROKEN = ("Gloo", "gloo", "NCCL", "UNAVAILABLE", "DEADLINE_EXCEEDED", "coordination service")
# What lies over the context axis; lengths and segments are those of whole rows.
RINGED = ("tokens", "targets", "positions")


def make_mesh(layout: Layout, devices: list[Any] | None = None) -> Mesh:
    """The devices in the order of the layout's axes; by default all that JAX has, of all processes."""
    found = jax.devices() if devices is None else devices
    return Mesh(np.array(found).reshape(layout.sizes), AXES)


def specification(name: str, shape: tuple[int, ...], layout: Layout) -> PartitionSpec:
    """How a parameter is spread: heads and hidden features over tensor, and the longest other axis over fsdp.

    A parameter that fsdp does not divide (a few numbers) is whole on every device.
    """
    axes: list[str | None] = [None] * len(shape)
    if layout.tensor > 1:
        for ending, axis in TENSOR_AXIS.items():
            if name.endswith(f".{ending}"):
                axes[axis] = "tensor"
    if layout.fsdp > 1:
        free = [i for i, size in enumerate(shape) if axes[i] is None and size % layout.fsdp == 0 and size]
        if free:
            axes[max(free, key=lambda i: shape[i])] = "fsdp"
    return PartitionSpec(*axes)


def batch_specification(name: str, ndim: int, ring: bool) -> PartitionSpec:
    """Rows over data and fsdp together, with a ring columns over context; positions (T,) belong to every row."""
    rows = () if name == "positions" and ndim == 1 else (place.ROWS,)
    return PartitionSpec(*rows, *(("context",) if ring and name in RINGED else ()))


def put(x: Any, sharding: NamedSharding) -> jax.Array:
    """A global array of a host array that every process has, each device getting its part alone."""
    host = to_numpy(x) if isinstance(x, jax.Array) else np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def facts(model: Transformer, train: TrainConfig) -> dict[str, Any]:
    """What all processes must have alike."""
    return {
        "version of attention-conformance": __version__,
        "version of JAX": jax.__version__,
        "version of Flax": flax.__version__,
        "version of Python": platform.python_version(),
        "ModelConfig": model.config.to_dict(),
        "TrainConfig": train.to_dict(),
        "parameters": parameters_digest(to_numpy(p[...]) for p in named_parameters(model).values()),
    }


def said_by_all(own: Any) -> list[Any]:
    """What each process says, something that JSON can say, by its number."""
    if jax.process_count() == 1:
        return [own]
    from jax.experimental import multihost_utils

    text = np.frombuffer(json.dumps(own).encode(), np.uint8)
    longest = int(multihost_utils.process_allgather(np.array(len(text))).max())
    said = multihost_utils.process_allgather(np.pad(text, (0, longest - len(text)), constant_values=ord(" ")))
    return [json.loads(row.tobytes()) for row in np.asarray(said)]


def said_by_first(own: str) -> str:
    """What the first process says."""
    return said_by_all(own)[0]


class ParallelTrainer(Trainer):
    """What `Trainer` is where `config.parallel` asks for several devices. Every process makes it, and every call."""

    def __init__(self, model: Transformer, config: TrainConfig) -> None:
        self.layout = Layout.of(config.parallel)
        self._compared = jax.process_count() == 1
        if not self._compared:
            check_alike(dict(enumerate(said_by_all(facts(model, config)))), jax.process_index())
        hint = ""
        if jax.default_backend() == "cpu" and jax.process_count() == 1:
            hint = f": on a CPU XLA_FLAGS=--xla_force_host_platform_device_count={self.layout.devices} makes them"
        check_layout(self.layout, model.config, config, jax.device_count(), "devices", hint)
        self.mesh = make_mesh(self.layout)
        super().__init__(model, config)

    @property
    def first(self) -> bool:
        """Whether this process speaks and writes for all of them."""
        return jax.process_index() == 0

    def said_by_any(self, flag: bool) -> bool:
        """Whether any process says so; all of them must ask."""
        with self._answered():
            return any(said_by_all(flag))

    def check_same(self, name: str, own: Mapping[str, Any]) -> None:
        """Refuse what the processes do not have alike, with the number of one that differs; all of them must ask."""
        with self._answered():
            said = said_by_all({name: dict(own)})
        check_alike(dict(enumerate(said)), jax.process_index())

    def step(self, batch: dict[str, Any]) -> dict[str, Any]:
        """As on one device, on the same whole batch in every process."""
        if isinstance(batch, Mapping) and hasattr(batch.get("tokens"), "shape"):
            check_parallel_batch(self.layout, self.model.config, batch, self.config.accumulate)
        with place.spread_over(self.mesh, self.model.config.is_causal), self._answered():
            return super().step(batch)

    def evaluate(self, batches: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """As on one device, on the same whole batches in every process."""
        with place.spread_over(self.mesh, self.model.config.is_causal), self._answered():
            return super().evaluate(batches)

    @contextmanager
    def _answered(self) -> Iterator[None]:
        """Say what a broken connection means: a collective's own words name sockets."""
        try:
            yield
        # JAX raises a collective's failure as a ValueError where it comes up while the program is called.
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            text = str(error)
            status = isinstance(error, jax.errors.JaxRuntimeError) or re.match(r"[A-Z_]+: ", text)
            if jax.process_count() == 1 or not status or not any(word in text for word in BROKEN):
                raise
            raise ConnectionError(
                f"process {jax.process_index()} of {jax.process_count()} waited for another one that has gone or did "
                f"not answer, at update {self.updates + 1}: start the run again from its last checkpoint "
                f"({text.splitlines()[0][:200]})"
            ) from error

    def _spread(self, params: dict[str, Any]) -> dict[str, jax.Array]:
        return {name: put(x, self._sharding(name, x.shape)) for name, x in params.items()}

    def _sharding(self, name: str, shape: tuple[int, ...]) -> NamedSharding:
        return NamedSharding(self.mesh, specification(name, shape, self.layout))

    def _fold(self) -> Folding:
        """None: a layer's arrays are spread by its names."""
        return Folding.none(self.model)

    def _compile(self) -> Program:
        shardings = {name: self._sharding(name, p.shape) for name, p in self._params.items()}
        return Program(nnx.split(self.model)[0], self.config, self.model.config.dropout > 0.0, shardings)

    def _arrays(self, batch: dict[str, Any]) -> dict[str, jax.Array]:
        arrays = {name: np.asarray(x) for name, x in batch.items()}
        if not self._compared:
            self.check_same("first batch", batch_digests(arrays))
            self._compared = True
        layout, (rows, length) = self.layout, arrays["tokens"].shape
        if rows % layout.parts:  # an evaluation's last batch, say: whole on every device
            return {name: put(x, NamedSharding(self.mesh, PartitionSpec())) for name, x in arrays.items()}
        ring = place.rings(layout, rows, length, self.model.config.is_causal)
        if ring:
            order = place.columns_of(layout, length, self.model.config.is_causal)
            arrays |= {name: arrays[name][..., order] for name in RINGED if name in arrays}
        specs = {name: batch_specification(name, x.ndim, ring) for name, x in arrays.items()}
        return {name: put(x, NamedSharding(self.mesh, specs[name])) for name, x in arrays.items()}

    def save(self, path: str | os.PathLike[str], *, background: bool = False) -> Path:
        """As on one device, every process writing what its devices hold and no other has.

        All processes see one file system. `background` is taken, and the checkpoint is written at once: it is whole
        when the last process says so.
        """
        with self._answered():
            return self._save(checkpoint_path(path, self.updates), path)

    def _save(self, final: Path, path: str | os.PathLike[str]) -> Path:
        directory = Path(said_by_first(str(open_shards(path, final)) if self.first else ""))
        entry = write_shard(directory, jax.process_index(), self._pieces())
        entries = said_by_all(entry)
        if self.first:
            config = self.config.replace(parallel=None)
            shapes = {name: list(p.shape) for name, p in self._params.items()}
            finish_shards(
                directory, final, step=self.updates, config=self.model.config, train_config=config,
                extra=self._extra(), shards={shard_name(rank): said for rank, said in enumerate(entries)},
                wholes=dict.fromkeys((MODEL_SLOT, *self.state), shapes),
            )  # fmt: skip
        said_by_all("written")
        return final

    def _pieces(self) -> dict[tuple[str, str], list[tuple[tuple[int, ...], np.ndarray]]]:
        """The shards of this process's devices; of copies the first."""
        found = {}
        for slot, arrays in {MODEL_SLOT: self._params, **self.state}.items():
            for name, x in arrays.items():
                pieces = [
                    (tuple(part.start or 0 for part in shard.index), np.asarray(shard.data))
                    for shard in x.addressable_shards
                    if shard.replica_id == 0
                ]
                if pieces:
                    found[slot, name] = pieces
        return found
