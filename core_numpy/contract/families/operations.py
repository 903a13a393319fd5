"""How stored tensors become ours, and ours stored ones: a handful of named operations, each in both directions.

A table of a family says for each stored tensor which of these it takes. All of them are permutations of numbers, bit
for bit reversible, except `FOLDED_ROW`, which adds two tables that are always added. Loading gives views where it can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..config import ModelConfig

Shape = tuple[int, ...]
Arrays = Sequence[np.ndarray]
Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Operation:
    """shapes: ours -> stored. load: stored arrays -> number i of ours. save: ours -> stored."""

    name: str
    shapes: Callable[[Sequence[Shape], ModelConfig, Fields], list[Shape]]
    load: Callable[[Arrays, ModelConfig, Sequence[Shape], int], np.ndarray]
    save: Callable[[Arrays, ModelConfig, Fields], list[np.ndarray]]


@dataclass(frozen=True)
class Entry:
    """One line of a family's table: stored names, our names ({i} is the layer), how one becomes the other.

    A line whose own names the configuration does not have is left out (biases, tied heads); `when` names a property
    of the configuration and the value it must have besides.
    """

    stored: tuple[str, ...]
    ours: tuple[str, ...]
    operation: Operation
    when: tuple[str, Any] | None = None


def entry(stored: str, ours: str, operation: Operation, *, when: tuple[str, Any] | None = None) -> Entry:
    """Names are separated by spaces."""
    return Entry(tuple(stored.split()), tuple(ours.split()), operation, when)


def linear(stored: str, ours: str, *, when: tuple[str, Any] | None = None) -> tuple[Entry, ...]:
    """A torch linear layer, weight (out, in), and its bias."""
    return (
        entry(f"{stored}.weight", f"{ours}.weight", TURNED, when=when),
        entry(f"{stored}.bias", f"{ours}.bias", SAME, when=when),
    )


def norm(stored: str, ours: str) -> tuple[Entry, ...]:
    """A norm's weight and bias."""
    return entry(f"{stored}.weight", f"{ours}.weight", SAME), entry(f"{stored}.bias", f"{ours}.bias", SAME)


SAME = Operation(
    "same",
    lambda ours, config, fields: list(ours),
    lambda stored, config, shapes, i: stored[i],
    lambda ours, config, fields: list(ours),
)

# (out, in) of a torch linear layer and (in, out), which is ours.
TURNED = Operation(
    "turned",
    lambda ours, config, fields: [shape[::-1] for shape in ours],
    lambda stored, config, shapes, i: stored[i].T,
    lambda ours, config, fields: [x.T for x in ours],
)


def _columns_load(stored: Arrays, config: ModelConfig, shapes: Sequence[Shape], i: int) -> np.ndarray:
    begin = sum(shape[-1] for shape in shapes[:i])
    return stored[0][..., begin : begin + shapes[i][-1]]


# Query, key and value side by side in the last axis: (in, out_q + out_k + out_v), and their biases likewise.
COLUMNS = Operation(
    "columns",
    lambda ours, config, fields: [(*ours[0][:-1], sum(shape[-1] for shape in ours))],
    _columns_load,
    lambda ours, config, fields: [np.concatenate(ours, axis=-1)],
)


def _heads_load(stored: Arrays, config: ModelConfig, shapes: Sequence[Shape], i: int) -> np.ndarray:
    x = stored[0]
    parts = x.reshape(config.heads, 3, config.key_size, *x.shape[1:])
    return parts[:, i].reshape(-1, *x.shape[1:]).T


def _heads_save(ours: Arrays, config: ModelConfig, fields: Fields) -> list[np.ndarray]:
    parts = [x.T.reshape(config.heads, 1, config.key_size, *x.T.shape[1:]) for x in ours]
    return [np.concatenate(parts, axis=1).reshape(-1, *ours[0].T.shape[1:])]


# Rows head by head, and in each head query, key, value: (heads * 3 * size, in). Cutting it in thirds would mix heads.
BY_HEAD = Operation(
    "by head",
    lambda ours, config, fields: [(sum(shape[-1] for shape in ours), *ours[0][:-1])],
    _heads_load,
    _heads_save,
)


def _folded_load(stored: Arrays, config: ModelConfig, shapes: Sequence[Shape], i: int) -> np.ndarray:
    # In float32 at least: two bfloat16 rows have no exact sum in bfloat16.
    wide = np.result_type(stored[0].dtype, np.float32)
    return stored[0].astype(wide) + stored[1][0].astype(wide)


def _folded_save(ours: Arrays, config: ModelConfig, fields: Fields) -> list[np.ndarray]:
    return [ours[0], np.zeros((fields["type_vocab_size"], config.width), dtype=ours[0].dtype)]


# Positions and token types: row 0 of the types is added to every position, so it goes into their table. Saving writes
# zeros for the types: the sum is the same, the two parts are not told apart again.
FOLDED_ROW = Operation(
    "folded row",
    lambda ours, config, fields: [ours[0], (fields["type_vocab_size"], config.width)],
    _folded_load,
    _folded_save,
)
