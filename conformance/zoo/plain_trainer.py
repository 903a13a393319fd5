"""Training written a second time, in steps that a planted fault can replace one at a time.

`PlainTrainer` is right; a fault is a subclass that overrides one step. Only the gradients of a batch come from the
reference.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np

import core_numpy as core

Arrays = dict[str, np.ndarray]


class PlainTrainer:
    """The part of a trainer that training cases use."""

    def __init__(self, model: Any, config: Any) -> None:
        self.model, self.config, self.t = model, config, 0
        zeros = {name: np.zeros(p.shape) for name, p in core.get_params(model).items()}
        self.m, self.v = dict(zeros), dict(zeros)

    def step(self, batch: Any) -> dict[str, Any]:
        self.t += 1
        loss, counted, grads = self.gradients({name: np.asarray(x) for name, x in batch.items()})
        norm = self.norm(grads)
        report = {"loss": loss, "grad_norm": norm, "lr": self.rate(), "tokens": counted}
        grads = self.clipped(grads, norm)
        params = core.get_params(self.model)
        new = {name: self.updated(name, p.astype(np.float64), grads[name]) for name, p in params.items()}
        core.set_params(self.model, {name: x.astype(params[name].dtype) for name, x in new.items()})
        return report

    # --- the gradients of a step
    def parts(self, batch: Arrays) -> list[Arrays]:
        number = self.config.accumulate
        return [{name: np.split(x, number)[m] for name, x in batch.items()} for m in range(number)]

    def dropout_key(self, part: int) -> Any:
        if not self.model.config.dropout:
            return None
        return core.fold_in(core.fold_in(core.key(self.config.seed), self.t), part)

    def of_part(self, part: Arrays, index: int) -> tuple[float, int, Arrays]:
        """The mean loss of one micro-batch, its counted targets, its gradients in float64."""
        loss, grads = core.loss_and_gradients(
            self.model,
            part,
            dropout_key=self.dropout_key(index),
            label_smoothing=self.config.label_smoothing,
            z_loss=self.config.z_loss,
        )
        return loss, int((part["targets"] != -100).sum()), {n: g.astype(np.float64) for n, g in grads.items()}

    def gradients(self, batch: Arrays) -> tuple[float, int, Arrays]:
        found = [self.of_part(part, index) for index, part in enumerate(self.parts(batch))]
        counted = sum(n for _, n, _ in found)
        shares = self.shares([n for _, n, _ in found])
        loss = sum(share * loss for share, (loss, _, _) in zip(shares, found, strict=True))
        grads = {
            name: sum(share * grads[name] for share, (_, _, grads) in zip(shares, found, strict=True))
            for name in found[0][2]
        }
        return float(loss), counted, {name: np.asarray(g) for name, g in grads.items()}

    def shares(self, counts: list[int]) -> list[float]:
        """What each micro-batch's mean weighs."""
        return [n / max(sum(counts), 1) for n in counts]

    # --- clipping
    def norm(self, grads: Arrays) -> float:
        return math.sqrt(sum(float(np.sum(g * g)) for g in grads.values()))

    def clipped(self, grads: Arrays, norm: float) -> Arrays:
        limit = self.config.clip_norm
        factor = 1.0 if limit is None or norm <= limit else limit / norm
        return {name: g * factor for name, g in grads.items()}

    # --- the update
    def rate(self) -> float:
        return self.rate_of(self.t)

    def rate_of(self, t: int) -> float:
        c = self.config
        if t <= c.warmup:
            return c.lr * t / c.warmup
        if c.schedule == "constant":
            return c.lr
        length = c.steps - c.warmup
        if c.schedule == "wsd":
            length = min(c.steps // 10, length) if c.decay_steps is None else c.decay_steps
            if t <= c.steps - length:
                return c.lr
        if t >= c.steps:
            return c.final_lr
        p = (t - (c.steps - length)) / length
        if c.schedule == "cosine":
            return c.final_lr + (c.lr - c.final_lr) * 0.5 * (1.0 + math.cos(math.pi * p))
        return c.lr + (c.final_lr - c.lr) * p

    def decays(self, p: np.ndarray) -> float:
        return self.config.weight_decay if p.ndim >= 2 else 0.0

    def updated(self, name: str, p: np.ndarray, g: np.ndarray) -> np.ndarray:
        return p - self.rate() * (self.direction(name, p, g) + self.decays(p) * p)

    def direction(self, name: str, p: np.ndarray, g: np.ndarray) -> np.ndarray:
        """The step before the learning rate; keeps the moments, rounded to the parameters' dtype."""
        return {"adamw": self.adamw, "sgd": self.sgd, "lion": self.lion}[self.config.optimizer](name, g)

    def keep(self, slot: Arrays, name: str, value: np.ndarray) -> None:
        slot[name] = value.astype(self.model.dtype).astype(np.float64)

    def averaged(self, mean: np.ndarray, p: np.ndarray) -> np.ndarray:
        d = self.config.ema
        return d * mean + (1.0 - d) * p

    def adamw(self, name: str, g: np.ndarray) -> np.ndarray:
        b1, b2 = self.config.betas
        m, v = b1 * self.m[name] + (1.0 - b1) * g, b2 * self.v[name] + (1.0 - b2) * g * g
        self.keep(self.m, name, m)
        self.keep(self.v, name, v)
        return self.quotient(m, v, 1.0 - b1**self.t, 1.0 - b2**self.t)

    def quotient(self, m: np.ndarray, v: np.ndarray, first: float, second: float) -> np.ndarray:
        """first, second: the corrections of the moments' bias towards 0."""
        return (m / first) / (np.sqrt(v / second) + self.config.eps)

    def sgd(self, name: str, g: np.ndarray) -> np.ndarray:
        m = self.config.betas[0] * self.m[name] + g
        self.keep(self.m, name, m)
        return m

    def lion(self, name: str, g: np.ndarray) -> np.ndarray:
        b1, b2 = self.config.betas
        step = np.sign(b1 * self.m[name] + (1.0 - b1) * g)
        self.keep(self.m, name, b2 * self.m[name] + (1.0 - b2) * g)
        return step


def optimise(kind: type[PlainTrainer]) -> Any:
    """The optimiser of a trainer alone: its clipping, rate and update on given gradients."""

    def run(config: Any, params: Arrays, stream: list[Arrays]) -> list[Arrays]:
        trainer = kind.__new__(kind)
        trainer.config, trainer.t = config, 0
        trainer.model = SimpleNamespace(dtype=config.precision)
        zeros = {name: np.zeros(p.shape) for name, p in params.items()}
        trainer.m, trainer.v = dict(zeros), dict(zeros)
        now, after = dict(params), []
        averages = {} if config.ema is None else {f"average of {name}": p for name, p in params.items()}
        for given in stream:
            trainer.t += 1
            grads = {name: g.astype(np.float64) for name, g in given.items()}
            grads = trainer.clipped(grads, trainer.norm(grads))
            now = {
                name: trainer.updated(name, p.astype(np.float64), grads[name]).astype(p.dtype)
                for name, p in now.items()
            }
            averages = {
                name: trainer.averaged(x.astype(np.float64), now[name.removeprefix("average of ")].astype(np.float64))
                .astype(x.dtype)
                for name, x in averages.items()
            }  # fmt: skip
            after.append(now | averages)
        return after

    return run
