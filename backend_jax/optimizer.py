"""Optimisers, clipping and averaging as pure functions over canonical names. Rules: core_numpy.optimizer.

Everything traces: a step compiles one loop for each parameter, and t and lr may be traced, so that a run compiles once.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from core_numpy.contract.config import TrainConfig

Arrays = dict[str, jax.Array]
# Squares of float32 numbers times this add up for any number of parameters; what is lost below weighs nothing beside
# a norm above 1.8e19.
SMALL = 2.0**-80
SLOTS = {"adamw": ("moment1", "moment2"), "sgd": ("moment1",), "lion": ("moment1",)}


def initial_state(config: TrainConfig, params: Arrays) -> dict[str, Arrays]:
    """The optimiser's slots before the first update: zeros like the parameters, and the average where asked for."""
    state = {slot: {name: jnp.zeros_like(p) for name, p in params.items()} for slot in SLOTS[config.optimizer]}
    if config.ema is not None:
        state["ema"] = {name: jnp.copy(p) for name, p in params.items()}
    return state


def global_norm(grads: Arrays) -> jax.Array:
    """The root of the sum of squares over all gradients. Rules: core_numpy.optimizer."""
    norm, unit, _ = norm_of(grads, lambda grads: (square_sums(grads),) * 2)
    return norm / unit


def norm_of(
    grads: Arrays, sums: Callable[[Arrays], tuple[Arrays, Arrays]]
) -> tuple[jax.Array, jax.Array, Arrays]:  # fmt: skip
    """The joint norm of the gradients times a unit, the unit, and each sum of squares: NaN or infinite where a g is.

    The unit is 1, or `SMALL` where squares overflow float32: float32 may not hold the norm itself then. sums: gradients
    -> their sums of squares, those to give back and those that add up to the norm's.
    """
    squares, joint = sums(grads)
    norm = jnp.sqrt(sum(joint.values()))
    one = jnp.ones((), norm.dtype)
    if norm.dtype == jnp.float64:
        return norm, one, squares

    def scaled() -> tuple[jax.Array, jax.Array, Arrays]:
        # XLA would take (g SMALL)² for g² SMALL², which is infinity times 0.
        small = jax.lax.optimization_barrier({name: g * jnp.asarray(SMALL, g.dtype) for name, g in grads.items()})
        squares, joint = sums(small)
        return jnp.sqrt(sum(joint.values())), one * SMALL, squares

    return jax.lax.cond(jnp.isfinite(norm), lambda: (norm, one, squares), scaled)


def square_sums(grads: Arrays) -> Arrays:
    """The sum of squares of each gradient, in float32 at least."""
    wide = {name: g.astype(jnp.promote_types(g.dtype, jnp.float32)) for name, g in grads.items()}
    return {name: jnp.sum(jnp.square(g)) for name, g in wide.items()}


def clip(grads: Arrays, norm: jax.Array, clip_norm: float | None, *, unit: jax.Array | float = 1.0) -> Arrays:
    """The gradients, scaled down to `clip_norm` where their norm is above it, exactly. Rules: core_numpy.optimizer.

    norm: of the gradients times `unit` (`norm_of`).
    """
    if clip_norm is None:
        return grads
    limit = clip_norm * unit
    # In two factors, because XLA makes 0 of what is below 1.2e-38; the quotient must not be 0 / 0.
    first = jnp.where(norm > limit, unit, 1.0)
    second = jnp.where(norm > limit, clip_norm / jnp.maximum(norm, limit), 1.0)
    return {name: (g * first * second).astype(g.dtype) for name, g in grads.items()}


def update(
    config: TrainConfig,
    params: Arrays,
    grads: Arrays,
    state: dict[str, Arrays],
    *,
    t: int | jax.Array,
    lr: float | jax.Array,
) -> tuple[Arrays, dict[str, Arrays]]:
    """Parameters and state after update t. Rules: core_numpy.optimizer."""
    new: Arrays = {}
    after: dict[str, Arrays] = {slot: {} for slot in state}
    for name, p in params.items():
        moments = {slot: state[slot][name] for slot in SLOTS[config.optimizer]}
        step, moments = _step(config, grads[name], moments, t)
        if config.weight_decay and p.ndim >= 2:
            step = step + config.weight_decay * p
        new[name] = p - lr * step
        for slot, moment in moments.items():
            after[slot][name] = moment
        if config.ema is not None:
            after["ema"][name] = config.ema * state["ema"][name] + (1.0 - config.ema) * new[name]
    return new, after


def _step(config: TrainConfig, g: jax.Array, moments: Arrays, t: int | jax.Array) -> tuple[jax.Array, Arrays]:
    """The direction that is multiplied by the learning rate, and the moments after it."""
    b1, b2 = config.betas
    m = moments["moment1"]
    if config.optimizer == "adamw":
        m = b1 * m + (1.0 - b1) * g
        v = b2 * moments["moment2"] + (1.0 - b2) * g * g
        step = (m / _correction(b1, t, g.dtype)) / (jnp.sqrt(v / _correction(b2, t, g.dtype)) + config.eps)
        return step, {"moment1": m, "moment2": v}
    if config.optimizer == "lion":
        return jnp.sign(b1 * m + (1.0 - b1) * g), {"moment1": b2 * m + (1.0 - b2) * g}
    m = b1 * m + g
    return m, {"moment1": m}


def _correction(beta: float, t: int | jax.Array, dtype: jnp.dtype) -> jax.Array:
    """1 - beta^t. In float32 the power of 0.999 leaves five digits of the difference; expm1 keeps all of them."""
    return -jnp.expm1(jnp.asarray(t, dtype) * (math.log(beta) if beta else -math.inf))
