"""Checkpoint folders that each of the three backends writes and reads.

    FOLDER/step-00000020/model.safetensors        parameters, canonical names; the model's config in its metadata
                         optimizer.safetensors    <slot>/<name>: moment1/blocks.0..., moment2/..., ema/...
                         checkpoint.json          schema, step, configs, extra, digests of all of it

Several processes write shards in place of the first two files (`shards`). A checkpoint appears by one rename of a
finished directory, so half a checkpoint never has the name of one. The digests cover every byte: the files' SHA-256,
each tensor's, and one over checkpoint.json itself.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .checked import Checked
from .checks.common import came, require_int
from .config import ModelConfig, TrainConfig
from .digests import digests, sha256, verified
from .json_file import parse_object
from .shards import MODEL_SLOT, lacking, read_shards
from .tensor_file import encode_tensors, flush_directory, temporary_name

# One process wrote it whole, or several in shards.
SCHEMA, SHARDED = 1, 2
MANIFEST, MODEL, OPTIMIZER = "checkpoint.json", "model.safetensors", "optimizer.safetensors"
_NAME = re.compile(r"step-(\d{8,})")
_ASIDE = re.compile(r"\.step-(\d{8,})\..+\.old")
# What a writer that is gone has left: a directory it was filling (.tmp), or the checkpoint that it was about to write
# again, put aside whole (.old), which is the checkpoint of that step until there is another.
_LEFTOVER = re.compile(r"\.(?P<name>step-\d{8,})\.(?P<host>[\w-]+)\.(?P<pid>\d+)\.[0-9a-f]+\.(?P<kind>tmp|old)")


@dataclass(frozen=True)
class Checkpoint:
    """What `read_checkpoint` gives. `state` maps slot -> parameter name -> array; `extra` is what was stored."""

    path: Path
    step: int
    params: dict[str, np.ndarray]
    state: dict[str, dict[str, np.ndarray]]
    config: ModelConfig
    train_config: TrainConfig
    extra: dict[str, Any] = field(default_factory=dict)


def write_checkpoint(
    folder: str | os.PathLike[str],
    *,
    step: int,
    params: Mapping[str, np.ndarray],
    state: Mapping[str, Mapping[str, np.ndarray]],
    config: ModelConfig,
    train_config: TrainConfig,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = 3,
) -> Path:
    """Write `folder/step-<step>` whole or not at all; gives its path. The last `keep` are kept (None: all).

    `step` counts finished updates. `state` holds the optimiser's slots by name; `extra` is anything that JSON can say:
    data position, loss scale, keys, backend and versions. An OSError names the path and leaves older checkpoints.
    """
    step = require_int("step", step, 0)
    if keep is not None:
        keep = require_int("keep", keep, 1)
    if not isinstance(config, ModelConfig) or not isinstance(train_config, TrainConfig):
        raise TypeError(
            "config must be a ModelConfig and train_config a TrainConfig; "
            f"got {type(config).__name__} and {type(train_config).__name__}"
        )
    flat = _flatten_state(state)
    files = {
        MODEL: encode_tensors("params", params, {"config": json.dumps(config.to_dict(), sort_keys=True)}),
        OPTIMIZER: encode_tensors("state", flat),
    }
    document = {
        "schema": SCHEMA,
        "step": step,
        "config": config.to_dict(),
        "train_config": train_config.to_dict(),
        "extra": dict(extra or {}),
        "files": {name: {"size": len(data), "sha256": sha256(data)} for name, data in files.items()},
        "tensors": {MODEL: digests(params), OPTIMIZER: digests(flat)},
    }
    try:
        files[MANIFEST] = _render(document)
    except (TypeError, ValueError) as error:
        raise TypeError(f"extra must hold what JSON can say, finite numbers included; {error}") from error
    folder, path = Path(folder), checkpoint_path(folder, step)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        _write_directory(path, temporary_name(path), files)
    except OSError as error:
        raise OSError(
            error.errno, f"cannot write the checkpoint {path}: {error.strerror}; older checkpoints are untouched"
        ) from error
    _forget(folder, path, keep)
    return path


def finish_shards(
    directory: Path,
    path: Path,
    *,
    step: int,
    shards: Mapping[str, Any],
    wholes: Mapping[str, Mapping[str, Any]],
    config: ModelConfig,
    train_config: TrainConfig,
    extra: Mapping[str, Any],
    keep: int | None = 3,
) -> Path:
    """Make a checkpoint of a directory that all processes have filled (`shards`): its manifest, and its name.

    shards: file -> what `write_shard` gave. wholes: slot -> parameter -> shape. Pieces that do not make up the wholes
    are a ValueError, and nothing that is there already is touched.
    """
    pieces = [piece for said in shards.values() for piece in said["numbers"].items()]
    wrong = lacking(pieces, wholes)
    if wrong is not None:
        shutil.rmtree(directory, ignore_errors=True)
        raise ValueError(f"what the processes wrote is no checkpoint, and {path} is not made: {wrong}")
    shards = {file: {name: x for name, x in said.items() if name != "numbers"} for file, said in shards.items()}
    document = {
        "schema": SHARDED, "step": step, "config": config.to_dict(), "train_config": train_config.to_dict(),
        "extra": dict(extra), "shards": dict(shards), "wholes": {slot: dict(names) for slot, names in wholes.items()},
    }  # fmt: skip
    _write_directory(path, directory, {MANIFEST: _render(document)})
    _remove_leftovers(path.parent)
    _forget(path.parent, path, keep)
    return path


def _forget(folder: Path, path: Path, keep: int | None) -> None:
    """Delete all but the last `keep`, of which `path` is one."""
    if keep is not None:
        others = [other for other in _steps(folder) if other != path]
        for old in others[: max(len(others) + 1 - keep, 0)]:
            shutil.rmtree(old, ignore_errors=True)


def checkpoint_path(folder: str | os.PathLike[str], step: int) -> Path:
    """The name of a checkpoint: folder/step-00000020 after 20 updates."""
    return Path(folder) / f"step-{step:08d}"


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path:
    """The newest checkpoint in `folder` whose every digest is right; a damaged one is named in a warning.

    `folder` may be a checkpoint itself. Raises ValueError where there is none, FileNotFoundError for no folder.
    """
    return read_checkpoint(folder).path


def read_checkpoint(
    path: str | os.PathLike[str], *, train_config: TrainConfig | None = None, model_config: ModelConfig | None = None
) -> Checkpoint:
    """Read a checkpoint, or the newest sound one of a folder of them, every digest verified before anything is given.

    With `train_config` or `model_config`, another one is refused with the fields that differ, the layout over devices
    aside, which no checkpoint has. Damaged: ValueError with the file.
    """
    if train_config is not None and not isinstance(train_config, TrainConfig):
        raise TypeError(f"train_config must be a TrainConfig or None; got {came(train_config)}")
    if model_config is not None and not isinstance(model_config, ModelConfig):
        raise TypeError(f"model_config must be a ModelConfig or None; got {came(model_config)}")
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: expected a checkpoint or a folder of checkpoints")
    if not path.is_dir():
        raise ValueError(f"{path} is a file: expected a checkpoint folder (it holds {MANIFEST}) or a folder of them")
    if _NAME.fullmatch(path.resolve().name) or (path / MANIFEST).exists():
        found = _read(path)
    else:
        found = _read_newest(path)
    if model_config is not None and model_config != found.config:
        raise ValueError(f"{found.path} is of another model: {_differences(model_config, found.config)}")
    if train_config is not None:
        ours, theirs = (each.replace(parallel=None) for each in (train_config, found.train_config))
        if ours != theirs:
            raise ValueError(f"{found.path} is of another training: {_differences(ours, theirs)}")
    return found


def _read_newest(folder: Path) -> Checkpoint:
    steps = _steps(folder)
    if not steps:
        raise ValueError(f"{folder} holds no checkpoint: expected directories named step-00000000 and so on")
    for path in reversed(steps):
        try:
            return _read(path)
        except ValueError as error:
            warnings.warn(f"passed over a damaged checkpoint: {error}", RuntimeWarning, stacklevel=3)
    raise ValueError(f"{folder} holds {len(steps)} checkpoints and every one is damaged")


def _read(path: Path) -> Checkpoint:
    document = _read_manifest(path)
    try:
        return _read_files(path, document)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path / MANIFEST} does not say what a checkpoint needs: {error}") from error


def _read_files(path: Path, document: dict[str, Any]) -> Checkpoint:
    if document["schema"] == SCHEMA:
        tensors = {
            name: verified(path, name, document["files"][name], document["tensors"][name])[0]
            for name in (MODEL, OPTIMIZER)
        }
        params = tensors[MODEL]
        state: dict[str, dict[str, np.ndarray]] = {}
        for key, array in tensors[OPTIMIZER].items():
            slot, name = key.split("/", 1)
            state.setdefault(slot, {})[name] = array
    else:
        state = read_shards(path, document)
        params = state.pop(MODEL_SLOT)
    return Checkpoint(
        path=path,
        step=document["step"],
        params=params,
        state=state,
        config=ModelConfig.from_dict(document["config"]),
        train_config=TrainConfig.from_dict(document["train_config"]),
        extra=document["extra"],
    )


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    if not file.is_file():
        raise ValueError(f"{path} is no whole checkpoint: it lacks {MANIFEST}")
    raw = file.read_bytes()
    document = parse_object(file, raw)
    schema = document.get("schema")
    if isinstance(schema, int) and schema > SHARDED:
        raise ValueError(f"{file} has schema {schema}, this version reads up to {SHARDED}: a newer version wrote it")
    document.pop("digest", None)
    # Rendered again and compared byte for byte, so a changed space or digit is seen as well.
    if schema not in (SCHEMA, SHARDED) or _render(document) != raw:
        raise ValueError(f"{file} is damaged: its digest is not the one written")
    return document


def _render(document: Mapping[str, Any]) -> bytes:
    """Canonical JSON with a digest over itself."""
    body = json.dumps(document, indent=1, sort_keys=True, allow_nan=False)
    return json.dumps({**document, "digest": sha256(body.encode())}, indent=1, sort_keys=True).encode() + b"\n"


def _write_directory(path: Path, temporary: Path, files: Mapping[str, bytes]) -> None:
    """Put files into a directory of another name, which may be there already, and then give it its own."""
    try:
        temporary.mkdir(exist_ok=True)
        for name, data in files.items():
            with open(temporary / name, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        flush_directory(temporary)
        if path.exists():  # the same step written again: a directory cannot be renamed over a full one
            aside = temporary_name(path).with_suffix(".old")
            os.rename(path, aside)
            try:
                os.rename(temporary, path)
            except OSError:
                os.rename(aside, path)
                raise
            shutil.rmtree(aside, ignore_errors=True)
        else:
            os.rename(temporary, path)
        flush_directory(path.parent)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _remove_leftovers(folder: Path) -> None:
    """Delete what processes of this machine that are gone have left unfinished; what they put aside goes back."""
    host = temporary_name(folder / "x").name.split(".")[2]
    for path in list(folder.iterdir()):
        match = _LEFTOVER.fullmatch(path.name)
        if match and match["host"] == host and not _alive(int(match["pid"])):
            if match["kind"] == "old" and not (folder / match["name"]).exists():
                os.rename(path, folder / match["name"])
            else:
                shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    if os.name == "nt":  # os.kill would send a real signal there
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _steps(folder: Path) -> list[Path]:
    """The checkpoints of a folder by their number; one that was put aside counts where no other has its number."""
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):  # the dot sorts first, so that a checkpoint in place wins
        match = _NAME.fullmatch(path.name) or _ASIDE.fullmatch(path.name)
        if match:
            found[int(match[1])] = path
    return [path for _, path in sorted(found.items())]


def _flatten_state(state: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    flat = {}
    for slot, arrays in state.items():
        if not isinstance(slot, str) or not slot or "/" in slot:
            raise ValueError(f"state must have non-empty slot names without a slash; got {slot!r}")
        for name, array in arrays.items():
            flat[f"{slot}/{name}"] = array
    return flat


def _differences(ours: Checked, theirs: Checked) -> str:
    mine, other = ours.to_dict(), theirs.to_dict()
    return ", ".join(
        f"{name} is {other[name]!r} there and {mine[name]!r} here" for name in mine if mine[name] != other[name]
    )
