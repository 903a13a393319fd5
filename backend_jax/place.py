"""Over which devices the arrays of a trace are spread. Only a trainer on several devices says so.

XLA spreads what nobody speaks of; hints at the inputs of the blocks and at heads keep it at the layout that was meant:
weights are brought to the rows, never rows to the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from core_numpy.contract.parallel import Layout, context_pieces, pieces_of

ROWS = ("data", "fsdp")
# The mesh, and whether rows are cut for a causal model.
_mesh: ContextVar[tuple[Mesh, bool] | None] = ContextVar("mesh", default=None)


@contextmanager
def spread_over(mesh: Mesh, causal: bool) -> Iterator[None]:
    """Inside, traces are for this mesh."""
    token = _mesh.set((mesh, causal))
    try:
        yield
    finally:
        _mesh.reset(token)


# Where one block of attention stands among the whole weights (B, H, T, S), while a ring computes it.
_corner: ContextVar[tuple[Any, ...] | None] = ContextVar("corner", default=None)


@contextmanager
def corner(first: tuple[Any, ...], sizes: tuple[int, int, int]) -> Iterator[None]:
    """Inside, attention is of a block whose first row, head, query and key are `first` (they may be traced).

    sizes: of the heads, queries and keys of the whole.
    """
    token = _corner.set((*first, *sizes))
    try:
        yield
    finally:
        _corner.reset(token)


def placed_key(key: jax.Array) -> jax.Array:
    """A dropout key with the place of this call's weights among the whole ones, which `visibility.kept` reads."""
    found = _corner.get()
    if found is None:
        return key
    return jnp.concatenate([key, jnp.stack([jnp.asarray(word).astype(jnp.uint32) for word in found])])


def ringed(B: int, T: int) -> bool:
    """Whether rows of such a batch have their positions spread over devices."""
    found = _mesh.get()
    return found is not None and rings(Layout(**found[0].shape), B, T, found[1])


def rings(layout: Layout, B: int, T: int, causal: bool) -> bool:
    """An evaluation's batch that does not fall into equal parts is whole on every device."""
    return layout.context > 1 and B % layout.parts == 0 and T % context_pieces(layout.context, causal) == 0


def mesh() -> Mesh | None:
    """The mesh of this trace, or None for one device."""
    found = _mesh.get()
    return None if found is None else found[0]


def order(length: int) -> jax.Array:
    """The positions in the order in which a ring keeps a row's columns: device by device, each its pieces."""
    found = _mesh.get()
    assert found is not None  # the caller has asked `ringed`
    return jnp.asarray(columns_of(Layout(**found[0].shape), length, found[1]))


def columns_of(layout: Layout, length: int, causal: bool) -> np.ndarray:
    """`order` for a layout."""
    size = length // context_pieces(layout.context, causal)
    pieces = [piece for c in range(layout.context) for piece in pieces_of(c, layout.context, causal)]
    return np.concatenate([np.arange(piece * size, (piece + 1) * size, dtype=np.int32) for piece in pieces])


def hidden(x: jax.Array) -> jax.Array:
    """x (B, T, W): rows and positions spread, features whole."""
    return _spread(x, ROWS, "context", None)


def by_head(x: jax.Array) -> jax.Array:
    """x (B, H, T, D): rows, heads and positions spread."""
    return _spread(x, ROWS, "tensor", "context", None)


def _spread(x: jax.Array, *axes: str | tuple[str, ...] | None) -> jax.Array:
    found = mesh()
    if found is None or not divides(x, found, *axes):
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(found, PartitionSpec(*axes)))


def divides(x: jax.Array, over: Mesh, *axes: str | tuple[str, ...] | None) -> bool:
    """Whether x falls into equal parts: an evaluation's last batch may not."""
    for size, names in zip(x.shape, axes, strict=True):
        parts = 1
        for name in () if names is None else (names,) if isinstance(names, str) else names:
            parts *= over.shape[name]
        if size % parts:
            return False
    return True
