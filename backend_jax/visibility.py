"""Which pairs of a block of scores take part: masks, the band, lengths, segments, dropout's choice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from . import random
from .blocks import Spec, Terms, take


@dataclass(frozen=True)
class Block:
    """One block: where it starts in (B, G, T, S), its size, and whether its scores are laid out keys first."""

    b: jax.Array | int
    g: jax.Array | int
    i: jax.Array | int
    j: jax.Array | int
    nb: int
    ng: int
    rows: int
    width: int
    keys_first: bool = False

    def lay(self, x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, -1, 2) if self.keys_first else x

    def cut(self, x: jax.Array, r: int) -> jax.Array:
        return take(x, (self.b, self.g, 0, self.i, self.j), (self.nb, self.ng, r, self.rows, self.width))

    def row(self) -> jax.Array:
        return self.lay(self.i + lax.broadcasted_iota(jnp.int32, (1, 1, 1, self.rows, 1), 3))

    def column(self) -> jax.Array:
        return self.lay(self.j + lax.broadcasted_iota(jnp.int32, (1, 1, 1, 1, self.width), 4))

    def per_batch(self, x: jax.Array) -> jax.Array:
        return take(x.astype(jnp.int32), (self.b,), (self.nb,)).reshape(-1, 1, 1, 1, 1)


def allowed(spec: Spec, terms: Terms, block: Block, first_column: jax.Array | int | None) -> list[jax.Array]:
    """The conditions under which a pair takes part, each broadcastable to the block; `first_column` cuts off
    columns that an earlier chunk has seen."""
    row, column, found = block.row(), block.column(), []
    if spec.band is not None:
        left, right = spec.band
        here = row + block.per_batch(terms["q_offset"]) if "q_offset" in terms else row
        if left is not None:
            found.append(column >= here - left)
        if right is not None:
            found.append(column <= here + right)
    if "kv_lengths" in terms:
        found.append(column < block.per_batch(terms["kv_lengths"]))
    if first_column is not None:
        found.append(column >= first_column)
    return found + pairwise(terms, block, spec.r)


def pairwise(terms: Terms, block: Block, r: int) -> list[jax.Array]:
    """The conditions that are no interval of keys."""
    found = []
    if "q_segments" in terms:
        rows = take(terms["q_segments"], (block.b, block.i), (block.nb, block.rows))
        keys = take(terms["kv_segments"], (block.b, block.j), (block.nb, block.width))
        rows, keys = block.lay(rows[:, None, None, :, None]), block.lay(keys[:, None, None, None, :])
        found += [rows == keys, rows >= 0]
    if "mask" in terms:
        found.append(block.lay(block.cut(terms["mask"], r)))
    if "bias" in terms:
        found.append(block.lay(block.cut(terms["bias"], r)) > -jnp.inf)
    return found


def living(spec: Spec, terms: Terms, block: Block) -> jax.Array | None:
    """(B, G, S) of the block: False where no query of the block may attend to the key (None: all may).

    Such keys and values are replaced by zeros before they are used, because 0 * NaN is NaN.
    """
    column = block.j + jnp.arange(block.width)
    alive = []
    if spec.band is not None:
        left, right = spec.band
        offset = take(terms["q_offset"], (block.b,), (block.nb,))[:, None] if "q_offset" in terms else 0
        if left is not None:
            alive.append(column >= block.i + offset - left)
        if right is not None:
            alive.append(column < block.i + block.rows + offset + right)
    if "kv_lengths" in terms:
        alive.append(column < take(terms["kv_lengths"], (block.b,), (block.nb,))[:, None])
    shaped = [jnp.atleast_2d(x)[:, None, :] for x in alive]
    pairs = pairwise(terms, replace(block, keys_first=False), spec.r)
    if pairs:
        shaped.append(all_of(pairs).any(axis=(2, 3)))
    return all_of(shaped) if shaped else None


def all_of(conditions: list[jax.Array]) -> jax.Array:
    result = conditions[0]
    for condition in conditions[1:]:
        result = result & condition
    return result


def kept(spec: Spec, terms: Terms, block: Block) -> jax.Array:
    """Dropout's choice for the block: uniform(key)[n] < 1 - rate at the row-major index n over (B, H, T, S)."""
    head = (block.g + lax.broadcasted_iota(jnp.int32, (1, block.ng, spec.r, 1, 1), 1)) * spec.r
    head = head + lax.broadcasted_iota(jnp.int32, (1, block.ng, spec.r, 1, 1), 2)
    batch = block.b + lax.broadcasted_iota(jnp.int32, (block.nb, 1, 1, 1, 1), 0)
    key, row, column = terms["dropout_key"], block.row(), block.column()
    heads: Any = spec.G * spec.r
    queries: Any = spec.T
    keys: Any = spec.S
    if key.shape[0] > 2:  # a block of a ring: counted among the weights of the whole
        first_row, first_head, query, first, heads, queries, keys = key[2:]
        batch, head, row, column = (x.astype(jnp.uint32) for x in (batch, head, row, column))
        batch, head, row, column = batch + first_row, head + first_head, row + query, column + first
    line = ((batch * heads + block.lay(head)) * queries).astype(jnp.uint32) + row.astype(jnp.uint32)
    low, high = index_words(line, keys, column.astype(jnp.uint32))
    return random.uniform_at(key[:2], low, high) < 1.0 - spec.dropout


def index_words(line: jax.Array, S: int | jax.Array, column: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The 64-bit number line * S + column as two 32-bit words, without 64-bit integers."""
    half, mask = jnp.uint32(16), jnp.uint32(0xFFFF)
    s = jnp.uint32(S)
    a, b, c, d = line >> half, line & mask, s >> half, s & mask
    bottom, middle = b * d, a * d + ((b * d) >> half)
    carry = (middle & mask) + b * c
    low = (carry << half) | (bottom & mask)
    high = a * c + (middle >> half) + (carry >> half)
    total = low + column
    return total, high + (total < low).astype(jnp.uint32)
