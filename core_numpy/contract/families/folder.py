"""A folder with `config.json` and `*.safetensors`: everything proven consistent before a tensor is looked at.

Tensors come as views into the file, mapped one at a time and let go with the view, so a model is never in memory
twice. Pickles are never opened.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..json_file import read_object
from ..tensor_file import PICKLED, Layout, check_header, numpy_dtype, write_streams, write_whole

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies; dtype is the file's own word."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


def read_fields(folder: Path) -> dict[str, Any]:
    """`config.json` as a dict."""
    if not folder.exists():
        raise FileNotFoundError(
            f"{folder} does not exist: expected a folder with {CONFIG} and *.safetensors; nothing is downloaded"
        )
    path = folder / CONFIG
    if not folder.is_dir() or not path.exists():
        if any(folder.glob("checkpoint.json")) or any(folder.glob("step-*/checkpoint.json")):
            raise FileNotFoundError(f"{folder} is the checkpoint of a trainer, without {CONFIG}: Trainer.load reads it")
        raise FileNotFoundError(f"{folder} has no {CONFIG}: expected a folder with {CONFIG} and *.safetensors")
    return read_object(path)


def read_entries(folder: Path) -> dict[str, Stored]:
    """Name -> place of every tensor of the folder, over all its files."""
    found: dict[str, Stored] = {}
    expected = _index(folder)
    for path in _files(folder, expected):
        for name, stored in _entries(path):
            if name in found:
                raise ValueError(f"{name} is in both {found[name].path.name} and {path.name} of {folder}")
            found[name] = stored
    if expected is not None:
        wrong = [name for name in expected if name not in found or found[name].path.name != expected[name]]
        wrong += [name for name in found if name not in expected]
        if wrong:
            raise ValueError(f"{folder / INDEX} and the files it names do not agree about {_listed(wrong)}")
    return found


def _files(folder: Path, index: dict[str, str] | None) -> list[Path]:
    if index is not None:
        return [folder / name for name in sorted(set(index.values()))]
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    others = sorted(folder.glob("*.safetensors"))
    if len(others) == 1:
        return others
    if others:
        raise ValueError(f"{folder} has {len(others)} *.safetensors files and no {INDEX} that says what each holds")
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLED)
    if pickles:
        raise ValueError(
            f"{folder} has no *.safetensors, only pickled weights ({_listed(pickles)}), and unpickling runs whatever "
            "code the file holds: they are not read; convert them with the program that wrote them"
        )
    raise FileNotFoundError(f"{folder} has no *.safetensors")


def _index(folder: Path) -> dict[str, str] | None:
    path = folder / INDEX
    if not path.exists():
        return None
    places = read_object(path).get("weight_map")
    if not isinstance(places, dict):
        raise ValueError(f"{path} is no index: expected an object weight_map of names to files; got {places!r:.40}")
    names = {name: str(place) for name, place in places.items()}
    # An index must not lead out of its folder.
    odd = [place for place in names.values() if Path(place).name != place or not place.endswith(".safetensors")]
    if odd:
        raise ValueError(f"{path} must name *.safetensors files beside it; got {odd[0]!r}")
    return names


def _entries(path: Path) -> Iterator[tuple[str, Stored]]:
    entries, _ = check_header(path)
    with open(path, "rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
    for name, facts in entries.items():
        yield name, Stored(path, facts["dtype"], tuple(facts["shape"]), start + facts["data_offsets"][0])


def view(stored: Stored) -> np.ndarray:
    """The tensor as it lies in the file, mapped copy-on-write: nobody who writes into it changes the file."""
    name = _DTYPES.get(stored.dtype)
    if name is None:
        raise ValueError(f"{stored.path} has a tensor of dtype {stored.dtype}; expected {', '.join(_DTYPES)}")
    dtype = numpy_dtype(name)
    count = math.prod(stored.shape)
    if count == 0:
        return np.empty(stored.shape, dtype)
    # As np.memmap does; its class would make each slice several times as slow.
    begin = stored.offset - stored.offset % mmap.ALLOCATIONGRANULARITY
    with open(stored.path, "rb") as file:
        size = stored.offset + count * dtype.itemsize - begin
        memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY, offset=begin)
    return np.frombuffer(memory, dtype, count, stored.offset - begin).reshape(stored.shape)


def has_nan(x: np.ndarray) -> bool:
    """Whether any number is NaN, at the speed of reading it."""
    if not x.size:
        return False
    if x.dtype.itemsize == 2:
        # All exponent bits and a bit more: as integers, above infinity. In pieces, because each needs memory.
        limit = 0x7F80 if x.dtype.name == "bfloat16" else 0x7C00
        flat = x.view(np.uint16).reshape(-1)
        return any(int((flat[i : i + (1 << 20)] & 0x7FFF).max()) > limit for i in range(0, flat.size, 1 << 20))
    return bool(np.isnan(np.max(x)))


def write_folder(
    folder: str | os.PathLike[str],
    fields: dict[str, Any],
    layout: Layout,
    arrays: Iterable[np.ndarray],
    max_shard_size: int | str | None,
) -> None:
    """Write the tensors, in one file or in shards with their index, and then the config: whole or not at all.

    layout and arrays are what `tensor_file.write_streams` takes.
    """
    path, limit = Path(folder), _bytes_of(max_shard_size)
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file: expected a folder to write {CONFIG} and {SINGLE} into")
    if (path / INDEX).exists():
        raise ValueError(f"{path} holds {INDEX} of another model, which readers would follow: take an empty folder")
    parts = _shards(layout, limit)
    names = (
        [SINGLE]
        if len(parts) == 1
        else [f"model-{n:05}-of-{len(parts):05}.safetensors" for n in range(1, len(parts) + 1)]
    )
    if len(parts) > 1 and path.is_dir() and (old := sorted(each.name for each in path.glob("*.safetensors"))):
        raise ValueError(
            f"{path} holds {_listed(old)} of another model, which would stay beside the shards: take an empty folder"
        )
    path.mkdir(parents=True, exist_ok=True)
    text = json.dumps(fields, indent=2, sort_keys=True) + "\n"
    files = [(path / name, part) for name, part in zip(names, parts, strict=True)]
    write_streams(files, arrays, metadata={"format": "pt"})
    if len(parts) > 1:
        index = {
            "metadata": {"total_size": sum(_size(entry) for entry in layout)},
            "weight_map": {name: file.name for file, part in files for name, _, _ in part},
        }
        write_whole(path / INDEX, (json.dumps(index, indent=2, sort_keys=True) + "\n").encode())
    write_whole(path / CONFIG, text.encode())


def _shards(layout: Layout, limit: int | None) -> list[Layout]:
    """The layout cut where the next tensor would make a file larger than `limit`; a larger tensor has its own file."""
    parts: list[list[tuple[str, str, tuple[int, ...]]]] = [[]]
    filled = 0
    for entry in layout:
        if limit is not None and parts[-1] and filled + _size(entry) > limit:
            parts.append([])
            filled = 0
        parts[-1].append(entry)
        filled += _size(entry)
    return list(parts)


def _size(entry: tuple[str, str, tuple[int, ...]]) -> int:
    _, dtype, shape = entry
    return math.prod(shape) * (2 if dtype == "bfloat16" else np.dtype(dtype).itemsize)


def _bytes_of(size: int | str | None) -> int | None:
    """A size in bytes: a number, or a text such as "5GB" (10^9) or "200MiB" (2^20)."""
    expected = 'max_shard_size must be None, a number of bytes of at least 1, or a text such as "5GB" or "200MiB"'
    if size is None:
        return None
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise TypeError(f"{expected}; got {size!r}")
    if isinstance(size, str):
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG])(i?)B", size.strip(), re.IGNORECASE)
        if found is None:
            raise ValueError(f"{expected}; got {size!r}")
        size = int(float(found[1]) * (1024 if found[3] else 1000) ** ("KMG".index(found[2].upper()) + 1))
    if size < 1:
        raise ValueError(f"{expected}; got {size!r}")
    return size


def _listed(names: list[str]) -> str:
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
