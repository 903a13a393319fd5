"""Training on several processes, one device each. What the axes mean: core_numpy.contract.parallel.

Native: `torchrun` starts the processes and `torch.distributed` connects them (gloo on CPUs, NCCL on GPUs). The tensor
axis is DTensor's column- and row-wise plans over heads and hidden features, the fsdp axis is `fully_shard` block by
block. What every process holds of parameters, gradients and moments lies in one flat buffer, as on one device.
Every process is given the whole batch and takes its part.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from core_numpy.contract.checkpoints import checkpoint_path, finish_shards
from core_numpy.contract.config import TrainConfig
from core_numpy.contract.parallel import AXES, batch_digests, check_alike, check_parallel_batch
from core_numpy.contract.shards import MODEL_SLOT, open_shards, shard_name, write_shard

from . import place
from .arrays import to_numpy
from .batches import rows_of
from .block import Block, MultiHeadAttention
from .initial import turn
from .model import Transformer, named, set_params
from .optimizer import Flat, not_finite
from .place import placed
from .processes import TIMEOUT, Group
from .training import Cast, Trainer

# A head's own numbers, used by the process that has the head: elsewhere their gradients are 0 and have to be added.
BY_HEAD = ("sinks", "query_norm.weight", "key_norm.weight", "relative.weight")


def spread(model: Transformer, config: TrainConfig, group: Group) -> None:
    """Spread a model's parameters over the tensor and fsdp axes, in place."""
    if group.layout.tensor > 1:
        _spread_tensor(model, group)
    if group.layout.fsdp > 1:
        _spread_fsdp(model, config, group)


def _spread_tensor(model: Transformer, group: Group) -> None:
    mesh, heads = group.mesh["tensor"], model.config.heads // group.layout.tensor
    first = group.place["tensor"] * heads
    plan = {name: ColwiseParallel() for name in ("query", "key", "value")} | {"output": RowwiseParallel()}
    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            parallelize_module(module, mesh, cast(Any, plan))
            module.here = (first, first + heads)
        elif isinstance(module, Block):
            wide = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            if module.ffn.gate is not None:
                wide["gate"] = ColwiseParallel()
            parallelize_module(module.ffn, mesh, cast(Any, wide))


def _spread_fsdp(model: Transformer, config: TrainConfig, group: Group) -> None:
    half = config.precision in ("bfloat16", "float16")
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, config.precision) if half else None,
        reduce_dtype=torch.float32 if half else None, cast_forward_inputs=False,
    )  # fmt: skip
    options: dict[str, Any] = {"mesh": group.mesh["fsdp"], "mp_policy": policy}
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for block in blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is divided by all counted targets already: gradients are added, not averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum


def local(x: Tensor) -> Tensor:
    """What this process holds of a parameter."""
    x = x.detach()
    return x.to_local() if isinstance(x, DTensor) else x


def whole(x: Tensor) -> Tensor:
    """The whole of a spread tensor, on every process that shares it; all of them must ask for it."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def like(parameter: Tensor, shard: Tensor) -> Tensor:
    """A tensor spread as a parameter is, of which this process holds `shard`."""
    if not isinstance(parameter, DTensor):
        return shard
    return DTensor.from_local(
        shard, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
        stride=parameter.stride(),
    )  # fmt: skip


def first_index(parameter: Tensor) -> tuple[int, ...]:
    """Where in the whole parameter what this process holds begins."""
    if not isinstance(parameter, DTensor):
        return (0,) * parameter.dim()
    _, start = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )  # as torch.distributed.checkpoint does
    return tuple(start)


def spread_over(parameter: Tensor) -> frozenset[str]:
    """The axes over which a parameter is spread."""
    if not isinstance(parameter, DTensor):
        return frozenset()
    names = parameter.device_mesh.mesh_dim_names or ()
    pairs = zip(names, parameter.placements, strict=True)
    # A dimension that tensor and fsdp both cut has a placement of its own, which torch 2.13 calls no `Shard`.
    return frozenset(name for name, placement in pairs if not placement.is_replicate())


class ParallelTrainer(Trainer):
    """What `Trainer` is where `config.parallel` asks for several devices. Every process makes it, and every call."""

    def __init__(self, model: Transformer, config: TrainConfig) -> None:
        self.group = Group(model, config)
        spread(model, config, self.group)
        self._spread = {name: spread_over(p) for name, p in named(model).items()}
        self._compared = False
        super().__init__(model, config)
        if self.group.layout.fsdp > 1:
            self._low = None

    @property
    def first(self) -> bool:
        """Whether this process speaks and writes for all of them."""
        return self.group.rank == 0

    def said_by_any(self, flag: bool) -> bool:
        """Whether any process says so; all of them must ask."""
        said = torch.tensor(float(flag), device=self.group.device)
        with self._answered():
            dist.all_reduce(said, dist.ReduceOp.MAX)
        return bool(said.item())

    def check_same(self, name: str, own: Mapping[str, Any]) -> None:
        """Refuse what the processes do not have alike, with the number of one that differs; all of them must ask."""
        said: list[Any] = [None] * dist.get_world_size()
        with self._answered():
            dist.all_gather_object(said, {name: dict(own)})
        check_alike(dict(enumerate(said)), self.group.rank)

    def step(self, batch: Any) -> dict[str, Any]:
        """As on one device, on the same whole batch in every process."""
        if isinstance(batch, Mapping) and hasattr(batch.get("tokens"), "shape"):
            check_parallel_batch(self.group.layout, self.model.config, batch, self.config.accumulate)
        with self._answered():
            return super().step(batch)

    def evaluate(self, batches: Iterable[Any]) -> dict[str, Any]:
        """As on one device, on the same whole batches in every process."""
        with self._answered():
            return super().evaluate(batches)

    @contextmanager
    def _answered(self) -> Iterator[None]:
        """Say what a broken connection means: a collective's own words name sockets."""
        try:
            yield
        except RuntimeError as error:
            text = str(error)
            if not isinstance(error, dist.DistError) and not any(word in text for word in ("gloo", "NCCL", "c10d")):
                raise
            raise ConnectionError(
                f"process {self.group.rank} of {self.group.layout.devices} waited for another one that has gone or did "
                f"not answer within {TIMEOUT:g} s, at update {self.updates + 1}: start the run again from its last "
                f"checkpoint ({text.splitlines()[0][:200]})"
            ) from error

    def _flatten(self) -> Flat:
        own = named(self.model)
        flat = Flat({name: local(p) for name, p in own.items()})
        for name, view in flat.views(flat.data).items():
            parameter = own[name]
            view.copy_(local(parameter))
            if self.group.layout.fsdp > 1:
                continue  # fully_shard keeps its own memory
            if isinstance(parameter, DTensor):
                owner, _, leaf = name.rpartition(".")
                setattr(self.model.get_submodule(owner), leaf, nn.Parameter(like(parameter, view)))
            else:
                parameter.data = view
        return flat

    def _publish(self) -> None:
        if self.group.layout.fsdp > 1:
            own = named(self.model)
            with torch.no_grad():
                for name, view in self.flat.views(self.flat.data).items():
                    local(own[name]).copy_(view)

    def _gradients(self, arrays: dict[str, np.ndarray], t: int, counted: int) -> Tensor:
        if not self._compared:
            self.check_same("first batch", batch_digests(arrays))
            self._compared = True
        each = len(arrays["tokens"]) // self.config.accumulate // self.group.layout.parts
        # Micro-batch m has the same rows as on one device; of those the part of this process is taken.
        chosen = np.concatenate(
            [
                np.arange(each) + (m * self.group.layout.parts + self.group.row_part) * each
                for m in range(self.config.accumulate)
            ]
        )
        mine = {name: rows_of(name, x, chosen) for name, x in arrays.items()}
        self._length = arrays["tokens"].shape[1]
        if self.group.layout.context > 1:
            columns = self.group.ring(self.model.config, self._length, None, None).positions().numpy()
            mine |= {name: mine[name][..., columns] for name in ("tokens", "targets", "positions") if name in mine}
        self._part = self.group.part(self.model, each)
        with placed(self._part):
            mean = super()._gradients(mine, t, counted)
        for name, view in self.flat.views(self.grads).items():
            if name.endswith(BY_HEAD) and "tensor" not in self._spread[name]:
                self.group.sum(view, "tensor")
        # fully_shard has added up over its own axis.
        over = ("data", "context") if self.group.layout.fsdp > 1 else ("data", "fsdp", "context")
        self.group.sum(self.grads, *over)
        return self.group.sum(mean, "data", "fsdp", "context")

    def _module(self) -> Any:
        target = self._cast()
        return target if place.part() is None or self.group.layout.context == 1 else self._ringed(target)

    def _ringed(self, target: Any) -> Any:
        """A call of the model with whole rows' lengths and segments, of which the positions here are computed."""

        def call(tokens: Tensor, **arguments: Any) -> Tensor:
            lengths, segments = arguments.pop("kv_lengths", None), arguments.pop("segments", None)
            ring = self.group.ring(self.model.config, self._length, lengths, segments)
            place.move(replace(self._part, ring=ring))
            if self.model.config.positions in ("learned", "sinusoidal", "rotary"):
                arguments.setdefault("positions", ring.positions(tokens.device))
            return target(tokens, **arguments)

        return call

    def _cast(self) -> Any:
        if self._low is None:
            return self.model
        with torch.no_grad():
            self._low.copy_(self.flat.data)
        own = named(self.model)
        return Cast(self.model, {name: like(own[name], leaf) for name, leaf in self._leaves.items()})

    def _differentiate(self, loss: Tensor, leaves: Iterable[Tensor]) -> list[Tensor]:
        if self.group.layout.fsdp == 1:
            own = self._leaves if self._low is not None else named(self.model)
            found = torch.autograd.grad(
                loss, [own[name] for name in self.flat.places], allow_unused=True, materialize_grads=True
            )
            return [local(g) for g in found]
        loss.backward()
        own = named(self.model)
        grads = []
        for name, view in self.flat.views(self.grads).items():
            grad = own[name].grad
            grads.append(torch.zeros_like(view) if grad is None else local(grad).to(view.dtype))
            own[name].grad = None
        return grads

    def _as_spread(self, parameter: Tensor, held: Tensor) -> Tensor:
        return like(parameter, held)

    def _norm(self, grads: Tensor) -> Tensor:
        """Of all processes' gradients together; what several of them hold alike counts once."""
        total = grads.new_zeros(())
        for name, view in self.flat.views(grads).items():
            square = torch.linalg.vector_norm(view).square() if view.numel() else grads.new_zeros(())
            total += square if "tensor" in self._spread[name] else square / self.group.layout.tensor
        return self.group.sum(total, "fsdp", "tensor").sqrt()

    def _not_finite(self) -> list[str]:
        said: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(said, list(not_finite(self.flat, self.grads)))
        found = {name for names in said for name in names}
        return [name for name in self.model.names if name in found]  # type: ignore[union-attr]

    def save(self, path: str | os.PathLike[str], *, background: bool = False) -> Path:
        """As on one device, every process writing what it holds and no other one has.

        All processes see one file system. `background` is taken, and the checkpoint is written at once: it is whole
        when the last process says so.
        """
        final = checkpoint_path(path, self.updates)
        made: list[Any] = [str(open_shards(path, final)) if self.first else None]
        with self._answered():
            dist.broadcast_object_list(made, src=0)
            said: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(said, write_shard(Path(made[0]), self.group.rank, self._pieces()))
            if self.first:
                snapshot = self._snapshot({}, {})
                del snapshot["params"], snapshot["state"]
                shapes = {name: list(turn(self.model, name, p).shape) for name, p in named(self.model).items()}
                finish_shards(
                    Path(made[0]), final, **snapshot, shards={shard_name(n): entry for n, entry in enumerate(said)},
                    wholes=dict.fromkeys((MODEL_SLOT, *self.state), shapes),
                )  # fmt: skip
            dist.barrier()
        return final

    def _pieces(self) -> dict[tuple[str, str], list[tuple[tuple[int, ...], np.ndarray]]]:
        """What this process writes: of what several hold alike, the first one's."""
        found: dict[tuple[str, str], list[tuple[tuple[int, ...], np.ndarray]]] = {}
        own = named(self.model)
        for slot, buffer in {MODEL_SLOT: self.flat.data, **self.state}.items():
            for name, view in self.flat.views(buffer).items():
                elsewhere = [axis for axis in AXES if self.group.place[axis] and axis not in self._spread[name]]
                if elsewhere or (not view.numel() and own[name].numel()):
                    continue
                start = first_index(own[name])
                piece = turn(self.model, name, view)
                found[slot, name] = [(start if piece is view else start[::-1], to_numpy(piece))]
        return found

    def _fill(self, slot: str, arrays: Mapping[str, np.ndarray]) -> None:
        # Spread as the parameters are, by what spreads the parameters.
        other = Transformer(self.model.config, dtype=self.model.dtype, device=self.group.device)
        set_params(other, dict(arrays))
        spread(other, self.config, self.group)
        own = named(other)
        for name, view in self.flat.views(self.state[slot]).items():
            view.copy_(local(own[name]))
