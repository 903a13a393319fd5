"""Parameters in safetensors files. Checkpoint folders are in `checkpoints`.

One format for all backends: canonical names, canonical shapes (a linear weight is (in, out)), bits as they are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from .config import ModelConfig
from .tensor_file import PICKLED, check_header, encode_tensors, read_tensors, write_whole

__all__ = ["load_config", "load_metadata", "load_params", "save_params"]


def save_params(
    path: str | os.PathLike[str],
    params: Mapping[str, np.ndarray],
    config: ModelConfig | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write parameters to one .safetensors file, whole or not at all, every bit as it is (bfloat16 too).

    `config` goes into the file's metadata, where `load_config` finds it; `metadata` are further strings.
    Refused: what is no NumPy array, a dtype that safetensors lacks, a name of a pickled format.
    """
    path = Path(path)
    if path.suffix in PICKLED:
        raise ValueError(f"path must end in .safetensors, {path.suffix} belongs to pickled files; got {path}")
    text = {} if metadata is None else dict(metadata)
    if config is not None:
        if "config" in text:
            raise ValueError("metadata must not have the key 'config': the argument config is stored there")
        if not isinstance(config, ModelConfig):
            raise TypeError(f"config must be a ModelConfig or None; got {type(config).__name__}")
        text["config"] = json.dumps(config.to_dict(), sort_keys=True)
    write_whole(path, encode_tensors("params", params, text))


def load_params(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Read what `save_params` wrote, or any other .safetensors file: name -> array, bits as they are.

    The header is checked against the file's size before anything is allocated. Refused with one ValueError that names
    the file and the reason: truncated, trailing bytes, overlapping data, a name twice, an unknown dtype, a pickle.
    """
    return read_tensors(path)[0]


def load_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """The strings stored beside the tensors, without reading the tensors."""
    return check_header(path)[1]


def load_config(path: str | os.PathLike[str]) -> ModelConfig | None:
    """The configuration stored by `save_params`, or None where the file has none."""
    text = load_metadata(path).get("config")
    if text is None:
        return None
    try:
        return ModelConfig.from_dict(json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} has a config in its metadata that is no ModelConfig: {error}") from error
