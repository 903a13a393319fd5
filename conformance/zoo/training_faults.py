"""Faults of training: the optimiser, clipping, schedules, accumulation, the loss of a batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import core_numpy as core

from .faults import Fault, Row, from_rows
from .plain_trainer import Arrays, PlainTrainer


class EpsInsideRoot(PlainTrainer):
    def quotient(self, m: np.ndarray, v: np.ndarray, first: float, second: float) -> np.ndarray:
        return (m / first) / np.sqrt(v / second + self.config.eps)


class EpsBeforeCorrection(PlainTrainer):
    def quotient(self, m: np.ndarray, v: np.ndarray, first: float, second: float) -> np.ndarray:
        return math.sqrt(second) / first * m / (np.sqrt(v) + self.config.eps)


class EpsIgnored(PlainTrainer):
    def quotient(self, m: np.ndarray, v: np.ndarray, first: float, second: float) -> np.ndarray:
        return (m / first) / (np.sqrt(v / second) + 1e-8)


class NoCorrection(PlainTrainer):
    def quotient(self, m: np.ndarray, v: np.ndarray, first: float, second: float) -> np.ndarray:
        return m / (np.sqrt(v) + self.config.eps)


class CorrectionFromZero(PlainTrainer):
    """The exponent is that of the finished updates."""

    def quotient(self, m: np.ndarray, v: np.ndarray, first: float, second: float) -> np.ndarray:
        b1, b2 = self.config.betas
        t = max(self.t - 1, 1)
        return super().quotient(m, v, 1.0 - b1**t, 1.0 - b2**t)


class BetasSwapped(PlainTrainer):
    def adamw(self, name: str, g: np.ndarray) -> np.ndarray:
        b2, b1 = self.config.betas
        self.m[name], self.v[name] = b1 * self.m[name] + (1.0 - b1) * g, b2 * self.v[name] + (1.0 - b2) * g * g
        return self.quotient(self.m[name], self.v[name], 1.0 - b1**self.t, 1.0 - b2**self.t)


class BetasDefault(PlainTrainer):
    def adamw(self, name: str, g: np.ndarray) -> np.ndarray:
        b1, b2 = 0.9, 0.999
        self.m[name], self.v[name] = b1 * self.m[name] + (1.0 - b1) * g, b2 * self.v[name] + (1.0 - b2) * g * g
        return self.quotient(self.m[name], self.v[name], 1.0 - b1**self.t, 1.0 - b2**self.t)


class DecayCoupled(PlainTrainer):
    def updated(self, name: str, p: np.ndarray, g: np.ndarray) -> np.ndarray:
        return p - self.rate() * self.direction(name, p, g + self.decays(p) * p)


class DecayOnAll(PlainTrainer):
    def decays(self, p: np.ndarray) -> float:
        return self.config.weight_decay


class DecayIgnored(PlainTrainer):
    def decays(self, p: np.ndarray) -> float:
        return 0.0


class DecayWithoutRate(PlainTrainer):
    def updated(self, name: str, p: np.ndarray, g: np.ndarray) -> np.ndarray:
        return p - self.rate() * self.direction(name, p, g) - 0.01 * self.decays(p) * p


class DecayAfterStep(PlainTrainer):
    def updated(self, name: str, p: np.ndarray, g: np.ndarray) -> np.ndarray:
        new = p - self.rate() * self.direction(name, p, g)
        return new - self.rate() * self.decays(p) * new


class ClipEps(PlainTrainer):
    def clipped(self, grads: Arrays, norm: float) -> Arrays:
        limit = self.config.clip_norm
        factor = 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
        return {name: g * factor for name, g in grads.items()}


class ClipPerTensor(PlainTrainer):
    def clipped(self, grads: Arrays, norm: float) -> Arrays:
        limit = self.config.clip_norm
        if limit is None:
            return grads
        return {name: g * min(1.0, limit / max(float(np.sqrt(np.sum(g * g))), 1e-30)) for name, g in grads.items()}


class ClipValues(PlainTrainer):
    def clipped(self, grads: Arrays, norm: float) -> Arrays:
        limit = self.config.clip_norm
        return grads if limit is None else {name: np.clip(g, -limit, limit) for name, g in grads.items()}


class ClipIgnored(PlainTrainer):
    def clipped(self, grads: Arrays, norm: float) -> Arrays:
        return grads


class ClipAlways(PlainTrainer):
    """Gradients below the limit are scaled up to it."""

    def clipped(self, grads: Arrays, norm: float) -> Arrays:
        limit = self.config.clip_norm
        return grads if limit is None else {name: g * (limit / norm) for name, g in grads.items()}


class NormReportedClipped(PlainTrainer):
    def step(self, batch: Any) -> dict[str, Any]:
        report = super().step(batch)
        limit = self.config.clip_norm
        return report if limit is None else {**report, "grad_norm": min(report["grad_norm"], limit)}


class NormOfMatrices(PlainTrainer):
    def norm(self, grads: Arrays) -> float:
        return super().norm({name: g for name, g in grads.items() if g.ndim >= 2})


class RateFromZero(PlainTrainer):
    def rate(self) -> float:
        return self.rate_of(self.t - 1) if self.t > 1 or self.config.warmup else self.rate_of(1)


class RateOneAhead(PlainTrainer):
    def rate(self) -> float:
        return self.rate_of(self.t + 1)


class NoWarmup(PlainTrainer):
    def rate_of(self, t: int) -> float:
        return super().rate_of(max(t, self.config.warmup))


class CosineFromStart(PlainTrainer):
    """The decay counts the warm-up too."""

    def rate_of(self, t: int) -> float:
        c = self.config
        if c.schedule != "cosine" or t <= c.warmup:
            return super().rate_of(t)
        return c.final_lr + (c.lr - c.final_lr) * 0.5 * (1.0 + math.cos(math.pi * t / c.steps))


class FinalRateIgnored(PlainTrainer):
    def rate_of(self, t: int) -> float:
        c = self.config
        if c.schedule == "constant" or t <= c.warmup or c.final_lr == 0.0:
            return super().rate_of(t)
        return (super().rate_of(t) - c.final_lr) * c.lr / (c.lr - c.final_lr)


class LinearHalfWay(PlainTrainer):
    def rate_of(self, t: int) -> float:
        c = self.config
        return c.lr * (1.0 - 0.5 * t / c.steps) if c.schedule == "linear" and t > c.warmup else super().rate_of(t)


class StableForever(PlainTrainer):
    def rate_of(self, t: int) -> float:
        return self.config.lr if self.config.schedule == "wsd" and t > self.config.warmup else super().rate_of(t)


class MeanOfMeans(PlainTrainer):
    def shares(self, counts: list[int]) -> list[float]:
        return [1.0 / len(counts)] * len(counts)


class AccumulateSum(PlainTrainer):
    def shares(self, counts: list[int]) -> list[float]:
        return [1.0] * len(counts)


class LastPartOnly(PlainTrainer):
    def shares(self, counts: list[int]) -> list[float]:
        return [0.0] * (len(counts) - 1) + [1.0]


class SameDropout(PlainTrainer):
    """Each step, and each part, draws the same mask."""

    def dropout_key(self, part: int) -> Any:
        return core.key(self.config.seed) if self.model.config.dropout else None


class SameDropoutOfParts(PlainTrainer):
    def dropout_key(self, part: int) -> Any:
        return super().dropout_key(0)


class NoDropout(PlainTrainer):
    def dropout_key(self, part: int) -> Any:
        return None


class DropoutFromZero(PlainTrainer):
    def dropout_key(self, part: int) -> Any:
        if not self.model.config.dropout:
            return None
        return core.fold_in(core.fold_in(core.key(self.config.seed), self.t - 1), part)


class Nesterov(PlainTrainer):
    def sgd(self, name: str, g: np.ndarray) -> np.ndarray:
        return g + self.config.betas[0] * super().sgd(name, g)


class Dampened(PlainTrainer):
    def sgd(self, name: str, g: np.ndarray) -> np.ndarray:
        return super().sgd(name, (1.0 - self.config.betas[0]) * g)


class NoMomentum(PlainTrainer):
    def sgd(self, name: str, g: np.ndarray) -> np.ndarray:
        return g


class LionMomentumFirst(PlainTrainer):
    """The sign is that of the moment after its update."""

    def lion(self, name: str, g: np.ndarray) -> np.ndarray:
        super().lion(name, g)
        return np.sign(self.m[name])


class AverageExchanged(PlainTrainer):
    def averaged(self, mean: np.ndarray, p: np.ndarray) -> np.ndarray:
        return super().averaged(p, mean)


class AverageNotMoved(PlainTrainer):
    def averaged(self, mean: np.ndarray, p: np.ndarray) -> np.ndarray:
        return mean


class LionBetasSwapped(PlainTrainer):
    def lion(self, name: str, g: np.ndarray) -> np.ndarray:
        b2, b1 = self.config.betas
        step = np.sign(b1 * self.m[name] + (1.0 - b1) * g)
        self.m[name] = b2 * self.m[name] + (1.0 - b2) * g
        return step


class LossUnsmoothed(PlainTrainer):
    def of_part(self, part: Arrays, index: int) -> tuple[float, int, Arrays]:
        loss, grads = core.loss_and_gradients(self.model, part, dropout_key=self.dropout_key(index))
        return loss, int((part["targets"] != -100).sum()), {n: g.astype(np.float64) for n, g in grads.items()}


class LengthsDropped(PlainTrainer):
    def parts(self, batch: Arrays) -> list[Arrays]:
        return super().parts({name: x for name, x in batch.items() if name != "lengths"})


class IgnoredTokensReported(PlainTrainer):
    def step(self, batch: Any) -> dict[str, Any]:
        return {**super().step(batch), "tokens": int(np.size(batch["targets"]))}


_TABLE: tuple[tuple[str, str, str, type[PlainTrainer], str], ...] = (
    ("adam-eps-inside", "eps inside the root [pytorch 41477]", "subtle", EpsInsideRoot,
     "adamw adds eps inside the root; the contract is sqrt(v) + eps, after the correction"),
    ("adam-eps-before", "eps before the bias correction [pytorch 41477]", "subtle", EpsBeforeCorrection,
     "adamw adds eps before the bias correction; the contract is after it"),
    ("adam-eps-ignored", "a default eps", "subtle", EpsIgnored,
     "adamw ignores eps and uses 1e-8; the contract is the eps that is given"),
    ("adam-no-correction", "no bias correction [transformers 35504]", "blatant", NoCorrection,
     "adamw does not correct its moments' bias; the contract divides by 1 - beta^t"),
    ("adam-correction-late", "the correction counts finished updates [maxdiffusion 484]", "subtle", CorrectionFromZero,
     "adamw's correction is one update late; the contract counts updates from 1"),
    ("adam-betas-swapped", "the two betas swapped", "blatant", BetasSwapped,
     "adamw's betas are swapped; the contract is (first moment, second moment)"),
    ("adam-betas-default", "default betas", "subtle", BetasDefault,
     "adamw ignores betas and uses (0.9, 0.999); the contract is those that are given"),
    ("decay-coupled", "the decay enters the moments [optax 417]", "subtle", DecayCoupled,
     "the decay is added to the gradient; the contract takes it from the parameter, outside the moments"),
    ("decay-on-all", "biases and norms decay too [optax 417]", "subtle", DecayOnAll,
     "the decay acts on every parameter; the contract is those of two or more axes"),
    ("decay-ignored", "the decay is ignored", "blatant", DecayIgnored,
     "weight_decay is ignored; the contract is lr weight_decay p"),
    ("decay-without-rate", "the decay is not multiplied by the learning rate", "subtle", DecayWithoutRate,
     "the decay does not follow the learning rate; the contract is lr weight_decay p"),
    ("decay-after-step", "the decay of the new parameter [C-Optim 3]", "rare", DecayAfterStep,
     "the decay is that of the stepped parameter; the contract is that of the old one"),
    ("clip-eps", "an eps in the clipping [spd 643]", "subtle", ClipEps,
     "clipping divides by norm + 1e-6; the contract is clip_norm / norm"),
    ("clip-per-tensor", "each tensor clipped by itself", "blatant", ClipPerTensor,
     "each tensor is clipped by its own norm; the contract is the norm of all of them jointly"),
    ("clip-values", "values clipped, not the norm", "blatant", ClipValues,
     "values are clipped; the contract scales all gradients by clip_norm / norm"),
    ("clip-ignored", "no clipping", "blatant", ClipIgnored,
     "clip_norm is ignored; the contract scales gradients down to it"),
    ("clip-always", "small gradients are scaled up", "subtle", ClipAlways,
     "gradients below the limit are scaled up; the contract leaves them"),
    ("norm-after-clipping", "the norm is reported after clipping", "subtle", NormReportedClipped,
     "grad_norm is that after clipping; the contract reports it before"),
    ("norm-of-matrices", "biases are left out of the norm", "subtle", NormOfMatrices,
     "the norm leaves parameters of one axis out; the contract takes all jointly"),
    ("schedule-late", "the schedule counts from 0 [maxdiffusion 484]", "subtle", RateFromZero,
     "the schedule is one update late; the contract counts updates from 1"),
    ("schedule-early", "the schedule is one update ahead [maxdiffusion 484]", "subtle", RateOneAhead,
     "the schedule is one update ahead; the contract counts updates from 1"),
    ("schedule-no-warmup", "no warm-up", "blatant", NoWarmup,
     "the warm-up is ignored; the contract is lr t / warmup"),
    ("schedule-cosine-start", "the cosine starts before the warm-up ends", "subtle", CosineFromStart,
     "the cosine counts from the first update; the contract counts from the end of the warm-up"),
    ("schedule-final", "the last learning rate is ignored", "subtle", FinalRateIgnored,
     "final_lr is ignored; the contract ends there"),
    ("schedule-linear", "linear to half the learning rate", "subtle", LinearHalfWay,
     "the linear schedule ends at half the rate; the contract ends at final_lr"),
    ("schedule-wsd-stable", "no last phase", "subtle", StableForever,
     "wsd has no last phase; the contract decays over the last decay_steps"),
    ("accumulate-mean-of-means", "a mean of means [transformers 24725]", "subtle", MeanOfMeans,
     "micro-batches are averaged as they are; the contract weighs them by their counted targets"),
    ("accumulate-sum", "micro-batches are added up", "blatant", AccumulateSum,
     "micro-batches' means are added up; the contract is the mean over all counted targets"),
    ("accumulate-last", "the last micro-batch alone [mlx-lm 1413]", "blatant", LastPartOnly,
     "the last micro-batch alone counts; the contract is all of them"),
    ("dropout-same-mask", "the key is never folded [transformers 28059]", "subtle", SameDropout,
     "each update draws the same dropout mask; the contract folds update and micro-batch into the key"),
    ("dropout-same-parts", "micro-batches share a key", "subtle", SameDropoutOfParts,
     "micro-batches share a dropout mask; the contract folds the micro-batch into the key"),
    ("dropout-off", "dropout configured but never active [transformers 28059]", "blatant", NoDropout,
     "dropout is never active in training; the contract draws it from the seed"),
    ("dropout-from-zero", "updates counted from 0 in the key", "subtle", DropoutFromZero,
     "the dropout key counts updates from 0; the contract counts from 1"),
    ("sgd-nesterov", "Nesterov's momentum", "subtle", Nesterov,
     "sgd's momentum is Nesterov's; the contract is m = b m + g, p -= lr m"),
    ("sgd-dampened", "a momentum that is an average", "blatant", Dampened,
     "sgd's momentum is an average; the contract adds the whole gradient"),
    ("sgd-no-momentum", "no momentum", "blatant", NoMomentum,
     "sgd has no momentum; the contract takes betas[0]"),
    ("lion-order", "the sign after the moment's update", "subtle", LionMomentumFirst,
     "lion takes the sign after the moment's update; the contract is before, with betas[0]"),
    ("lion-betas-swapped", "the two betas swapped", "subtle", LionBetasSwapped,
     "lion's betas are swapped; the contract mixes the step with betas[0] and the moment with betas[1]"),
    ("average-exchanged", "the two weights of the average exchanged", "subtle", AverageExchanged,
     "the average takes 1 - ema of itself; the contract is ema of itself and 1 - ema of the parameters"),
    ("average-not-moved", "the average stays what it was at the start", "subtle", AverageNotMoved,
     "the average is never moved; the contract moves it after each update"),
    ("loss-options-dropped", "smoothing and z-loss are not handed on [Megatron-LM 6305]", "subtle", LossUnsmoothed,
     "label_smoothing and z_loss do not reach the loss; the contract hands them on"),
    ("batch-lengths-dropped", "the lengths of a batch are not handed on", "subtle", LengthsDropped,
     "the batch's lengths do not reach the model; the contract hands them on"),
    ("tokens-with-ignored", "ignored targets reported as tokens", "subtle", IgnoredTokensReported,
     "tokens counts ignored targets too; the contract counts the others"),
)  # fmt: skip


def faults() -> list[Fault]:
    rows: list[Row] = [(name, why, strength, {"Trainer": kind}, says) for name, why, strength, kind, says in _TABLE]
    return from_rows(rows)
