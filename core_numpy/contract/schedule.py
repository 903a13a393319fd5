"""Learning rates: one function of the update's number, so that resuming needs nothing but that number."""

from __future__ import annotations

import math

from .checks.common import require_int
from .config import TrainConfig


def learning_rate(config: TrainConfig, t: int) -> float:
    """The learning rate of update t, counted from 1.

        warm-up    lr * t / warmup                                          t <= warmup
        constant   lr
        cosine     final + (lr - final) * (1 + cos(pi * p)) / 2             p = (t - warmup) / (steps - warmup)
        linear     lr + (final - lr) * p
        wsd        lr, then lr + (final - lr) * (t - start) / decay_steps    start = steps - decay_steps

    t is an integer of at least 1. The last update gets `final_lr` exactly (cosine, linear, wsd), as does every one
    after it. `decay_steps=None` is a tenth of the steps, rounded down, and at most what the warm-up leaves.

    Source: cosine, Loshchilov and Hutter 2017; warmup-stable-decay, Hu et al. 2024 (MiniCPM).
    """
    t = require_int("t", t, 1)
    if t <= config.warmup:
        return config.lr * t / config.warmup
    if config.schedule == "constant":
        return config.lr
    start, length = config.warmup, config.steps - config.warmup
    if config.schedule == "wsd":
        length = min(config.steps // 10, length) if config.decay_steps is None else config.decay_steps
        start = config.steps - length
        if t <= start:
            return config.lr
    if t >= config.steps:
        return config.final_lr
    progress = (t - start) / length
    if config.schedule == "cosine":
        return config.final_lr + (config.lr - config.final_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr + (config.final_lr - config.lr) * progress
