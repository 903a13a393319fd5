"""Blocks of equal structure kept as one during training: one loop and one update for all of them.

A compiled update has some kernels for each parameter, and most of them are the optimiser's. Where blocks repeat, the
parameters of the repetitions are one array with a leading axis, and so are their moments: the program is as large as
that of one repetition. Outside of the update everybody sees the layers' own arrays.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Self

import jax
import numpy as np
from flax import nnx

from .arrays import place_of
from .model import Stack, Transformer, named_parameters

Arrays = dict[str, jax.Array]

# Of the processor's time, in seconds: with 4 blocks of the race's smallest size an update compiles in 5.4 apart and in
# 6.2 folded, with 12 in 11.3 and 6.1. So fewer stay apart, and their loops are those that XLA fuses across blocks.
LEAST_REPETITIONS = 6


class Folding(NamedTuple):
    """How a model's parameters are put together.

    graph: the module that computes with folded parameters. members: the parameters that each of its own stands for,
    in the order of the layers; the first of them gives it its name. names: all parameters, in the canonical order.
    """

    graph: nnx.GraphDef
    members: dict[str, tuple[str, ...]]
    names: tuple[str, ...]

    @classmethod
    def of(cls, model: Transformer) -> Self:
        """Every stack whose blocks repeat often enough; where both sides of a pair do, as often as each other."""
        names = tuple(named_parameters(model))
        members: dict[str, tuple[str, ...]] = {name: (name,) for name in names}
        copy = nnx.merge(*nnx.split(model))
        for prefix in ("encoder.", "decoder.") if model.config.kind == "encoder_decoder" else ("",):
            _fold(getattr(copy, prefix[:-1]) if prefix else copy, f"{prefix}blocks.", members)
        counts = {len(layers) for layers in members.values()} - {1}
        return cls(nnx.split(copy)[0], members, names) if len(counts) == 1 else cls.none(model)

    @classmethod
    def none(cls, model: Transformer) -> Self:
        """Every parameter by itself."""
        names = tuple(named_parameters(model))
        return cls(nnx.split(model)[0], {name: (name,) for name in names}, names)

    @property
    def folded(self) -> frozenset[str]:
        """The names that stand for several parameters."""
        return frozenset(name for name, layers in self.members.items() if len(layers) > 1)

    def together(self, arrays: Arrays) -> Arrays:
        """The layers' arrays (...) as folded ones (count, ...). On the host: compiling would take longer."""
        return {
            name: arrays[name]
            if len(layers) == 1
            else jax.device_put(np.stack([np.asarray(arrays[layer]) for layer in layers]), place_of(arrays[name]))
            for name, layers in self.members.items()
        }

    def apart(self, arrays: Arrays) -> Arrays:
        """Folded arrays as the layers' own, in the canonical order."""
        folded = self.folded
        found = {name: x for name, x in arrays.items() if name not in folded}
        stacked = {name: arrays[name] for name in folded}
        for i in range(max(len(layers) for layers in self.members.values()) if folded else 0):
            found |= {self.members[name][i]: x for name, x in _layer(stacked, np.int32(i)).items()}
        return {name: found[name] for name in self.names}

    def numbers(self, squares: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """What has one number for each layer, on the host, by the layers' names."""
        return {
            layer: x
            for name, layers in self.members.items()
            for layer, x in zip(layers, np.atleast_1d(squares[name]), strict=True)
        }


def axes_of(names: Iterable[str], folded: frozenset[str]) -> dict[str, int | None]:
    """What `jax.vmap` is told, so that a function of arrays under these names sees those of one layer."""
    return {name: 0 if name in folded else None for name in names}


def _fold(stack: Stack, prefix: str, members: dict[str, tuple[str, ...]]) -> None:
    """Leave one period of the blocks of a stack, and enter what its parameters stand for."""
    blocks = list(stack.blocks)
    own = [named_parameters(block) for block in blocks]
    kinds = [
        (nnx.split(block)[0], [(name, p[...].shape, p[...].dtype) for name, p in found.items()])
        for block, found in zip(blocks, own, strict=True)
    ]
    for period in range(1, len(blocks) // LEAST_REPETITIONS + 1):
        alike = len(blocks) % period == 0 and kinds[period:] == kinds[:-period]
        if alike and all(f"{prefix}{i}.{name}" in members for i, found in enumerate(own) for name in found):
            for i in range(period):
                for name in own[i]:
                    layers = tuple(f"{prefix}{number}.{name}" for number in range(i, len(blocks), period))
                    members[layers[0]] = layers
                    for layer in layers[1:]:
                        del members[layer]
            stack.blocks, stack.folds = nnx.List(blocks[:period]), len(blocks) // period
            return


@jax.jit
def _layer(stacked: Arrays, i: Any) -> Arrays:
    """One layer's arrays; i is traced, so that this is compiled once for all of them."""
    return {name: jax.lax.dynamic_index_in_dim(x, i, keepdims=False) for name, x in stacked.items()}
