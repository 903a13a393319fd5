"""Checkpoints that several processes write at once, each what it holds. `read_checkpoint` reads them as any other.

    FOLDER/step-00000020/shard-00000.safetensors     pieces, named <slot>/<parameter>|<first index on each axis>;
                         shard-00001.safetensors     the slot of the parameters themselves is "model"
                         checkpoint.json             schema 2: as in `checkpoints`, with "shards" and "wholes"

All processes see one file system. The first makes a directory that has no checkpoint's name, every process writes its
file into it, and the first writes the manifest and renames the directory: half a checkpoint never looks like one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
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
    """Write one process's pieces to the disk; gives what the manifest says of the file, and how large pieces are."""
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
    return {"size": len(data), "sha256": sha256(data), "tensors": digests(tensors),
            "numbers": {label: x.size for label, x in tensors.items()}}  # fmt: skip


def lacking(pieces: Iterable[tuple[str, int]], wholes: Mapping[str, Mapping[str, Any]]) -> str | None:
    """What the pieces, labels and how many numbers each has, do not make up of the wholes; None where they do."""
    filled: dict[str, int] = {}
    seen = set()
    for label, size in pieces:
        key, _, corner = label.rpartition("|")
        if label in seen:
            return f"of {key} there are two pieces that begin at {corner}"
        seen.add(label)
        filled[key] = filled.get(key, 0) + size
    for slot, shapes in wholes.items():
        for name, shape in shapes.items():
            want, there = int(np.prod(shape, dtype=np.int64)), filled.get(f"{slot}/{name}", 0)
            if there != want:
                return f"of {slot}/{name} there are {there} numbers, not {want}"
    return None


def read_shards(path: Path, document: Mapping[str, Any]) -> dict[str, dict[str, np.ndarray]]:
    """Slot -> parameter -> array, put together from the pieces of all files, each verified."""
    slots: dict[str, dict[str, np.ndarray]] = {}
    pieces: list[tuple[str, int]] = []
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
            pieces.append((label, piece.size))
    wrong = lacking(pieces, wholes)
    if wrong is not None:
        raise ValueError(f"{path} is damaged: {wrong}")
    return slots


__all__ = ["MODEL_SLOT", "Pieces", "lacking", "open_shards", "read_shards", "shard_name", "write_shard"]
