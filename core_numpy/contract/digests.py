"""Digests of files and tensors: a file is read as it was written, or refused with the name of what differs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .tensor_file import read_tensors


def verified(
    path: Path, name: str, want: Mapping[str, Any], wrote: Mapping[str, str]
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """A checkpoint's file as it was written: its size, its digest, and each tensor's."""
    file = path / name
    if file.is_symlink() or not file.is_file():
        raise ValueError(f"{path} lacks the file {name}")
    if file.stat().st_size != want["size"]:
        raise ValueError(f"{file} is damaged: {file.stat().st_size} bytes where {want['size']} were written")
    sound = sha256_of(file) == want["sha256"]
    # Read also where the file's digest is wrong: the tensors' digests then say which one it is.
    found = read_tensors(file)
    came = digests(found[0])
    wrong = sorted(key for key in came.keys() | wrote.keys() if came.get(key) != wrote.get(key))
    if wrong or not sound:
        raise ValueError(f"{file} is damaged: its SHA-256 is not the one written" + _named(wrong))
    return found


def digests(tensors: Mapping[str, np.ndarray]) -> dict[str, str]:
    flat = {name: np.require(array, requirements="C").reshape(-1) for name, array in tensors.items()}
    return {name: sha256(x.view(np.uint8).data) for name, x in flat.items()}


def sha256(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _named(names: list[str]) -> str:
    return f" ({', '.join(names[:3])}{' and more' if len(names) > 3 else ''})" if names else ""
