"""What the modules are made of: parameter holders whose attribute paths are the canonical names, and initial values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .contract.checks.model import check_module, check_no_device
from .contract.config import BlockConfig, ModelConfig
from .contract.parameters import Parameter, name_hash
from .contract.tensor_file import numpy_dtype
from .encodings import rotary_frequencies, rotary_tables
from .layers import drop, layer_norm, rms_norm
from .random import fold_in, key, uniform

Values = Mapping[str, np.ndarray]


def wide(x: Any) -> np.ndarray:
    """x in float64, where the modules compute; no copy of what is float64 already."""
    return np.asarray(x, dtype=np.float64)


def initial_values(table: Mapping[str, Parameter], seed: int, dtype: str) -> dict[str, np.ndarray]:
    """The arrays that `contract.parameters` describes: one float32 product, then the dtype.

    modules-1: value = bound * (2 u - 1), u = uniform(fold_in(key(seed), crc32(name)), shape), bound rounded to float32.
    """
    values = {}
    for name, parameter in table.items():
        if parameter.bound is None:
            value = np.full(parameter.shape, parameter.value, dtype=np.float32)
        else:
            u = uniform(fold_in(key(seed), name_hash(name)), parameter.shape)
            value = np.float32(parameter.bound) * (u * np.float32(2) - np.float32(1))
        values[name] = value.astype(numpy_dtype(dtype))
    return values


def below(values: Values, prefix: str) -> dict[str, np.ndarray]:
    """The values whose names start with `prefix` and a dot, by what follows it."""
    return {name.removeprefix(f"{prefix}."): x for name, x in values.items() if name.startswith(f"{prefix}.")}


class Linear:
    """weight (in, out), bias (out,) or None: y = x weight + bias."""

    def __init__(self, values: Values) -> None:
        self.weight = values["weight"]
        self.bias = values.get("bias")

    def run(self, x: np.ndarray) -> np.ndarray:
        # One product of matrices: NumPy would multiply a (B, T, in) array row of the batch by row.
        y = (x.reshape(-1, x.shape[-1]) @ wide(self.weight)).reshape(*x.shape[:-1], self.weight.shape[1])
        if self.bias is not None:
            y += wide(self.bias)
        return y


class Table:
    """weight (rows, width): an embedding."""

    def __init__(self, values: Values) -> None:
        self.weight = values["weight"]


class Norm:
    """A layer or RMS norm with its place in the configuration: kind, eps, unit offset.

    modules-2: with `unit_offset` the weight of a layer norm too stands for 1 + w.
    """

    def __init__(self, values: Values, config: BlockConfig, kind: str | None = None) -> None:
        self.weight = values["weight"]
        self.bias = values.get("bias")
        self.kind = config.norm if kind is None else kind
        self.eps = config.norm_eps
        self.offset = config.unit_offset

    @property
    def gain(self) -> np.ndarray:
        return wide(self.weight) + (1.0 if self.offset else 0.0)

    def run(self, x: np.ndarray) -> np.ndarray:
        if self.kind == "rms":
            return rms_norm(x, self.gain, eps=self.eps)
        return layer_norm(x, self.gain, self.bias, eps=self.eps)


class Module:
    """A plain class whose attribute paths are the canonical names of its parameters."""

    config: Any
    dtype: str
    _names: tuple[str, ...]

    @staticmethod
    def refuse(config: Any, seed: Any, dtype: Any, device: Any, *, model: bool) -> None:
        """Refuse what no module can be made from."""
        check_module(config, seed, dtype, model=model)
        check_no_device(device)

    def parameters(self) -> dict[str, np.ndarray]:
        """Canonical name -> the array itself, in the order of `contract.parameters`."""
        return {name: getattr(*self._place(name)) for name in self._names}

    def assign(self, params: Values) -> None:
        """Put arrays in place, unchecked; they are not copied."""
        for name, x in params.items():
            setattr(*self._place(name), x)

    def _place(self, name: str) -> tuple[Any, str]:
        *path, last = name.split(".")
        owner: Any = self
        for part in path:
            owner = owner[int(part)] if part.isdigit() else getattr(owner, part)
        return owner, last


def own_rotary(
    config: BlockConfig, positions: np.ndarray | None, T: int, past: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """The rotary tables (cos, sin) of a ModelConfig with rotary positions, which default to past, past + 1, ..."""
    if not isinstance(config, ModelConfig) or config.positions != "rotary":
        return None
    frequencies, factor = rotary_frequencies(
        config.rotary_size, base=config.rotary_base, scaling=config.rotary_scaling, length=past + T
    )
    places = np.arange(past, past + T) if positions is None else positions
    return rotary_tables(places, frequencies, attention_factor=factor)


def split_heads(x: np.ndarray, heads: int) -> np.ndarray:
    """(B, T, heads * size) -> (B, heads, T, size)."""
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads).transpose(0, 2, 1, 3)


def merge_heads(x: np.ndarray) -> np.ndarray:
    """(B, heads, T, size) -> (B, T, heads * size)."""
    B, heads, T, size = x.shape
    return x.transpose(0, 2, 1, 3).reshape(B, T, heads * size)


def dropped(x: np.ndarray, rate: float, key: np.ndarray | None) -> np.ndarray:
    """Dropout where there is a key and a rate."""
    return x if key is None or rate == 0.0 else drop(x, rate, key)
