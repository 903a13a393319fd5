"""Scores of one block, and the keys they are made of: what the forward and the backward pass compute alike."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .blocks import Spec, Terms, take
from .visibility import Block, all_of, allowed, kept, living


def accumulation(dtype: jnp.dtype) -> jnp.dtype:
    """float64 for float64, else float32: scores and sums are never narrower."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def product(spec: Spec, formula: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(formula, x, y, precision=spec.precision, preferred_element_type=x.dtype)


def keys_of(spec: Spec, terms: Terms, block: Block, masked: bool, arrays: tuple[jax.Array, ...], acc: jnp.dtype):
    """The block's rows of k and v, zero where no query of the block may attend."""
    found = [take(x, (0, 0, block.j, 0), (block.nb, block.ng, block.width, x.shape[-1])).astype(acc) for x in arrays]
    alive = living(spec, terms, block) if masked else None
    return found if alive is None else [jnp.where(alive[..., None], x, 0) for x in found]


def scores(spec: Spec, terms: Terms, block: Block, s: jax.Array, first, masked: bool):
    """Scores of a block in its layout, -inf where masked, from plain products; and tanh of the soft cap, if any."""
    s, bent = s * spec.scale, None
    if spec.softcap is not None:
        bent = jnp.tanh(s / spec.softcap)
        s = bent * spec.softcap
    if "bias" in terms:
        s = s + block.lay(block.cut(terms["bias"], spec.r)).astype(s.dtype)
    conditions = allowed(spec, terms, block, first) if masked else []
    return (jnp.where(all_of(conditions), s, -jnp.inf) if conditions else s), bent


def dropped(spec: Spec, terms: Terms, block: Block, x: jax.Array) -> jax.Array:
    return x if spec.dropout == 0.0 else thinned(spec, kept(spec, terms, block), x)


def thinned(spec: Spec, choice: jax.Array | None, x: jax.Array) -> jax.Array:
    """x where dropout's choice keeps it, scaled up, and 0 elsewhere; None: there is no dropout."""
    if choice is None:
        return x
    gain = 1.0 / (1.0 - spec.dropout) if spec.dropout < 1.0 else 0.0
    return jnp.where(choice, x * gain, 0)
