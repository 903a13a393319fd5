"""Faults of what is made of the weights: heads, dropout, the weighted sum, what comes back."""

from __future__ import annotations

from functools import partial

import ml_dtypes
import numpy as np

import core_numpy as core

from .faults import Fault, Row, from_rows
from .naive import Naive, functions


class HeadsTiled(Naive):
    def repeat(self, x: np.ndarray) -> np.ndarray:
        return np.concatenate([x] * (self.H // x.shape[-3]), axis=-3)


class WeightsHalf(Naive):
    def dropped(self, p: np.ndarray) -> np.ndarray:
        return super().dropped(p.astype(ml_dtypes.bfloat16).astype(np.float64))


class WeightsStored(Naive):
    """In half types alone: what is right in float32 and float64."""

    def dropped(self, p: np.ndarray) -> np.ndarray:
        return super().dropped(p.astype(self.dtype).astype(np.float64))


class SumHalf(Naive):
    """The weighted sum accumulated in half precision."""

    def product(self, p: np.ndarray, seen: np.ndarray) -> np.ndarray:
        assert self.v is not None
        if self.dtype in (np.float64, np.float32):
            return super().product(p, seen)
        total = np.zeros((*p.shape[:-1], self.v.shape[-1]), dtype=self.dtype)
        for j in range(self.S):
            total = total + (p[..., j : j + 1] * self.v[..., j : j + 1, :]).astype(self.dtype)
        return total.astype(np.float64)


class LastKeyDropped(Naive):
    """A remainder loop that stops one short when the length is no multiple of the block."""

    def visible(self) -> np.ndarray:
        seen = super().visible()
        if self.S > 64 and self.S % 64 == 1:
            seen[..., -1] = False
        return seen


class DropoutNotRescaled(Naive):
    def keep(self) -> np.ndarray:
        return super().keep() * (1.0 - self.a["dropout_rate"])


class DropoutInverted(Naive):
    def keep(self) -> np.ndarray:
        rate = self.a["dropout_rate"]
        return (super().keep() == 0) / (1.0 - rate) if rate < 1 else super().keep()


class DropoutIgnored(Naive):
    def dropped(self, p: np.ndarray) -> np.ndarray:
        return p


class DropoutOtherKey(Naive):
    def keep(self) -> np.ndarray:
        import core_numpy

        self.a["dropout_key"] = core_numpy.fold_in(self.a["dropout_key"], 0)
        return super().keep()


class DropoutSharedByHeads(Naive):
    def keep(self) -> np.ndarray:
        kept = super().keep()
        return np.broadcast_to(kept[..., :1, :, :], kept.shape)


class DropoutRenormalised(Naive):
    def dropped(self, p: np.ndarray) -> np.ndarray:
        q = super().dropped(p)
        total = q.sum(axis=-1, keepdims=True)
        return np.where(total > 0, q / np.where(total > 0, total, 1.0), 0.0) if self.a["dropout_rate"] > 0 else q


class WeightsAfterDropout(Naive):
    def shown(self, p: np.ndarray) -> np.ndarray:
        return self.dropped(p)


class WeightsAveraged(Naive):
    def shown(self, p: np.ndarray) -> np.ndarray:
        return np.broadcast_to(p.mean(axis=-3, keepdims=True), p.shape)


class OutputFloat32(Naive):
    """Half types come back as float32."""

    def give(self, name: str, value: np.ndarray) -> np.ndarray:
        value = super().give(name, value)
        return value.astype(np.float32) if name != "lse" and value.dtype != np.float64 else value


class FirstBatchOnly(Naive):
    def result(self) -> dict[str, np.ndarray]:
        got = super().result()
        if self.batch and self.batch[0] > 1:
            got = {name: np.broadcast_to(x[:1], x.shape) for name, x in got.items()}
        return got


def merge_mean(outs: list[np.ndarray], lses: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Parts weigh the same."""
    out, lse = core.merge_attention(outs, lses)
    return np.mean(outs, axis=0, dtype=np.float64).astype(out.dtype), lse


def merge_shared_maximum(outs: list[np.ndarray], lses: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """exp(lse - maximum) of -inf - -inf."""
    with np.errstate(all="ignore"):
        top = np.max(lses, axis=0)
        weights = [np.exp((lse - top).astype(np.float64)) for lse in lses]
        total = np.sum(weights, axis=0)
        out = sum((w / total)[..., None] * part for w, part in zip(weights, outs, strict=True))
        return np.asarray(out).astype(outs[0].dtype), (top + np.log(total)).astype(lses[0].dtype)


def merge_largest_lse(outs: list[np.ndarray], lses: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    return core.merge_attention(outs, lses)[0], np.max(lses, axis=0)


def merge_unnormalised(outs: list[np.ndarray], lses: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    out, lse = core.merge_attention(outs, lses)
    return np.sum(outs, axis=0, dtype=np.float64).astype(out.dtype), lse


_MERGING: list[Row] = [
    ("merge-mean", "parts are averaged without their weights",
     "blatant", {"merge_attention": merge_mean},
     "merged parts weigh the same; the contract is exp(lse) each"),
    ("merge-sum", "parts are added without their weights",
     "blatant", {"merge_attention": merge_unnormalised},
     "merged parts are added as they are; the contract weighs them by exp(lse - lse of all)"),
    ("merge-largest-lse", "the largest log-sum-exp for that of all",
     "subtle", {"merge_attention": merge_largest_lse},
     "the merged log-sum-exp is the largest one; the contract is log sum exp of the parts' own"),
    ("merge-nan", "two parts without a key give NaN [onnx 8068]",
     "rare", {"merge_attention": merge_shared_maximum},
     "parts that all see no key give NaN; the contract is output 0 and -inf"),
]  # fmt: skip

_TABLE: tuple[tuple[str, str, str, type[Naive], str], ...] = (
    ("heads-tiled", "key heads tiled, not repeated [jax-js 180]",
     "subtle", HeadsTiled,
     "key/value heads are tiled, not repeated; the contract is that query head h uses key head h // (H // G)"),
    ("weights-half", "weights rounded to bfloat16",
     "subtle", WeightsHalf,
     "weights are rounded to bfloat16 before the product; the contract is float32 at least"),
    ("weights-stored", "quotients of the softmax stored in the half type [transformers eager]",
     "rare", WeightsStored,
     "in half types weights are divided by their sum and rounded before the product; the contract is float32 at least"),
    ("sum-half", "the weighted sum accumulated in half precision",
     "rare", SumHalf,
     "the weighted sum is accumulated in half precision; the contract is float32 at least"),
    ("last-key-dropped", "the remainder after whole blocks is one short",
     "rare", LastKeyDropped,
     "the last key is lost where the length is one more than whole blocks of 64; the contract is every key"),
    ("dropout-not-rescaled", "kept weights are not divided by 1 - rate",
     "blatant", DropoutNotRescaled,
     "kept weights are not divided by 1 - rate; the contract is that they are"),
    ("dropout-inverted", "the kept are dropped",
     "blatant", DropoutInverted,
     "the kept weights are dropped and the dropped kept; the contract is kept where uniform < 1 - rate"),
    ("dropout-ignored", "the rate is ignored [transformers 28059]",
     "blatant", DropoutIgnored,
     "dropout is never applied; the contract is that a rate above 0 drops"),
    ("dropout-other-key", "the key is folded once more: another mask",
     "subtle", DropoutOtherKey,
     "dropout draws from fold_in(key, 0); the contract is from the key itself"),
    ("dropout-shared", "one mask for all heads",
     "subtle", DropoutSharedByHeads,
     "one dropout mask serves all heads; the contract is one draw per element of the weights"),
    ("dropout-renormalised", "rows normalised again after dropout",
     "subtle", DropoutRenormalised,
     "rows are normalised again after dropout; the contract is that they are not"),
    ("weights-after-dropout", "returned weights are after dropout [pytorch 42929]",
     "subtle", WeightsAfterDropout,
     "the weights that come back are after dropout; the contract is before"),
    ("weights-averaged", "returned weights are averaged over heads [pytorch 34537]",
     "blatant", WeightsAveraged,
     "the weights that come back are averaged over heads; the contract is per head"),
    ("output-float32", "half types come back as float32",
     "blatant", OutputFloat32,
     "half types come back as float32; the contract is the dtype of q"),
    ("first-batch-only", "all batch elements get the first one's result",
     "blatant", FirstBatchOnly,
     "all batch elements get the first one's result; the contract is each its own"),
)  # fmt: skip


def faults() -> list[Fault]:
    of_naive = [
        Fault(name, why, strength, says, partial(functions, kind)) for name, why, strength, kind, says in _TABLE
    ]
    return of_naive + from_rows(_MERGING)
