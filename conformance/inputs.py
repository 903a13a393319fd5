"""From a row's description of an input to an array: shape and seed, or a literal.

An input is a number, a string, or a table with one of
    {shape, distribution, scale}    floats; the run's dtype. `holes`: the share of them that is -inf
    {shape, density}                booleans, True with this probability. `dead`: every so manieth row is all False
    {shape, low, high}              integers from low to high - 1
    {shape, segments}               ids 0, 1, ... of so many parts of the last axis. `padding`: so many -1 at its end
    {values, dtype}                 a literal; dtype "run" (the default for floats), "bool" or an integer type.
                                    `reshape`: its shape. `repeat`: its rows so many times, one after the other
    {key}                           a random key made from a seed
    {tree}                          a list of inputs, for functions that take sequences
The seed of each array is the CRC-32 of the case's id and the input's name: adding a case changes no other.
"""

from __future__ import annotations

import zlib
from typing import Any

import ml_dtypes
import numpy as np

DTYPES: dict[str, np.dtype] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}


class Key:
    """A random key, made by each target's own `key(seed)`."""

    def __init__(self, seed: int) -> None:
        self.seed = seed


def generator(case_id: str, name: str) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(zlib.crc32(f"{case_id}/{name}".encode())))


def build(case_id: str, name: str, spec: Any) -> Any:
    """Floats come as float64, not yet rounded to the run's dtype."""
    if not isinstance(spec, dict):
        return spec
    if "key" in spec:
        return Key(spec["key"])
    if "tree" in spec:
        return [build(case_id, f"{name}.{i}", item) for i, item in enumerate(spec["tree"])]
    if "values" in spec:
        return _literal(spec)
    draw = generator(case_id, name)
    shape = tuple(spec["shape"])
    if "density" in spec:
        return _booleans(draw, shape, spec["density"], spec.get("dead"))
    if "high" in spec:
        return draw.integers(spec.get("low", 0), spec["high"], shape, dtype=np.int32)
    if "segments" in spec:
        return _segments(shape, spec["segments"], spec.get("padding", 0))
    values = np.asarray(_floats(draw, shape, spec.get("distribution", "normal"), spec.get("scale", 1.0)))
    return np.where(draw.random(shape) < spec["holes"], -np.inf, values) if "holes" in spec else values


def _booleans(draw: np.random.Generator, shape: tuple[int, ...], density: float, dead: int | None) -> np.ndarray:
    values = draw.random(shape) < density
    if dead is not None:
        values[..., ::dead, :] = False
    return values


def _segments(shape: tuple[int, ...], segments: int, padding: int) -> np.ndarray:
    length = shape[-1]
    ids = np.arange(length) * segments // max(length, 1)
    ids[length - min(padding, length) :] = -1
    return np.broadcast_to(ids.astype(np.int32), shape).copy()


def _literal(spec: dict[str, Any]) -> np.ndarray:
    dtype = spec.get("dtype", "run")
    values = np.array(_special(spec["values"]), dtype=np.float64 if dtype == "run" else dtype)
    values = values.reshape(spec["reshape"]) if "reshape" in spec else values
    return np.concatenate([values] * spec["repeat"], axis=-2) if "repeat" in spec else values


def _special(values: Any) -> Any:
    """TOML writes nan and inf itself; JSON cannot, so both spellings are read."""
    if isinstance(values, list):
        return [_special(item) for item in values]
    return {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}.get(values, values) if isinstance(values, str) else values


def _floats(draw: np.random.Generator, shape: tuple[int, ...], distribution: str, scale: float) -> np.ndarray:
    normal = draw.standard_normal(shape)
    if distribution == "normal":
        return scale * normal
    if distribution == "positive":
        return scale * (0.5 + draw.random(shape))
    if distribution == "shifted":  # a mean far from 0: one-pass variances cancel
        return 100.0 + scale * normal
    if distribution == "unit":  # as cosines and sines are
        return scale * draw.uniform(-1, 1, shape)
    if distribution == "wide":  # magnitudes over six decades
        return scale * normal * 10.0 ** draw.uniform(-3, 3, shape)
    if distribution == "ties":
        return scale * np.round(normal)
    if distribution == "zeros":
        return np.zeros(shape)
    if distribution == "zero_rows":  # every second row
        return scale * normal * (np.arange(shape[-2]) % 2)[:, None]
    if distribution == "negative":
        return -scale * (0.5 + draw.random(shape))
    if distribution == "dominant":  # the first row of the second last axis is much larger
        weight = np.ones(shape)
        weight[..., :1, :] = 8.0
        return scale * normal * weight
    raise ValueError(f"unknown distribution {distribution!r}")


def rounded(x: Any, dtype: str) -> Any:
    """Float arrays rounded to the run's dtype; everything else as it is."""
    if isinstance(x, list):
        return [rounded(item, dtype) for item in x]
    if isinstance(x, np.ndarray) and x.dtype == np.float64:
        with np.errstate(over="ignore", under="ignore"):
            return x.astype(DTYPES[dtype])
    return x


def widened(x: Any) -> Any:
    """Back to float64, exactly: what the oracle is given."""
    if isinstance(x, list):
        return [widened(item) for item in x]
    if isinstance(x, np.ndarray) and x.dtype in DTYPES.values():
        return x.astype(np.float64)
    return x
