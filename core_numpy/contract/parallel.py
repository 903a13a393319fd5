"""How a training step is laid out over devices: `TrainConfig.parallel`, and everything that can be refused in it.

    {"data": 2, "fsdp": 4, "context": 2, "tensor": 2}    sizes of the axes; one that is left out is 1

The devices stand in a row: device number = ((data * F + fsdp) * C + context) * K + tensor, so that those of a tensor
axis, which talk most, are neighbours. The rows of a batch are dealt out over data and fsdp together, each row's
positions over context; parameters and moments are spread over fsdp, heads and hidden features over tensor.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .config import ModelConfig, TrainConfig

# Numbers of a parameter that are compared between processes.
SAMPLE = 4096
# Outermost first.
AXES = ("data", "fsdp", "context", "tensor")


@dataclass(frozen=True)
class Layout:
    """The sizes of the four axes."""

    data: int = 1
    fsdp: int = 1
    context: int = 1
    tensor: int = 1

    @classmethod
    def of(cls, parallel: Mapping[str, int] | None) -> Layout:
        """That of a checked `TrainConfig.parallel`; None is one device."""
        return cls(**(parallel or {}))

    @property
    def sizes(self) -> tuple[int, ...]:
        """In the order of AXES."""
        return self.data, self.fsdp, self.context, self.tensor

    @property
    def devices(self) -> int:
        return self.data * self.fsdp * self.context * self.tensor

    @property
    def parts(self) -> int:
        """Into how many parts the rows of a batch are dealt out."""
        return self.data * self.fsdp

    def place(self, device: int) -> dict[str, int]:
        """Where device number `device` stands on each axis."""
        found = {}
        for axis, size in zip(reversed(AXES), reversed(self.sizes), strict=True):
            device, found[axis] = divmod(device, size)
        return found

    def __str__(self) -> str:
        said = ", ".join(f'"{axis}": {size}' for axis, size in zip(AXES, self.sizes, strict=True) if size > 1)
        return "{" + said + "}"


def parse_parallel(text: str) -> dict[str, int]:
    """ "data=2,fsdp=4" -> {"data": 2, "fsdp": 4}, from a command line; TrainConfig checks axes and sizes."""
    found: dict[str, int] = {}
    for part in text.split(","):
        axis, equals, size = (word.strip() for word in part.partition("="))
        if not equals or not size.isdigit() or axis in found:
            raise ValueError(f"--parallel must be axes and sizes, each axis once, such as data=2,fsdp=4; got {text!r}")
        found[axis] = int(size)
    return found


def check_layout(
    layout: Layout, config: ModelConfig, train: TrainConfig, devices: int, what: str, hint: str = ""
) -> None:
    """A layout of a model over `devices` devices (`what` they are: "processes", "devices"; how to have more)."""
    if layout.devices != devices:
        raise ValueError(
            f"config.parallel must multiply up to the number of {what} ({devices}); {layout} needs {layout.devices}"
            f"{hint}"
        )
    if layout.tensor > 1:
        for name, size in (("heads", config.heads), ("kv_heads", config.groups), ("hidden", config.hidden_size)):
            if size % layout.tensor:
                raise ValueError(
                    f"{name} must be a multiple of the tensor axis ({layout.tensor}), which spreads it; got {size}"
                )
    rows = train.batch // train.accumulate
    if rows % layout.parts:
        raise ValueError(
            f"config.batch / accumulate must be a multiple of data x fsdp ({layout.parts}), which share the rows; got "
            f"{train.batch} / {train.accumulate} = {rows}"
        )
    if layout.context > 1:
        _check_context(config)


def _check_context(config: ModelConfig) -> None:
    if config.kind == "encoder_decoder":
        raise ValueError(
            "config.parallel's context axis must be 1 for an encoder-decoder: cross-attention is not spread over it"
        )
    if config.head == "classifier":
        raise ValueError("config.parallel's context axis must be 1 for a classifier, which pools whole rows")


def check_parallel_batch(layout: Layout, config: ModelConfig, batch: Mapping[str, Any], accumulate: int) -> None:
    """A batch that is dealt out: rows and positions in equal parts."""
    rows, length = batch["tokens"].shape
    if rows % (accumulate * layout.parts):
        raise ValueError(
            f"batch must have a multiple of accumulate x data x fsdp ({accumulate * layout.parts}) rows; got {rows}"
        )
    if layout.context > 1:
        pieces = context_pieces(layout.context, config.is_causal)
        if length % pieces:
            raise ValueError(
                f"tokens must have a length that is a multiple of {pieces}, the pieces that {layout.context} devices "
                f"of the context axis share; got {length}"
            )


def context_pieces(context: int, causal: bool) -> int:
    """Into how many pieces positions are cut: two each where causal, so that early and late ones are paired."""
    return 2 * context if causal else context


def pieces_of(place: int, context: int, causal: bool) -> tuple[int, ...]:
    """The pieces of one device: c and 2 C - 1 - c, whose causal work is the same for every c; or c alone."""
    return (place, 2 * context - 1 - place) if causal else (place,)


def parameters_digest(parameters: Iterable[np.ndarray]) -> str:
    """Of some numbers of each parameter: what tells processes that another seed or checkpoint was begun from."""
    found = 0
    for x in parameters:
        flat = x.reshape(-1)
        found = zlib.crc32(np.ascontiguousarray(flat[:: max(1, flat.size // SAMPLE)]).tobytes(), found)
    return f"of digest {found:08x}"


def batch_digests(batch: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Of each array of a batch: what tells processes that one of them was given another."""
    return {
        name: f"{x.dtype} {x.shape} of digest {zlib.crc32(np.ascontiguousarray(x).tobytes()):08x}"
        for name, x in batch.items()
    }


def started_processes() -> tuple[int, int, str, int]:
    """This process's number, how many there are, and where process 0 is, host and port: as torchrun sets them.

    ValueError names what of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT is lacking or wrong in the environment.
    """
    lacking = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if lacking:
        raise ValueError(
            f"config.parallel needs {', '.join(lacking)} in the environment of each process, as torchrun sets RANK, "
            "WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        )
    said = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    wrong = {name: text for name, text in said.items() if not text.isdecimal()}
    if wrong or int(said["RANK"]) >= int(said["WORLD_SIZE"]):
        raise ValueError(
            f"RANK must be a number below WORLD_SIZE, and MASTER_PORT a number, in the environment of each process; "
            f"got {said}"
        )
    return int(said["RANK"]), int(said["WORLD_SIZE"]), os.environ["MASTER_ADDR"], int(said["MASTER_PORT"])


def check_alike(facts: Mapping[int, Mapping[str, Any]], own: int) -> None:
    """Every process says the same of itself: versions and configurations. facts: rank -> what it says.

    Of two configurations the fields that differ are said.
    """
    mine = facts[own]
    for rank, theirs in sorted(facts.items()):
        for name in [*mine, *(theirs.keys() - mine.keys())]:
            a, b = theirs.get(name), mine.get(name)
            if a == b:
                continue
            if isinstance(a, Mapping) and isinstance(b, Mapping):
                fields = [field for field in [*a, *(b.keys() - a.keys())] if a.get(field) != b.get(field)]
                a, b = ({field: x.get(field) for field in fields} for x in (a, b))
            raise ValueError(
                f"all processes must have the same {name}: process {rank} has {a!r}, process {own} has {b!r}"
            )


def check_present(missing: list[int], count: int, seconds: float) -> None:
    """Every process has come."""
    if missing:
        names = ", ".join(map(str, missing))
        raise TimeoutError(f"process {names} of {count} has not come within {seconds:g} s")
