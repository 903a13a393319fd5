"""The processes of a run: how they find one another, what they must have alike, and their mesh."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from core_numpy.contract import __version__
from core_numpy.contract.config import ModelConfig, TrainConfig
from core_numpy.contract.parallel import (
    AXES,
    SAMPLE,
    Layout,
    check_alike,
    check_layout,
    check_present,
    parameters_digest,
    started_processes,
)

from .arrays import to_numpy
from .model import Transformer, named
from .place import Part
from .ring import Ring

# A process that has not come, or not answered, for so long is missing. The slowest honest one imports torch.
TIMEOUT = 60.0


class Group:
    """The processes of a run and their mesh; `part` and `reduce` are all that the trainer asks of it."""

    def __init__(self, model: Transformer, config: TrainConfig) -> None:
        self.layout, self.device = Layout.of(config.parallel), next(model.parameters()).device
        connect(facts(model, config), self.device)
        check_layout(self.layout, model.config, config, dist.get_world_size(), "processes")
        self.rank = dist.get_rank()
        self.mesh = init_device_mesh(self.device.type, self.layout.sizes, mesh_dim_names=AXES)
        self.place = self.layout.place(self.rank)

    @property
    def row_part(self) -> int:
        """Which part of a micro-batch's rows is here."""
        return self.place["data"] * self.layout.fsdp + self.place["fsdp"]

    def sum(self, x: Tensor, *axes: str) -> Tensor:
        """x, summed in place over the processes of some axes."""
        for axis in axes:
            if getattr(self.layout, axis) > 1:
                dist.all_reduce(x, group=self.mesh[axis].get_group())
        return x

    def ring(self, config: ModelConfig, length: int, lengths: Tensor | None, segments: Tensor | None) -> Ring:
        """The processes that share the positions of the rows here."""
        return Ring(
            self.mesh["context"].get_group(), self.place["context"], self.layout.context, length, config.is_causal,
            lengths, segments,
        )  # fmt: skip

    def part(self, model: Transformer, rows: int) -> Part:
        """What of a micro-batch is computed here, `rows` rows being here."""
        config, tensor = model.config, self.layout.tensor
        here = config.heads // tensor
        return Part(
            first_row=self.row_part * rows, head=self.place["tensor"] * here,
            heads=config.heads if tensor > 1 else None,
        )  # fmt: skip


def facts(model: Transformer, config: TrainConfig) -> dict[str, Any]:
    """What all processes must have alike."""
    return {
        "version of attention-conformance": __version__,
        "version of torch": str(torch.__version__),
        "version of Python": platform.python_version(),
        "ModelConfig": model.config.to_dict(),
        "TrainConfig": config.to_dict(),
        "device": next(model.parameters()).device.type,
        "parameters": parameters_digest(_few(p) for p in named(model).values() if not hasattr(p, "full_tensor")),
    }


def _few(p: Tensor) -> np.ndarray:
    """Some numbers of a parameter, or of as much of it as is looked at: no more than these leave its device."""
    flat = p.detach().reshape(-1)
    return to_numpy(flat[:: max(1, flat.numel() // SAMPLE)])


def connect(own: Mapping[str, Any], device: torch.device, timeout: float = TIMEOUT) -> None:
    """Join the processes that torchrun started: wait for each, compare what they say of themselves, connect.

    A group that is there already is used; its processes are compared as well.
    """
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise ValueError(
                "config.parallel needs the processes that torchrun starts: torchrun --nproc-per-node N script.py"
            )
        rank, count, host, port = started_processes()
        store = _store(host, port, rank, count, timeout)
        _compare(dist.PrefixStore("facts", store), own, rank, count, timeout)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=count,
            timeout=timedelta(seconds=timeout),
        )  # fmt: skip
        return
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, json.dumps(own))
    check_alike({rank: json.loads(text) for rank, text in enumerate(said)}, dist.get_rank())


def _store(host: str, port: int, rank: int, count: int, timeout: float) -> Any:
    """Where processes leave word for one another. torch's own rendezvous waits here, and cannot say for whom."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun keeps the store
    try:
        store = dist.TCPStore(
            host, port, count, rank == 0 and not agent, timedelta(seconds=timeout), wait_for_workers=False,
            multi_tenant=True,
        )  # fmt: skip
    except dist.DistError:
        check_present([0], count, timeout)
        raise
    # After a restart by torchrun nobody may read what an earlier attempt said.
    return dist.PrefixStore(f"attention-conformance/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def _compare(store: Any, own: Mapping[str, Any], rank: int, count: int, timeout: float) -> None:
    store.set(f"{rank}", json.dumps(own))
    missing: list[int] = []
    for other in range(count):
        try:
            store.wait([f"{other}"], timedelta(seconds=0.5 if missing else timeout))
        except RuntimeError:
            missing.append(other)
    check_present(missing, count, timeout)
    check_alike({other: json.loads(store.get(f"{other}")) for other in range(count)}, rank)
