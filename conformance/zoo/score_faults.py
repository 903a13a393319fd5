"""Faults of the scores and of their softmax: scale, soft cap, bias, sinks, precision."""

from __future__ import annotations

from functools import partial

import ml_dtypes
import numpy as np

from .faults import Fault
from .naive import Naive, functions
from .visibility_faults import Everything


class HeadCut(Naive):
    """A tile of 64: what a head has beyond it never enters the product."""

    def raw(self) -> np.ndarray:
        return self.scale() * (self.q[..., :64] @ np.swapaxes(self.k[..., :64], -1, -2))


class ScaleMissing(Naive):
    def scale(self) -> float:
        return 1.0 if self.a["scale"] is None else self.a["scale"]


class ScaleIgnored(Naive):
    def scale(self) -> float:
        return 1.0 / np.sqrt(self.D)


class ScaleOrDefault(Naive):
    def scale(self) -> float:
        return self.a["scale"] or 1.0 / np.sqrt(self.D)


class ScaleTwice(Naive):
    def scale(self) -> float:
        return super().scale() ** 2 if self.a["scale"] is not None else super().scale()


class ScaleByWidth(Naive):
    def scale(self) -> float:
        return 1.0 / np.sqrt(self.D * self.H) if self.a["scale"] is None else self.a["scale"]


class ScaleInverse(Naive):
    def scale(self) -> float:
        return 1.0 / self.D if self.a["scale"] is None else self.a["scale"]


class ScaleOfSixtyFour(Naive):
    """A constant that is right for the usual head size."""

    def scale(self) -> float:
        return 0.125 if self.a["scale"] is None else self.a["scale"]


class ScaleOfValues(Naive):
    def scale(self) -> float:
        size = self.D if self.v is None else self.v.shape[-1]
        return 1.0 / np.sqrt(size) if self.a["scale"] is None else self.a["scale"]


class ScaleAbsolute(Naive):
    def scale(self) -> float:
        return abs(super().scale())


class CapAfterBias(Naive):
    def scores(self) -> np.ndarray:
        return self.capped(self.biased(self.raw()))


class CapAfterMask(Everything):
    def softmax(self, s: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self.a["softcap"] is None:
            return super().softmax(s, seen)
        return super().softmax(np.where(seen, s, -self.a["softcap"]), np.ones_like(seen))


class CapNotScaledBack(Naive):
    def capped(self, s: np.ndarray) -> np.ndarray:
        cap = self.a["softcap"]
        return s if cap is None else np.tanh(s / cap)


class CapClips(Naive):
    def capped(self, s: np.ndarray) -> np.ndarray:
        cap = self.a["softcap"]
        return s if cap is None else np.clip(s, -cap, cap)


class CapBeforeScale(Naive):
    def raw(self) -> np.ndarray:
        cap = self.a["softcap"]
        plain = self.q @ np.swapaxes(self.k, -1, -2)
        return self.scale() * (plain if cap is None else cap * np.tanh(plain / cap))

    def capped(self, s: np.ndarray) -> np.ndarray:
        return s


class BiasScaled(Naive):
    def biased(self, s: np.ndarray) -> np.ndarray:
        return s if self.a["bias"] is None else s + self.scale() * self.a["bias"].astype(np.float64)


class BiasNegated(Naive):
    def biased(self, s: np.ndarray) -> np.ndarray:
        return s if self.a["bias"] is None else s - self.a["bias"].astype(np.float64)


class BiasHalf(Naive):
    def biased(self, s: np.ndarray) -> np.ndarray:
        return s if self.a["bias"] is None else s + self.wide(self.a["bias"].astype(ml_dtypes.bfloat16))


class BiasInfiniteNaN(Naive):
    """A whole row of -inf: exp(-inf - -inf)."""

    def softmax(self, s: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        p, lse = super().softmax(s, seen)
        return (p if self.a["bias"] is None else np.where(seen.any(axis=-1, keepdims=True), p, np.nan)), lse

    def counted(self, seen: np.ndarray) -> np.ndarray:
        return seen if self.a["bias"] is None else np.ones_like(seen)


class BiasIgnored(Naive):
    def biased(self, s: np.ndarray) -> np.ndarray:
        return s


class SinkIgnored(Naive):
    def sink(self) -> None:
        return None


class SinkDividedAmongKeys(Naive):
    """A sink of zero value that is dropped after the softmax and the rest normalised again."""

    def softmax(self, s: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        p, lse = super().softmax(s, seen)
        total = p.sum(axis=-1, keepdims=True)
        return np.where(total > 0, p / np.where(total > 0, total, 1.0), 0.0), lse


class SinkScaled(Naive):
    def sink(self) -> np.ndarray | None:
        sink = super().sink()
        return None if sink is None else self.scale() * sink


class SinkOfFirstHead(Naive):
    def sink(self) -> np.ndarray | None:
        sink = super().sink()
        return None if sink is None else np.broadcast_to(sink[:1], sink.shape)


class SinkOutsideMaximum(Naive):
    """exp(sink - maximum of the scores) overflows in float32 where the sink is far above every score."""

    def softmax(self, s: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        p, lse = super().softmax(s, seen)
        sink = self.sink()
        if sink is None:
            return p, lse
        top = np.where(seen, s, -np.inf).max(axis=-1, initial=-np.inf)
        return p, np.where(sink[..., 0] - top > 88.0, np.inf, lse)


class SinkOncePerKey(Naive):
    def softmax(self, s: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        sink = self.sink()
        if sink is not None:
            self.a["sinks"] = self.a["sinks"] + np.log(max(self.S, 1)).astype(self.a["sinks"].dtype)
        return super().softmax(s, seen)


class LseWithoutSink(Naive):
    def softmax(self, s: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        p, lse = super().softmax(s, seen)
        sink = self.sink()
        return p, lse if sink is None else lse + np.log(np.maximum(p.sum(axis=-1), 1e-300))


class LseUnscaled(Naive):
    def softmax(self, s: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        p, lse = super().softmax(s, seen)
        return p, lse - np.log(np.maximum(seen.sum(axis=-1), 1))


class LseBaseTwo(Naive):
    def softmax(self, s: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        p, lse = super().softmax(s, seen)
        return p, lse / np.log(2.0)


class SoftmaxOverQueries(Naive):
    def softmax(self, s: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        p, _ = super().softmax(np.swapaxes(s, -1, -2), np.swapaxes(seen, -1, -2))
        return np.swapaxes(p, -1, -2), super().softmax(s, seen)[1]


class SoftmaxPlusOne(Naive):
    """One more in the denominator: a sink of 0 that nobody asked for."""

    def softmax(self, s: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        p, lse = super().softmax(s, seen)
        return p / (1.0 + np.exp(-lse))[..., None], lse


class NoMaximum(Naive):
    """exp without the row's maximum, in float32: overflow for hot scores."""

    def softmax(self, s: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        p, lse = super().softmax(s, seen)
        hot = (np.abs(np.where(seen, s, 0.0)) > 88.0).any(axis=-1, keepdims=True)
        return np.where(hot, np.nan, p), lse


class SoftmaxHalf(Naive):
    def softmax(self, s: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        p, lse = super().softmax(s.astype(np.float16).astype(np.float64), seen)
        return p, lse


class SoftmaxStored(Naive):
    """In half types alone: every step of the softmax in the type, the sum in float32."""

    def softmax(self, s: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self.dtype in (np.float64, np.float32):
            return super().softmax(s, seen)

        def stored(x: np.ndarray) -> np.ndarray:
            return x.astype(self.dtype).astype(np.float64)

        p, lse = super().softmax(stored(s), seen)
        # The largest exponential is 1, so the largest weight is one over their sum.
        largest = p.max(axis=-1, keepdims=True, initial=0.0)
        e = np.divide(p, largest, out=np.zeros_like(p), where=largest > 0)
        return stored(stored(e) * largest), lse


class QueryHalf(Naive):
    """Scaled queries kept in the half type."""

    def raw(self) -> np.ndarray:
        if self.dtype in (np.float64, np.float32):
            return super().raw()
        return self.wide((self.scale() * self.q).astype(self.dtype)) @ np.swapaxes(self.k, -1, -2)


class ScoresFloat32(Naive):
    """float64 in, float32 inside: what some fused paths do in silence."""

    def softmax(self, s: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        p, lse = super().softmax(s.astype(np.float32).astype(np.float64), seen)
        return p.astype(np.float32).astype(np.float64), lse


_TABLE: tuple[tuple[str, str, str, type[Naive], str], ...] = (
    ("scale-missing", "no default scale",
     "blatant", ScaleMissing,
     "scores are not scaled by default; the contract is 1 / sqrt(D)"),
    ("scale-ignored", "the given scale is dropped [pytorch 174049]",
     "blatant", ScaleIgnored,
     "the scale that is given is dropped; the contract is that it replaces 1 / sqrt(D)"),
    ("scale-or-default", "scale 0 taken for absent",
     "rare", ScaleOrDefault,
     "a scale of 0 is taken for none; the contract is that 0 gives uniform weights"),
    ("scale-twice", "the given scale is applied to queries and to keys [pytorch 174049]",
     "blatant", ScaleTwice,
     "the scale that is given is applied twice; the contract is once, to q k^T"),
    ("scale-by-width", "1 / sqrt of the model's width [vit-pytorch 65]",
     "blatant", ScaleByWidth,
     "scores are scaled by 1 / sqrt(H D); the contract is 1 / sqrt(D), D the head size"),
    ("scale-inverse", "1 / D for 1 / sqrt(D)",
     "blatant", ScaleInverse,
     "scores are scaled by 1 / D; the contract is 1 / sqrt(D)"),
    ("scale-of-64", "1 / 8 whatever the head size",
     "blatant", ScaleOfSixtyFour,
     "scores are scaled by 1 / 8 whatever the head size; the contract is 1 / sqrt(D)"),
    ("scale-of-values", "the value head size in the scale",
     "rare", ScaleOfValues,
     "scores are scaled by the value head size; the contract is 1 / sqrt(D), D the size of queries and keys"),
    ("scale-absolute", "a negative scale loses its sign",
     "rare", ScaleAbsolute,
     "a negative scale loses its sign; the contract is that any finite scale is applied as it is"),
    ("cap-after-bias", "the cap also caps the bias",
     "subtle", CapAfterBias,
     "the soft cap is applied after the bias; the contract is scale, cap, bias, mask, softmax"),
    ("cap-after-mask", "the cap turns -inf into -cap [onnx 7867]",
     "blatant", CapAfterMask,
     "the soft cap is applied after the mask, so hidden keys keep a weight; the contract is cap, then mask"),
    ("cap-not-scaled-back", "tanh(s / cap) without its factor",
     "blatant", CapNotScaledBack,
     "the soft cap is tanh(s / c); the contract is c tanh(s / c)"),
    ("cap-clips", "a clip for a tanh",
     "subtle", CapClips,
     "the soft cap clips; the contract is c tanh(s / c)"),
    ("cap-before-scale", "the cap before the scale",
     "subtle", CapBeforeScale,
     "the soft cap is applied before the scale; the contract is scale, then cap"),
    ("bias-scaled", "the bias is scaled with the scores",
     "subtle", BiasScaled,
     "the bias is scaled together with the scores; the contract is that it is added after the scale"),
    ("bias-negated", "the bias is subtracted",
     "blatant", BiasNegated,
     "the bias is subtracted; the contract is that it is added"),
    ("bias-half", "a bias cast down to the half type [pytorch 99012]",
     "subtle", BiasHalf,
     "the bias is rounded to bfloat16; the contract is the accumulation dtype"),
    ("bias-infinite", "-inf along a whole row of the bias gives NaN [jax 17117]",
     "rare", BiasInfiniteNaN,
     "a row whose bias is -inf throughout gives NaN; the contract is output 0, as for any query without a key"),
    ("bias-ignored", "the bias is ignored",
     "blatant", BiasIgnored,
     "the bias is ignored; the contract is that it is added to the scores"),
    ("sink-ignored", "the sink is ignored",
     "blatant", SinkIgnored,
     "the sinks are ignored; the contract is exp(sink) in each row's denominator"),
    ("sink-renormalised", "weights normalised again after the sink",
     "subtle", SinkDividedAmongKeys,
     "weights are normalised again after the sink; the contract is that the sink keeps its share"),
    ("sink-scaled", "the sink is scaled",
     "subtle", SinkScaled,
     "the sink is scaled like a score; the contract is that it enters as it is"),
    ("sink-first-head", "one sink for all heads",
     "subtle", SinkOfFirstHead,
     "all heads use the first head's sink; the contract is one sink per head"),
    ("sink-outside-maximum", "a sink that is left out of the maximum overflows",
     "rare", SinkOutsideMaximum,
     "the sink is left out of the maximum and overflows; the contract is a finite log-sum-exp"),
    ("sink-per-key", "a sink counted once for every key",
     "subtle", SinkOncePerKey,
     "the sink is counted once per key; the contract is once per row"),
    ("lse-without-sink", "the log-sum-exp lacks the sink",
     "subtle", LseWithoutSink,
     "the log-sum-exp lacks the sink; the contract is the logarithm of the whole denominator"),
    ("lse-mean", "the logarithm of the mean, not of the sum",
     "subtle", LseUnscaled,
     "the log-sum-exp is divided by the number of keys; the contract is the sum"),
    ("lse-base-two", "a logarithm of base 2",
     "blatant", LseBaseTwo,
     "the log-sum-exp is in base 2; the contract is the natural logarithm"),
    ("softmax-over-queries", "the softmax runs over the queries",
     "blatant", SoftmaxOverQueries,
     "the softmax runs over the queries; the contract is over the keys"),
    ("softmax-plus-one", "one more in the denominator",
     "subtle", SoftmaxPlusOne,
     "1 is added to the denominator; the contract is the sum over keys (and sinks where given)"),
    ("softmax-no-maximum", "exp overflows without the row's maximum",
     "rare", NoMaximum,
     "exp is taken without the row's maximum and overflows; the contract is finite for any finite score"),
    ("head-cut", "a tile of 64 that larger heads do not fit",
     "rare", HeadCut,
     "of heads larger than 64 only the first 64 columns enter the scores; the contract is all of them"),
    ("scores-half", "scores in half precision",
     "subtle", SoftmaxHalf,
     "scores are rounded to half precision before the softmax; the contract is float32 at least"),
    ("softmax-stored", "the softmax of half types in the half type [onnx reference]",
     "rare", SoftmaxStored,
     "in half types scores, exponentials and weights are each rounded to the type; the contract is float32 at least"),
    ("scores-query-half", "scaled queries are rounded to the half type",
     "rare", QueryHalf,
     "queries are scaled and rounded in the half type; the contract is scores in float32 at least"),
    ("scores-float32", "float64 computed in float32",
     "rare", ScoresFloat32,
     "float64 inputs are computed in float32; the contract is float64"),
)  # fmt: skip


def faults() -> list[Fault]:
    return [Fault(name, why, strength, says, partial(functions, kind)) for name, why, strength, kind, says in _TABLE]
