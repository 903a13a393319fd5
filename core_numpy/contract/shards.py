"""Checkpoints that several processes write at once, each what it holds. `read_checkpoint` reads them as any other.

    FOLDER/step-00000020/shard-00000.safetensors     pieces, named <slot>/<parameter>|<first index on each axis>;
                         shard-00001.safetensors     the slot of the parameters themselves is "model"
                         checkpoint.json             schema 2: as in `checkpoints`, with "shards" and "wholes"

All processes see one file system. The first makes a directory that has no checkpoint's name, every process writes its
file into it, and the first writes the manifest and renames the directory: half a checkpoint never looks like one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .digests import digests, sha256, verified
from .tensor_file import encode_tensors, temporary_name

# (slot, parameter) -> pieces of it: where each begins in the whole, and the piece.
Pieces = Mapping[tuple[str, str], list[tuple[tuple[int, ...], np.ndarray]]]
MODEL_SLOT = "model"


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def open_shards(folder: str | os.PathLike[str], path: Path) -> Path:
    """The directory into which all processes write what will be `path`; made by the first process alone."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    directory = temporary_name(path)
    directory.mkdir()
    return directory


def write_shard(directory: Path, number: int, pieces: Pieces) -> dict[str, Any]:
    """Write one process's pieces to the disk; gives what the manifest says of the file."""
    tensors = {
        f"{slot}/{name}|{','.join(map(str, start))}": np.ascontiguousarray(piece)
        for (slot, name), found in pieces.items()
        for start, piece in found
    }
    data = encode_tensors("pieces", tensors)
    with open(directory / shard_name(number), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {"size": len(data), "sha256": sha256(data), "tensors": digests(tensors)}


def read_shards(path: Path, document: Mapping[str, Any]) -> dict[str, dict[str, np.ndarray]]:
    """Slot -> parameter -> array, put together from the pieces of all files, each verified."""
    slots: dict[str, dict[str, np.ndarray]] = {}
    filled: dict[tuple[str, str], int] = {}
    wholes = document["wholes"]
    for file, want in sorted(document["shards"].items()):
        tensors, _ = verified(path, file, want, want["tensors"])
        for label, piece in tensors.items():
            key, _, corner = label.rpartition("|")
            slot, name = key.split("/", 1)
            start = tuple(int(number) for number in corner.split(",")) if corner else ()
            whole = slots.setdefault(slot, {}).get(name)
            if whole is None:
                whole = slots[slot][name] = np.empty(tuple(wholes[slot][name]), piece.dtype)
            target = whole[tuple(slice(at, at + size) for at, size in zip(start, piece.shape, strict=True))]
            if target.shape != piece.shape or whole.dtype != piece.dtype:
                raise ValueError(f"{path / file} is damaged: its piece {label} does not fit into {whole.shape}")
            target[...] = piece
            filled[slot, name] = filled.get((slot, name), 0) + piece.size
    for slot, shapes in wholes.items():
        for name, shape in shapes.items():
            want_size = int(np.prod(shape, dtype=np.int64))
            there = filled.get((slot, name), 0)
            if there != want_size:
                raise ValueError(f"{path} is damaged: of {slot}/{name} there are {there} numbers, not {want_size}")
    return slots


__all__ = ["MODEL_SLOT", "Pieces", "open_shards", "read_shards", "shard_name", "write_shard"]
