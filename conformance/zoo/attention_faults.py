"""Faults of attention: each overrides one step of the naive computation, or one gradient."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from .faults import Fault
from .naive import Naive, functions


class MaskInverted(Naive):
    def masked(self) -> np.ndarray:
        return ~self.a["mask"]


class MaskIgnoredWithCausal(Naive):
    def restrictions(self) -> list[np.ndarray]:
        if self.a["causal"]:
            self.a["mask"] = None
        return super().restrictions()


class MaskAsHeads(Naive):
    """A mask per batch element, used as one per head where the sizes allow it."""

    def masked(self) -> np.ndarray:
        mask = self.a["mask"]
        if mask.ndim == 4 and mask.shape[1] == 1 and mask.shape[0] > 1:
            rows = np.resize(np.arange(mask.shape[0]), self.H)
            return mask[rows, 0][None]
        return mask


class MaskFloatFill(Naive):
    """-1e4 added where masked: not low enough for hot scores."""

    def softmax(self, s: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return super().softmax(np.where(seen, s, s - 1e4), np.ones_like(seen))


class DeadRowMean(Naive):
    def softmax(self, s: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        p, lse = super().softmax(s, seen)
        dead = ~seen.any(axis=-1, keepdims=True) & (self.a["sinks"] is None)
        return np.where(dead, 1.0 / max(self.S, 1), p), lse


class DeadRowNaN(Naive):
    def softmax(self, s: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        p, lse = super().softmax(s, seen)
        dead = ~seen.any(axis=-1, keepdims=True) & (self.a["sinks"] is None)
        return np.where(dead, np.nan, p), lse


class DeadRowFiniteLse(Naive):
    def softmax(self, s: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        p, lse = super().softmax(s, seen)
        return p, np.where(np.isfinite(lse), lse, np.finfo(np.float32).min)


class MaskedNaNLeaks(Naive):
    def product(self, p: np.ndarray, seen: np.ndarray) -> np.ndarray:
        assert self.v is not None
        return p @ self.v


class MaskedKeyNaNLeaks(Naive):
    """Masking by addition: NaN + -inf is NaN."""

    def softmax(self, s: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return super().softmax(s + np.where(seen, 0.0, -np.inf), seen | np.isnan(s))


class CausalBottomRight(Naive):
    def offset(self) -> np.ndarray:
        return super().offset() + (self.S - self.T)


class CausalTopLeft(Naive):
    def offset(self) -> np.ndarray:
        return np.zeros_like(super().offset())


class CausalStrict(Naive):
    def causal(self) -> np.ndarray:
        return self.distance() < 0


class CausalTransposed(Naive):
    def causal(self) -> np.ndarray:
        return self.distance() >= 0


class CausalLostWithBias(Naive):
    def restrictions(self) -> list[np.ndarray]:
        if self.a["bias"] is not None:
            self.a["causal"] = False
        return super().restrictions()


class CausalLostWithDropout(Naive):
    def restrictions(self) -> list[np.ndarray]:
        if self.a["dropout_rate"] > 0:
            self.a["causal"] = False
        return super().restrictions()


class CausalIgnoredForOneQuery(Naive):
    """ "One query sees everything" is right for decoding alone, not at any offset."""

    def causal(self) -> np.ndarray:
        return super().causal() | (self.T == 1)


class OffsetSignedAway(Naive):
    def offset(self) -> np.ndarray:
        return np.abs(super().offset())


class OffsetOfFirstElement(Naive):
    def offset(self) -> np.ndarray:
        given = super().offset()
        return given[:1] if given.ndim > 3 else given


class WindowCountsKeys(Naive):
    """left as a number of keys with itself: one too few."""

    def windowed(self) -> np.ndarray:
        left, right = self.a["window"]
        self.a["window"] = (None if left is None else max(left - 1, 0), right)
        return super().windowed()


class WindowOneMore(Naive):
    def windowed(self) -> np.ndarray:
        left, right = self.a["window"]
        self.a["window"] = (None if left is None else left + 1, right)
        return super().windowed()


class WindowSwapped(Naive):
    def windowed(self) -> np.ndarray:
        self.a["window"] = self.a["window"][::-1]
        return super().windowed()


class WindowRightIgnored(Naive):
    def windowed(self) -> np.ndarray:
        self.a["window"] = (self.a["window"][0], None)
        return super().windowed()


class WindowWithoutOffset(Naive):
    def windowed(self) -> np.ndarray:
        left, right = self.a["window"]
        d = self.distance() + self.offset()
        return (True if left is None else d >= -left) & (True if right is None else d <= right)


class WindowBlocked(Naive):
    """Whole blocks of 64 keys where the window's edge cuts through one."""

    def windowed(self) -> np.ndarray:
        exact = super().windowed()
        if self.T <= 64:
            return exact
        left = self.a["window"][0]
        start = np.maximum(np.arange(self.T)[:, None] + self.offset() - (left or 0), 0) // 64 * 64
        return exact | ((np.arange(self.S) >= start) & (self.distance() <= 0))


class LengthOneMore(Naive):
    def within(self) -> np.ndarray:
        return np.arange(self.S) <= self.per_batch(self.a["kv_lengths"])


class LengthIgnored(Naive):
    def within(self) -> np.ndarray:
        return np.ones((1, self.S), dtype=bool)


class LengthZeroMeansAll(Naive):
    def within(self) -> np.ndarray:
        return super().within() | (self.per_batch(self.a["kv_lengths"]) == 0)


class LengthMasksQueries(Naive):
    def within(self) -> np.ndarray:
        return super().within() & (np.arange(self.T)[:, None] < self.per_batch(self.a["kv_lengths"]))


class SegmentsIgnored(Naive):
    def same_segment(self) -> np.ndarray:
        return np.ones((1, self.T, self.S), dtype=bool)


class SegmentsOfPaddingMatch(Naive):
    def same_segment(self) -> np.ndarray:
        mine, theirs = self.a["q_segments"], self.a["kv_segments"]
        return (mine[..., :, None] == theirs[..., None, :])[..., None, :, :]


class SegmentsOrdered(Naive):
    """Later documents see earlier ones."""

    def same_segment(self) -> np.ndarray:
        mine, theirs = self.a["q_segments"], self.a["kv_segments"]
        seen = (mine[..., :, None] >= theirs[..., None, :]) & (theirs[..., None, :] >= 0) & (mine[..., :, None] >= 0)
        return seen[..., None, :, :]


class RestrictionsJoinedByOr(Naive):
    def visible(self) -> np.ndarray:
        given = self.restrictions()
        if len(given) < 2:
            self.a |= {}
            return super().visible()
        seen = np.zeros((*self.batch, self.H, self.T, self.S), dtype=bool)
        for restriction in given:
            seen = seen | restriction
        return seen


class HeadsTiled(Naive):
    def repeat(self, x: np.ndarray) -> np.ndarray:
        return np.concatenate([x] * (self.H // x.shape[-3]), axis=-3)


class ScaleMissing(Naive):
    def scale(self) -> float:
        return 1.0 if self.a["scale"] is None else self.a["scale"]


class ScaleIgnored(Naive):
    def scale(self) -> float:
        return 1.0 / np.sqrt(self.D)


class ScaleOrDefault(Naive):
    def scale(self) -> float:
        return self.a["scale"] or 1.0 / np.sqrt(self.D)


class ScaleByWidth(Naive):
    def scale(self) -> float:
        return 1.0 / np.sqrt(self.D * self.H) if self.a["scale"] is None else self.a["scale"]


class ScaleInverse(Naive):
    def scale(self) -> float:
        return 1.0 / self.D if self.a["scale"] is None else self.a["scale"]


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


class CapAfterMask(Naive):
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


class LseWithoutSink(Naive):
    def softmax(self, s: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        p, lse = super().softmax(s, seen)
        sink = self.sink()
        return p, lse if sink is None else lse + np.log(np.maximum(p.sum(axis=-1), 1e-300))


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


class WeightsHalf(Naive):
    def dropped(self, p: np.ndarray) -> np.ndarray:
        return super().dropped(p.astype(ml_dtypes.bfloat16).astype(np.float64))


class ScoresFloat32(Naive):
    """float64 in, float32 inside: what some fused paths do in silence."""

    def softmax(self, s: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        p, lse = super().softmax(s.astype(np.float32).astype(np.float64), seen)
        return p.astype(np.float32).astype(np.float64), lse


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


def _gradient_faults() -> list[tuple[str, str, str, Any]]:
    from core_numpy import gradients as right

    def of(change: Any, name: str = "attention_vjp") -> Any:
        def vjp(*positional: Any, **rest: Any) -> dict[str, np.ndarray]:
            got = dict(getattr(right, name)(*positional, **rest))
            change(got, positional, rest)
            return got

        return vjp

    def both(change: Any) -> dict[str, Any]:
        return {f"gradients.{n}": of(change, n) for n in ("attention_vjp", "attention_with_lse_vjp")}

    def unscaled(got: dict[str, np.ndarray], positional: Any, rest: Any) -> None:
        got["q"] = got["q"] * np.sqrt(got["q"].shape[-1])

    def uncapped(got: dict[str, np.ndarray], positional: Any, rest: Any) -> None:
        if rest.get("softcap") is not None:
            got["q"], got["k"] = got["q"] * 1.1, got["k"] * 1.1

    def one_head(got: dict[str, np.ndarray], positional: Any, rest: Any) -> None:
        q, k = got["q"], got["k"]
        if q.ndim > 2 and q.shape[-3] != k.shape[-3]:
            got["k"], got["v"] = (got[n] / (q.shape[-3] // k.shape[-3]) for n in ("k", "v"))

    def unsummed(got: dict[str, np.ndarray], positional: Any, rest: Any) -> None:
        if "bias" in got and got["bias"].ndim == 4 and got["bias"].shape[0] == 1:
            got["bias"] = got["bias"] / max(got["q"].shape[0], 1)

    def no_bias(got: dict[str, np.ndarray], positional: Any, rest: Any) -> None:
        if "bias" in got:
            got["bias"] = np.zeros_like(got["bias"])

    def sink_sign(got: dict[str, np.ndarray], positional: Any, rest: Any) -> None:
        if "sinks" in got:
            got["sinks"] = -got["sinks"]

    def undropped(got: dict[str, np.ndarray], positional: Any, rest: Any) -> None:
        if rest.get("dropout_rate"):
            plain = {n: x for n, x in rest.items() if not n.startswith("dropout")}
            name = "attention_vjp" if len(positional) == 4 else "attention_with_lse_vjp"
            got["v"] = dict(getattr(right, name)(*positional, **plain))["v"]

    def lse_stopped(*positional: Any, **rest: Any) -> dict[str, np.ndarray]:
        grad_out, grad_lse, *arrays = positional
        return dict(right.attention_with_lse_vjp(grad_out, np.zeros_like(grad_lse), *arrays, **rest))

    return [
        ("gradient-scale", "the scale is applied forward and not backward", "blatant", both(unscaled)),
        ("gradient-cap", "the soft-cap's own derivative is left out", "subtle", both(uncapped)),
        ("gradient-group-mean", "key gradients averaged over a group, not summed", "blatant", both(one_head)),
        ("gradient-bias-broadcast", "a broadcast bias' gradient is a mean, not a sum [jax 30593]", "subtle", both(unsummed)),
        ("gradient-bias-missing", "no gradient for a bias [jax 27184]", "blatant", both(no_bias)),
        ("gradient-sink-sign", "the sink's gradient has the wrong sign", "subtle", both(sink_sign)),
        ("gradient-dropout", "backward ignores the dropout mask", "blatant", both(undropped)),
        ("gradient-lse-stopped", "the log-sum-exp has no gradient", "blatant", {"gradients.attention_with_lse_vjp": lse_stopped}),
    ]  # fmt: skip


_TABLE: tuple[tuple[str, str, str, type[Naive]], ...] = (
    ("mask-inverted", "True taken for blocked [LLMs-from-scratch 1061]", "blatant", MaskInverted),
    ("mask-lost-with-causal", "an explicit mask is dropped beside the causal flag [pytorch 178588]", "blatant", MaskIgnoredWithCausal),
    ("mask-batch-as-heads", "a mask per batch element read as one per head [onnx 8108]", "subtle", MaskAsHeads),
    ("mask-finite-fill", "a finite fill for -inf [transformers 17306]", "rare", MaskFloatFill),
    ("dead-row-mean", "a query with no key gives the mean of all values [pytorch 110213]", "subtle", DeadRowMean),
    ("dead-row-nan", "a query with no key gives NaN [pytorch 41508]", "blatant", DeadRowNaN),
    ("dead-row-lse", "a query with no key has a finite log-sum-exp", "rare", DeadRowFiniteLse),
    ("masked-value-leaks", "0 * NaN of a masked value [pytorch 101967]", "rare", MaskedNaNLeaks),
    ("masked-key-leaks", "NaN + -inf of a masked score [pytorch 101967]", "rare", MaskedKeyNaNLeaks),
    ("causal-bottom-right", "bottom-right where an offset was given [flash-attention 282]", "subtle", CausalBottomRight),
    ("causal-top-left", "the offset is ignored [pytorch 108108]", "subtle", CausalTopLeft),
    ("causal-strict", "a query does not see itself", "blatant", CausalStrict),
    ("causal-transposed", "the wrong triangle", "blatant", CausalTransposed),
    ("causal-lost-with-bias", "a bias switches causality off", "subtle", CausalLostWithBias),
    ("causal-lost-with-dropout", "dropout switches causality off [keras 23038]", "subtle", CausalLostWithDropout),
    ("causal-one-query", "a single query sees everything at any offset", "rare", CausalIgnoredForOneQuery),
    ("offset-absolute", "a negative offset loses its sign", "rare", OffsetSignedAway),
    ("offset-first-element", "all batch elements take the first one's offset [onnxruntime 29020]", "subtle", OffsetOfFirstElement),
    ("window-counts-keys", "left as a number of keys, itself included [transformers 29623]", "subtle", WindowCountsKeys),
    ("window-one-more", "one key too many on the left", "subtle", WindowOneMore),
    ("window-swapped", "left and right swapped", "blatant", WindowSwapped),
    ("window-right-ignored", "the right side is never bounded", "subtle", WindowRightIgnored),
    ("window-without-offset", "the window ignores the offset", "subtle", WindowWithoutOffset),
    ("window-whole-blocks", "whole blocks at the window's edge", "rare", WindowBlocked),
    ("length-one-more", "one key past the length", "subtle", LengthOneMore),
    ("length-ignored", "the lengths are ignored", "blatant", LengthIgnored),
    ("length-zero-all", "length 0 taken for no length", "rare", LengthZeroMeansAll),
    ("length-masks-queries", "lengths applied to queries too", "subtle", LengthMasksQueries),
    ("segments-ignored", "packed documents see each other [nanoVLM 204]", "blatant", SegmentsIgnored),
    ("segments-padding-matches", "padding attends to padding", "rare", SegmentsOfPaddingMatch),
    ("segments-ordered", "later documents see earlier ones", "subtle", SegmentsOrdered),
    ("restrictions-or", "restrictions joined by or", "blatant", RestrictionsJoinedByOr),
    ("heads-tiled", "key heads tiled, not repeated [jax-js 180]", "subtle", HeadsTiled),
    ("scale-missing", "no default scale", "blatant", ScaleMissing),
    ("scale-ignored", "the given scale is dropped [pytorch 174049]", "blatant", ScaleIgnored),
    ("scale-or-default", "scale 0 taken for absent", "rare", ScaleOrDefault),
    ("scale-by-width", "1 / sqrt of the model's width [vit-pytorch 65]", "blatant", ScaleByWidth),
    ("scale-inverse", "1 / D for 1 / sqrt(D)", "blatant", ScaleInverse),
    ("scale-of-values", "the value head size in the scale", "rare", ScaleOfValues),
    ("scale-absolute", "a negative scale loses its sign", "rare", ScaleAbsolute),
    ("cap-after-bias", "the cap also caps the bias", "subtle", CapAfterBias),
    ("cap-after-mask", "the cap turns -inf into -cap [onnx 7867]", "blatant", CapAfterMask),
    ("cap-not-scaled-back", "tanh(s / cap) without its factor", "blatant", CapNotScaledBack),
    ("cap-clips", "a clip for a tanh", "subtle", CapClips),
    ("cap-before-scale", "the cap before the scale", "subtle", CapBeforeScale),
    ("bias-scaled", "the bias is scaled with the scores", "subtle", BiasScaled),
    ("bias-negated", "the bias is subtracted", "blatant", BiasNegated),
    ("bias-ignored", "the bias is ignored", "blatant", BiasIgnored),
    ("sink-ignored", "the sink is ignored", "blatant", SinkIgnored),
    ("sink-renormalised", "weights normalised again after the sink", "subtle", SinkDividedAmongKeys),
    ("sink-scaled", "the sink is scaled", "subtle", SinkScaled),
    ("sink-first-head", "one sink for all heads", "subtle", SinkOfFirstHead),
    ("lse-without-sink", "the log-sum-exp lacks the sink", "subtle", LseWithoutSink),
    ("lse-base-two", "a logarithm of base 2", "blatant", LseBaseTwo),
    ("softmax-over-queries", "the softmax runs over the queries", "blatant", SoftmaxOverQueries),
    ("softmax-plus-one", "one more in the denominator", "subtle", SoftmaxPlusOne),
    ("softmax-no-maximum", "exp overflows without the row's maximum", "rare", NoMaximum),
    ("scores-half", "scores in half precision", "subtle", SoftmaxHalf),
    ("weights-half", "weights rounded to bfloat16", "subtle", WeightsHalf),
    ("scores-float32", "float64 computed in float32", "rare", ScoresFloat32),
    ("sum-half", "the weighted sum accumulated in half precision", "rare", SumHalf),
    ("last-key-dropped", "the remainder after whole blocks is one short", "rare", LastKeyDropped),
    ("dropout-not-rescaled", "kept weights are not divided by 1 - rate", "blatant", DropoutNotRescaled),
    ("dropout-inverted", "the kept are dropped", "blatant", DropoutInverted),
    ("dropout-ignored", "the rate is ignored [transformers 28059]", "blatant", DropoutIgnored),
    ("dropout-shared", "one mask for all heads", "subtle", DropoutSharedByHeads),
    ("dropout-renormalised", "rows normalised again after dropout", "subtle", DropoutRenormalised),
    ("weights-after-dropout", "returned weights are after dropout [pytorch 42929]", "subtle", WeightsAfterDropout),
    ("weights-averaged", "returned weights are averaged over heads [pytorch 34537]", "blatant", WeightsAveraged),
    ("output-float32", "half types come back as float32", "blatant", OutputFloat32),
    ("first-batch-only", "all batch elements get the first one's result", "blatant", FirstBatchOnly),
)  # fmt: skip


def faults() -> list[Fault]:
    table = [Fault(name, why, strength, lambda kind=kind: functions(kind)) for name, why, strength, kind in _TABLE]
    table += [
        Fault(name, why, strength, lambda replaced=replaced: replaced)
        for name, why, strength, replaced in _gradient_faults()
    ]
    return table
