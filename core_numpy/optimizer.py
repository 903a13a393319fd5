"""Optimisers, clipping and averaging: one update of the parameters from their gradients.

Everything is computed in float64 and rounded once to the dtype in which it is kept. Nothing is changed in place.

optimizer-1: adamw, update t from 1:
    m = b1 m + (1 - b1) g,   v = b2 v + (1 - b2) g^2
    p = p - lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay p)
eps stands outside the root, after the correction; the decay is taken from the old p and enters no moment.
optimizer-2: sgd: m = b1 m + g,   p = p - lr (m + decay p).
optimizer-3: lion: p = p - lr (sign(b1 m + (1 - b1) g) + decay p),   then m = b2 m + (1 - b2) g.
optimizer-4: the decay acts on parameters of two or more axes alone: not on biases, norms and sinks.
optimizer-5: the norm is the root of the sum of squares over all gradients jointly; where it is above clip_norm, and
only there, every gradient is multiplied by clip_norm / norm, with no eps.
optimizer-6: the average starts as the parameters and becomes d ema + (1 - d) p after each update.

Sources: AdamW, Loshchilov and Hutter 2019; Lion, Chen et al. 2023.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from .contract.config import TrainConfig
from .rounding import rounded

Arrays = dict[str, np.ndarray]
SLOTS = {"adamw": ("moment1", "moment2"), "sgd": ("moment1",), "lion": ("moment1",)}


def initial_state(config: TrainConfig, params: Mapping[str, np.ndarray]) -> dict[str, Arrays]:
    """The optimiser's slots before the first update: zeros like the parameters, and the average where asked for."""
    state = {slot: {name: np.zeros_like(p) for name, p in params.items()} for slot in SLOTS[config.optimizer]}
    if config.ema is not None:
        state["ema"] = {name: p.copy() for name, p in params.items()}
    return state


def global_norm(grads: Mapping[str, np.ndarray]) -> float:
    """The root of the sum of squares over all gradients. Rules: optimizer-5."""
    return math.sqrt(sum(float(np.sum(np.square(g, dtype=np.float64))) for g in grads.values()))


def clip(grads: Mapping[str, np.ndarray], norm: float, clip_norm: float | None) -> Arrays:
    """The gradients, scaled down to `clip_norm` where their norm is above it. Rules: optimizer-5."""
    if clip_norm is None or not norm > clip_norm:
        return dict(grads)
    return {name: g * (clip_norm / norm) for name, g in grads.items()}


def update(
    config: TrainConfig,
    params: Mapping[str, np.ndarray],
    grads: Mapping[str, np.ndarray],
    state: Mapping[str, Arrays],
    *,
    t: int,
    lr: float,
) -> tuple[Arrays, dict[str, Arrays]]:
    """Parameters and state after update t. Rules: optimizer-1 to optimizer-4, optimizer-6."""
    new: Arrays = {}
    after: dict[str, Arrays] = {slot: {} for slot in state}
    for name, p in params.items():
        old, g = np.asarray(p, dtype=np.float64), np.asarray(grads[name], dtype=np.float64)
        moments = {slot: np.asarray(state[slot][name], dtype=np.float64) for slot in SLOTS[config.optimizer]}
        step, moments = _step(config, g, moments, t)
        decay = config.weight_decay if p.ndim >= 2 else 0.0
        new[name] = rounded(old - lr * (step + decay * old), p.dtype)
        for slot, moment in moments.items():
            after[slot][name] = rounded(moment, p.dtype)
        if config.ema is not None:
            average, kept = (np.asarray(x, dtype=np.float64) for x in (state["ema"][name], new[name]))
            after["ema"][name] = rounded(config.ema * average + (1.0 - config.ema) * kept, p.dtype)
    return new, after


def _step(config: TrainConfig, g: np.ndarray, moments: Arrays, t: int) -> tuple[np.ndarray, Arrays]:
    """The direction that is multiplied by the learning rate, and the moments after it."""
    b1, b2 = config.betas
    m = moments["moment1"]
    if config.optimizer == "adamw":
        m = b1 * m + (1.0 - b1) * g
        v = b2 * moments["moment2"] + (1.0 - b2) * g * g
        step = (m / (1.0 - b1**t)) / (np.sqrt(v / (1.0 - b2**t)) + config.eps)
        return step, {"moment1": m, "moment2": v}
    if config.optimizer == "lion":
        return np.sign(b1 * m + (1.0 - b1) * g), {"moment1": b2 * m + (1.0 - b2) * g}
    m = b1 * m + g
    return m, {"moment1": m}
