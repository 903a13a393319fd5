"""One call as two files, the same for `command:` targets and for test vectors: a JSON request and its arrays.

The request says which function is called, with which arrays and which other arguments, and what is asked for; the
arrays are safetensors, by argument name. The answer is one safetensors file, by result name. docs/vectors.md describes
both for readers who have only the files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from core_numpy.contract.config import RotaryScaling

from .functions import FUNCTIONS
from .inputs import DTYPES
from .reference import native

SCHEMA = 1
Arrays = dict[str, np.ndarray]


def request(
    function: str, arguments: dict[str, Any], gradients: list[str], cotangents: Mapping[str, np.ndarray]
) -> tuple[dict[str, Any], Arrays]:
    """The JSON request and the arrays. Keys become their two words, a list of arrays `name.0`, `name.1`, ...

    The arrays of a call are named as its arguments; the cotangents of its results `cotangent.<result>`.
    """
    arrays: Arrays = {}
    plain: dict[str, Any] = {}
    inputs: list[str] = []
    for name, value in native(arguments).items():
        if isinstance(value, np.ndarray):
            arrays[name] = value
        elif isinstance(value, list) and value and all(isinstance(item, np.ndarray) for item in value):
            arrays |= {f"{name}.{i}": item for i, item in enumerate(value)}
        else:
            plain[name] = value.to_dict() if isinstance(value, RotaryScaling) else value
            continue
        inputs.append(name)
    if gradients:
        arrays |= {f"cotangent.{name}": x for name, x in cotangents.items()}
    spec = FUNCTIONS[function]
    asked: dict[str, Any] = {
        "schema": SCHEMA,
        "function": function,
        "dtype": run_dtype(arrays),
        "positional": [name for name in spec.positional if name in inputs or name in plain],
        "inputs": inputs,
        "arguments": plain,
        "results": list(spec.results),
        "gradients": list(gradients),
    }
    return asked, arrays


def run_dtype(arrays: Mapping[str, np.ndarray]) -> str:
    """The dtype of the floating arrays; float32 for a call that has none."""
    for array in arrays.values():
        for name, dtype in DTYPES.items():
            if array.dtype == dtype:
                return name
    return "float32"


def encode_json(value: Any) -> bytes:
    """The same bytes for the same value."""
    return (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def answer_names(asked: Mapping[str, Any]) -> list[str]:
    """The arrays that an answer must hold."""
    return [*asked["results"], *(f"gradient.{name}" for name in asked["gradients"])]
