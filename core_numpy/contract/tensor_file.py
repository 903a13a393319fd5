"""One safetensors file: checked before it is used, written whole or not at all. Nothing here knows about models.

Format: 8 bytes of header length (little-endian), a JSON header {name: {dtype, shape, data_offsets}}, the data.
The `safetensors` library reads and writes it; the header is checked here first, because a library may let the last
of two equal names win, or meet a wrong size only while it allocates. Pickled files are never read: they run code.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import secrets
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .copies import copied

ITEM_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
              "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1}  # fmt: skip
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8",
          "uint64", "uint32", "uint16", "uint8", "bool")  # fmt: skip
# The library's own limit; an honest header of that size would describe about a million tensors.
HEADER_LIMIT = 100_000_000
# Name, dtype and shape of each tensor, in the order of the data.
Layout = Sequence[tuple[str, str, tuple[int, ...]]]
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


def require_package(name: str) -> Any:
    """Import a package when it is first needed, or say in one sentence how to get it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.split(".")[0].replace("_", "-")
        raise ImportError(f"this needs the package {package}: pip install {package} ({error})") from error


def numpy_dtype(name: str) -> np.dtype:
    """The dtype of that name; NumPy's own have no bfloat16."""
    return np.dtype(require_package("ml_dtypes").bfloat16 if name == "bfloat16" else name)


def refuse_pickle(path: Path) -> None:
    """Refuse a file that is a pickle by its name or its first bytes."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        first = file.read(2)
        # A pickle of protocol 2 or later begins with 0x80, torch's zip of pickles with PK. As the low bytes of a header
        # length these would be possible, so they only count where the suffix is not .safetensors.
        if path.suffix != ".safetensors" and (first[:1] == b"\x80" or first == b"PK"):
            _fail_pickle(path)
    if path.suffix in PICKLED:
        _fail_pickle(path)


def _fail_pickle(path: Path) -> None:
    raise ValueError(
        f"{path} is a pickled file, and unpickling runs whatever code the file holds: it is not read; "
        "convert it to .safetensors with the program that wrote it"
    )


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the name {name!r} appears twice in its header")
        found[name] = value
    return found


def check_header(path: str | os.PathLike[str]) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The entries and the metadata of a safetensors file, everything in them proven consistent with the file's size.

    Raises ValueError naming the file and the reason; FileNotFoundError where there is none.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a directory; expected one .safetensors file")
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    refuse_pickle(path)
    size = path.stat().st_size
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise ValueError(f"it is cut off: {size} bytes, header said to have {length}")
            if length > HEADER_LIMIT:
                raise ValueError(f"its header is said to have {length} bytes, over the limit of {HEADER_LIMIT}")
            header = file.read(length)
        return _parse_header(header, size - 8 - length)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise ValueError(f"{path} is not a sound safetensors file: {error}") from error


def _parse_header(header: bytes, data: int) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    entries = json.loads(header.decode("utf-8"), object_pairs_hook=_no_duplicates)
    if not isinstance(entries, dict):
        raise ValueError("its header is not a JSON object")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError("its __metadata__ is not an object of strings")
    ranges = sorted((*_entry_range(name, entry), name) for name, entry in entries.items())
    end = 0
    for begin, stop, name in ranges:
        if begin != end:
            raise ValueError(f"{name!r} begins at byte {begin}, where {end} was due: data overlap or leave a gap")
        end = stop
    if end != data:
        raise ValueError(f"its tensors take {end} bytes and the file holds {data}: it is cut off or has trailing bytes")
    return entries, metadata


def _entry_range(name: str, entry: Any) -> tuple[int, int]:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name!r} does not have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
        raise ValueError(f"{name!r} has dtype {dtype!r}; known are {', '.join(ITEM_SIZES)}")
    for what, numbers in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(numbers, list) or any(type(n) is not int or n < 0 for n in numbers):
            raise ValueError(f"{name!r} has {what} {numbers!r}, expected a list of non-negative integers")
    if len(offsets) != 2 or offsets[1] - offsets[0] != math.prod(shape) * ITEM_SIZES[dtype]:
        raise ValueError(
            f"{name!r} of dtype {dtype} and shape {shape} takes {math.prod(shape) * ITEM_SIZES[dtype]} bytes; "
            f"its data_offsets say {offsets}"
        )
    return offsets[0], offsets[1]


def read_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """All tensors of a file in the order of its data, and its metadata. The arrays are writable copies."""
    entries, metadata = check_header(path)
    if any(entry["dtype"] == "BF16" for entry in entries.values()):
        require_package("ml_dtypes")  # registers bfloat16 with NumPy
    order = sorted(entries, key=lambda name: entries[name]["data_offsets"])
    with require_package("safetensors").safe_open(os.fspath(path), framework="np") as file:
        return {name: file.get_tensor(name) for name in order}, metadata


def encode_tensors(what: str, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a safetensors file; `what` names the argument in a refusal."""
    if not isinstance(tensors, Mapping):
        raise TypeError(f"{what} must be a dict of NumPy arrays; got {type(tensors).__name__}")
    ready = {}
    for name, array in tensors.items():
        if not isinstance(name, str) or name in ("", "__metadata__"):
            raise ValueError(f"{what} must have non-empty names other than __metadata__; got {name!r}")
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{what}[{name!r}] must be a NumPy array; got {type(array).__name__}")
        if array.dtype.name not in DTYPES:
            raise TypeError(f"{what}[{name!r}] must have one of the dtypes {', '.join(DTYPES)}; got {array.dtype}")
        # The library writes the memory as it lies: a transposed view would be stored with its axes mixed up.
        ready[name] = np.require(array, requirements="C")
    text = dict(metadata or {})
    if not all(isinstance(key, str) and isinstance(value, str) for key, value in text.items()):
        raise TypeError(f"metadata must be a dict of strings to strings; got {text!r}")
    return require_package("safetensors.numpy").save(ready, metadata=text or None)


def write_streams(
    files: Sequence[tuple[Path, Layout]], arrays: Iterable[np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Write safetensors files one array at a time, all of them or none; never more than one array in memory.

    Each layout gives name, dtype and shape of the next of `arrays`, in their order; an array that does not fit is a
    ValueError. All files are complete on the disk before the first of them has its name.
    """
    each, temporary = iter(arrays), [temporary_name(path) for path, _ in files]
    try:
        for (path, layout), beside in zip(files, temporary, strict=True):
            _write_pieces(path, beside, _pieces(layout, each, metadata))
        for (path, _), beside in zip(files, temporary, strict=True):
            os.replace(beside, path)
        flush_directory(files[0][0].parent)
    finally:
        for beside in temporary:
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)


def _pieces(layout: Layout, arrays: Iterator[np.ndarray], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    words = dict(zip(DTYPES, ITEM_SIZES, strict=True))
    end = 0
    for name, dtype, shape in layout:
        begin, end = end, end + math.prod(shape) * ITEM_SIZES[words[dtype]]
        header[name] = {"dtype": words[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    # The data begin at a multiple of 64, where JAX takes them as they are; the library asks for one of 8.
    text += b" " * (-(8 + len(text)) % 64)
    yield len(text).to_bytes(8, "little") + text
    for name, dtype, shape in layout:
        array = next(arrays)
        if array.dtype.name != dtype or array.shape != tuple(shape):
            raise ValueError(f"{name} must be {dtype} {tuple(shape)}; got {array.dtype.name} {array.shape}")
        whole = array if array.flags.c_contiguous else copied(array, array.dtype)
        yield whole.reshape(-1).view(np.uint8).data


def temporary_name(path: Path) -> Path:
    """A name beside `path` that says which process of which machine writes it."""
    host = "".join(c for c in socket.gethostname() if c.isalnum() or c in "_-") or "host"
    return path.with_name(f".{path.name}.{host}.{os.getpid()}.{secrets.token_hex(4)}.tmp")


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file so that a crash or a full disk leaves the old one or the new one, never a part.

    A temporary file beside it, flushed to the disk, renamed over it, and the directory flushed.
    """
    _write(Path(path), (data,))


def _write(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    temporary = temporary_name(path)
    try:
        _write_pieces(path, temporary, pieces)
        try:
            os.replace(temporary, path)
            flush_directory(path.parent)
        except OSError as error:
            raise OSError(error.errno, f"cannot write {path}: {error.strerror}") from error
    finally:
        # Gone after the rename; still there where something was raised.
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _write_pieces(path: Path, temporary: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write what is to be `path` under another name, and wait until it is on the disk."""
    try:
        with open(temporary, "wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, f"cannot write {path}: {error.strerror}") from error


def flush_directory(path: Path) -> None:
    """Make a rename inside `path` durable. Windows has no such call, and its rename needs none."""
    if os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
