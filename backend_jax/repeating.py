"""A loop over blocks that are alike, compiled once for all of them. Who puts their parameters together: folding.py."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from . import place, random


def run_repeated(
    blocks: Sequence[nnx.Module], count: int, x: jax.Array, arguments: dict[str, Any], *,
    dropout_key: jax.Array | None, remat: bool,
) -> jax.Array:  # fmt: skip
    """Blocks whose parameters have a leading axis of `count` entries: each entry's run in turn, from x (B, T, W).

    dropout_key: layer i gets `fold_in(dropout_key, i)`, as blocks that are apart do. remat: what a block computes is
    computed again for the backward pass.
    """
    parts = [nnx.split(block) for block in blocks]
    period = len(parts)

    def one(graph: nnx.GraphDef, state: Any, x: jax.Array, key: jax.Array | None, given: dict[str, Any]) -> jax.Array:
        return nnx.merge(graph, state).run(x, dropout_key=key, **given)

    def repetition(x: jax.Array, item: tuple[jax.Array, list[Any]]) -> tuple[jax.Array, None]:
        number, states = item
        for i, ((graph, _), state) in enumerate(zip(parts, states, strict=True)):
            key = None if dropout_key is None else random.fold_in(dropout_key, number * period + i)
            run = partial(one, graph)
            # Inside of a loop nothing merges the second computation with the first again.
            x = place.hidden((jax.checkpoint(run, prevent_cse=False) if remat else run)(state, x, key, arguments))
        return x, None

    numbers = jnp.arange(count, dtype=jnp.uint32)
    return jax.lax.scan(repetition, x, (numbers, [state for _, state in parts]))[0]
