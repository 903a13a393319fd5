"""What modules are made of: initial values, linear layers, norms. Rules: core_numpy.block."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from core_numpy.contract.checks.common import require_x64
from core_numpy.contract.checks.model import check_module
from core_numpy.contract.config import BlockConfig
from core_numpy.contract.copies import copied, serves
from core_numpy.contract.parameters import Parameter, name_hash

from . import layers, place, random
from .arrays import find_device, from_numpy

if TYPE_CHECKING:
    from core_numpy.contract.families import Pretrained


class Initial:
    """The initial values of a module's parameters: a table of the contract, a seed, and the module's place in it.

    A module made by another one gets the other's `Initial` in place of its seed, so every parameter is drawn by its
    full canonical name.
    """

    def __init__(self, table: dict[str, Parameter], key: jax.Array, dtype: str, device: Any, prefix: str = ""):
        self._table, self._key, self.dtype, self._device, self._prefix = table, key, dtype, device, prefix

    @classmethod
    def of(
        cls, seed: int | Initial, config: BlockConfig, table: Callable, dtype: str, device: Any, *, model: bool = False
    ) -> Initial:
        """`seed` itself where it is an `Initial`; otherwise check the arguments and start a table."""
        if isinstance(seed, Initial):
            return seed
        check_module(config, seed, dtype, model=model)
        require_x64("dtype", dtype, jax.config.jax_enable_x64)  # type: ignore[attr-defined]
        return cls(table(config), random.key(seed), dtype, find_device(device))

    def at(self, name: str) -> Initial:
        """The initial values of the part called `name`."""
        return Initial(self._table, self._key, self.dtype, self._device, f"{self._prefix}{name}.")

    def has(self, name: str) -> bool:
        return f"{self._prefix}{name}" in self._table

    def parameter(self, name: str) -> nnx.Param:
        """The parameter `name` of this part, drawn by its full name."""
        full = f"{self._prefix}{name}"
        entry = self._table[full]
        if entry.bound is None:
            drawn = np.full(entry.shape, entry.value, np.float32)
        else:
            drawn = _draw(random.fold_in(self._key, name_hash(full)), entry.bound, entry.shape)
        return nnx.Param(from_numpy(drawn, dtype=self.dtype, device=self._device))

    def optional(self, name: str) -> nnx.Param | None:
        """The parameter `name`, or None where the configuration has none."""
        return self.parameter(name) if self.has(name) else None


class Stored(Initial):
    """Values that are read instead of drawn, each when its parameter is made."""

    def __init__(self, table: Any, read: Callable[[str], np.ndarray], dtype: str, device: Any, prefix: str = ""):
        self._table, self._read, self.dtype, self._device, self._prefix = table, read, dtype, device, prefix

    @classmethod
    def of(cls, source: Pretrained, dtype: str, device: Any) -> Stored:  # type: ignore[override]
        """The values of a checked folder."""
        check_module(source.config, 0, dtype, model=True)
        require_x64("dtype", dtype, jax.config.jax_enable_x64)  # type: ignore[attr-defined]
        return cls(source.shapes, source.read, dtype, find_device(device))

    def at(self, name: str) -> Stored:
        return Stored(self._table, self._read, self.dtype, self._device, f"{self._prefix}{name}.")

    def parameter(self, name: str) -> nnx.Param:
        array, dtype = self._read(f"{self._prefix}{name}"), jnp.dtype(self.dtype)
        # At a multiple of 64 bytes JAX takes the file's memory as it is; a copy lets it go.
        if not serves(array, dtype, alignment=64):
            array = copied(array, dtype)
        return nnx.Param(jax.device_put(array, self._device))


def _draw(key: jax.Array, bound: float, shape: tuple[int, ...]) -> np.ndarray:
    """bound * (2 u - 1), float32, in pieces of two lengths: compiling for each shape would take longer than drawing."""
    size = math.prod(shape)
    count = 1 << 16 if size <= 1 << 16 else 1 << 20
    pieces = [
        # The first index of a piece in two words of 32 bits; a piece never crosses from one high word to the next.
        np.asarray(_piece(key, np.float32(bound), np.uint32(first % (1 << 32)), np.uint32(first >> 32), count))
        for first in range(0, size, count)
    ]
    return np.concatenate(pieces)[:size].reshape(shape)


@partial(jax.jit, static_argnames="count")
def _piece(key: jax.Array, bound: jax.Array, low: jax.Array, high: jax.Array, count: int) -> jax.Array:
    return bound * (2.0 * random.uniform_at(key, low + jnp.arange(count, dtype=jnp.uint32), high) - 1.0)


class Linear(nnx.Module):
    """`x @ weight + bias`: weight (in, out), bias (out,) or None."""

    def __init__(self, initial: Initial):
        self.weight = initial.parameter("weight")
        self.bias = initial.optional("bias")

    def __call__(self, x: jax.Array) -> jax.Array:
        y = matmul(x, self.weight[...])
        return y if self.bias is None else y + self.bias[...]


class Norm(nnx.Module):
    """The layer norm or RMS norm that a configuration asks for, over the last axis."""

    def __init__(self, config: BlockConfig, initial: Initial, *, kind: str | None = None):
        self.weight = initial.parameter("weight")
        self.bias = initial.optional("bias")
        self.kind = config.norm if kind is None else kind
        self.eps = config.norm_eps
        self.unit_offset = config.unit_offset

    def __call__(self, x: jax.Array) -> jax.Array:
        weight = self.weight[...]
        if self.kind == "rms":
            return layers.rms_norm(x, weight, eps=self.eps, unit_offset=self.unit_offset)
        if self.unit_offset:
            weight = 1.0 + weight.astype(layers.accumulation(weight.dtype))
        return layers.layer_norm(x, weight, None if self.bias is None else self.bias[...], eps=self.eps)


def matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x (..., in) times weight (in, out). float32 means float32 unless jax.default_matmul_precision says otherwise.

    The leading axes are merged: XLA on a CPU transposes for the gradient of a product of rank 3. Not where positions
    are spread over devices: no sharding says what became of them, and XLA would gather whole rows on each.
    """
    asked = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    exact = asked is None and x.dtype.itemsize >= 4
    spread = x.ndim == 3 and place.ringed(*x.shape[:2])
    merged = x if spread else x.reshape(-1, x.shape[-1])
    y = jnp.matmul(merged, weight, precision=jax.lax.Precision.HIGHEST if exact else None)
    return y.reshape(*x.shape[:-1], weight.shape[-1])


def heads_first(x: jax.Array, heads: int) -> jax.Array:
    """(B, T, heads * D) -> (B, heads, T, D): heads stand next to the batch, where a batched product wants them."""
    B, T, features = x.shape
    return x.reshape(B, T, heads, features // heads).swapaxes(1, 2)


def drop(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Dropout where there is a key: none means that this call does not drop."""
    if key is None:
        return x
    if not place.ringed(*x.shape[:2]):
        return layers.dropout(x, rate, key)
    return layers.drop_where(x, rate, random.uniform_columns(key, x.shape, place.order(x.shape[1])) >= 1.0 - rate)


_ACTIVATIONS: dict[str, Callable] = {
    "gelu": layers.gelu,
    "gelu_tanh": partial(layers.gelu, approximate="tanh"),
    "relu": layers.relu,
    "silu": layers.silu,
    "swiglu": layers.silu,
    "geglu": layers.gelu,
    "geglu_tanh": partial(layers.gelu, approximate="tanh"),
}


def activate(name: str, x: jax.Array) -> jax.Array:
    """The activation of that name; a gated one is applied to the gate."""
    return _ACTIVATIONS[name](x)
