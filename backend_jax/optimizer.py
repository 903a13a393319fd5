"""The optimisers' updates as pure functions over canonical names. Rules: core_numpy.optimizer.

Everything here is elementwise and traces; what depends on the update's number alone is computed on the host.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from core_numpy.contract.config import TrainConfig
from core_numpy.contract.schedule import learning_rate

Arrays = dict[str, jax.Array]
Slots = dict[str, Arrays]


def initial_slots(config: TrainConfig, params: Arrays) -> Slots:
    """moment1 for all three, moment2 for adamw, both zero; ema, where asked for, starts as the parameters."""
    names = ["moment1", "moment2"] if config.optimizer == "adamw" else ["moment1"]
    slots: Slots = {name: {key: jnp.zeros_like(p) for key, p in params.items()} for name in names}
    if config.ema is not None:
        slots["ema"] = {key: jnp.copy(p) for key, p in params.items()}
    return slots


def scalars(config: TrainConfig, t: int, dtype: str) -> dict[str, np.ndarray]:
    """Update t's learning rate and bias corrections, arrays so that a compiled step is not compiled again.

    The corrections 1 - beta^t are computed in float64: in float32 a power loses what the subtraction needs.
    """
    beta1, beta2 = config.betas
    numbers = {"lr": learning_rate(config, t), "correction1": 1.0 - beta1**t, "correction2": 1.0 - beta2**t}
    return {name: np.asarray(x, dtype) for name, x in numbers.items()}


def square_sums(grads: Arrays) -> Arrays:
    """The sum of squares of each gradient: their joint root is the norm, and one that is not finite names itself."""
    return {name: jnp.sum(jnp.square(g)) for name, g in grads.items()}


def clip(grads: Arrays, norm: jax.Array, clip_norm: float | None) -> Arrays:
    """Scaled by clip_norm / norm exactly where norm > clip_norm."""
    if clip_norm is None:
        return grads
    scale = jnp.where(norm > clip_norm, clip_norm / norm, 1.0)
    return {name: g * scale for name, g in grads.items()}


def update(
    config: TrainConfig, params: Arrays, grads: Arrays, slots: Slots, numbers: dict[str, jax.Array]
) -> tuple[Arrays, Slots]:
    """New parameters and slots; `numbers` are those of `scalars`."""
    rule = {"adamw": _adamw, "sgd": _sgd, "lion": _lion}[config.optimizer]
    moments = [name for name in slots if name != "ema"]
    fresh: Arrays = {}
    after: Slots = {name: {} for name in slots}
    for key, p in params.items():
        step, kept = rule(config, grads[key], [slots[name][key] for name in moments], numbers)
        # Decay is for matrices: a norm's gain or a bias has no scale that it could be pulled towards.
        if config.weight_decay and p.ndim >= 2:
            step = step + config.weight_decay * p
        fresh[key] = p - numbers["lr"] * step
        for name, moment in zip(moments, kept, strict=True):
            after[name][key] = moment
        if config.ema is not None:
            after["ema"][key] = config.ema * slots["ema"][key] + (1.0 - config.ema) * fresh[key]
    return fresh, after


def _adamw(config: TrainConfig, g: jax.Array, moments: list, numbers: dict) -> tuple[jax.Array, list]:
    """Loshchilov and Hutter 2019: eps after the bias correction, outside the root."""
    beta1, beta2 = config.betas
    m = beta1 * moments[0] + (1.0 - beta1) * g
    v = beta2 * moments[1] + (1.0 - beta2) * jnp.square(g)
    step = (m / numbers["correction1"]) / (jnp.sqrt(v / numbers["correction2"]) + config.eps)
    return step, [m, v]


def _sgd(config: TrainConfig, g: jax.Array, moments: list, numbers: dict) -> tuple[jax.Array, list]:
    m = config.betas[0] * moments[0] + g
    return m, [m]


def _lion(config: TrainConfig, g: jax.Array, moments: list, numbers: dict) -> tuple[jax.Array, list]:
    """Chen et al. 2023."""
    beta1, beta2 = config.betas
    step = jnp.sign(beta1 * moments[0] + (1.0 - beta1) * g)
    return step, [beta2 * moments[0] + (1.0 - beta2) * g]
