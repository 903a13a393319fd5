"""Faults of what may be seen: masks, causality, offsets, windows, lengths, segments."""

from __future__ import annotations

from functools import partial

import numpy as np

from .faults import Fault
from .naive import Naive, functions


class Everything(Naive):
    """Where masked pairs have a weight their values count."""

    def counted(self, seen: np.ndarray) -> np.ndarray:
        return np.ones_like(seen)


class MaskInverted(Naive):
    def masked(self) -> np.ndarray:
        return ~self.a["mask"]


class MaskIgnoredWithCausal(Naive):
    def restrictions(self) -> list[np.ndarray]:
        if self.a["causal"]:
            self.a["mask"] = None
        return super().restrictions()


class MaskLostWithBias(Naive):
    def restrictions(self) -> list[np.ndarray]:
        if self.a["bias"] is not None:
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


class MaskFloatFill(Everything):
    """-1e4 added where masked: not low enough for hot scores."""

    def softmax(self, s: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return super().softmax(np.where(seen, s, s - 1e4), np.ones_like(seen))


class DeadRowMean(Everything):
    def softmax(self, s: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        p, lse = super().softmax(s, seen)
        dead = ~seen.any(axis=-1, keepdims=True) & (self.a["sinks"] is None)
        return np.where(dead, 1.0 / max(self.S, 1), p), lse


class DeadRowNaN(Everything):
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


class CausalEnd(Naive):
    def offset(self) -> np.ndarray:
        return np.full_like(super().offset(), self.S - self.T)


class CausalTopLeft(Naive):
    def offset(self) -> np.ndarray:
        return np.zeros_like(super().offset())


class CausalStrict(Naive):
    def causal(self) -> np.ndarray:
        return self.distance() < 0


class CausalNext(Naive):
    def causal(self) -> np.ndarray:
        return self.distance() <= 1


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


class WindowBothSides(Naive):
    """One number for both sides."""

    def windowed(self) -> np.ndarray:
        left = self.a["window"][0]
        self.a["window"] = (left, left)
        return super().windowed()


class WindowRightIgnored(Naive):
    def windowed(self) -> np.ndarray:
        self.a["window"] = (self.a["window"][0], None)
        return super().windowed()


class WindowRightMore(Naive):
    def windowed(self) -> np.ndarray:
        left, right = self.a["window"]
        self.a["window"] = (left, None if right is None else right + 1)
        return super().windowed()


class WindowRightLess(Naive):
    """j < i + right where it must be <=."""

    def windowed(self) -> np.ndarray:
        left, right = self.a["window"]
        d = self.distance()
        return np.asarray((True if left is None else d >= -left) & (True if right is None else d < right))


class WindowWithoutOffset(Naive):
    def windowed(self) -> np.ndarray:
        left, right = self.a["window"]
        d = self.distance() + self.offset()
        return np.asarray((True if left is None else d >= -left) & (True if right is None else d <= right))


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


class LengthFromEnd(Naive):
    def within(self) -> np.ndarray:
        return np.arange(self.S) >= self.S - self.per_batch(self.a["kv_lengths"])


class LengthInverted(Naive):
    """A mask of padding taken for one of tokens."""

    def within(self) -> np.ndarray:
        return ~super().within()


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


class SegmentsFirstRow(Naive):
    def same_segment(self) -> np.ndarray:
        same = super().same_segment()
        return same[:1] if same.ndim > 3 else same


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


_TABLE: tuple[tuple[str, str, str, type[Naive], str], ...] = (
    ("mask-inverted", "True taken for blocked [LLMs-from-scratch 1061]",
     "blatant", MaskInverted,
     "your mask's polarity is inverted; the contract is True = may attend"),
    ("mask-lost-with-causal", "an explicit mask is dropped beside the causal flag [pytorch 178588]",
     "blatant", MaskIgnoredWithCausal,
     "your mask is dropped where causal is given; the contract is that all restrictions hold at once"),
    ("mask-lost-with-bias", "a boolean and an additive mask, one of them dropped [pytorch 92554]",
     "subtle", MaskLostWithBias,
     "your mask is dropped where a bias is given; the contract is that both hold"),
    ("mask-batch-as-heads", "a mask per batch element read as one per head [onnx 8108]",
     "subtle", MaskAsHeads,
     "a mask per batch element is read as one per head; the contract is (B, 1, T, S), axis by axis"),
    ("mask-finite-fill", "a finite fill for -inf [transformers 17306]",
     "rare", MaskFloatFill,
     "masked scores get a finite fill of about -1e4; the contract is that a masked key has no weight at all"),
    ("dead-row-mean", "a query with no key gives the mean of all values [pytorch 110213]",
     "subtle", DeadRowMean,
     "a query that may attend to no key gives the mean of the values; the contract is output 0"),
    ("dead-row-nan", "a query with no key gives NaN [pytorch 41508]",
     "blatant", DeadRowNaN,
     "a query that may attend to no key gives NaN; the contract is output 0 and log-sum-exp -inf"),
    ("dead-row-lse", "a query with no key has a finite log-sum-exp",
     "rare", DeadRowFiniteLse,
     "a query that may attend to no key has a finite log-sum-exp; the contract is -inf"),
    ("masked-value-leaks", "0 * NaN of a masked value [pytorch 101967]",
     "rare", MaskedNaNLeaks,
     "masked values enter the sum as 0 * NaN; the contract is that what stands at a masked pair has no effect"),
    ("masked-key-leaks", "NaN + -inf of a masked score [pytorch 101967]",
     "rare", MaskedKeyNaNLeaks,
     "masked scores keep their NaN (NaN + -inf); the contract is that what stands at a masked pair has no effect"),
    ("causal-bottom-right", "bottom-right where an offset was given [flash-attention 282]",
     "subtle", CausalBottomRight,
     "your causal mask is aligned bottom-right on top of the offset; the contract is j <= i + q_offset"),
    ("causal-end", "bottom-right, whatever the offset [flash-attention 282]",
     "subtle", CausalEnd,
     "your causal mask is aligned bottom-right; the contract is j <= i + q_offset"),
    ("causal-top-left", "the offset is ignored [pytorch 108108]",
     "subtle", CausalTopLeft,
     "q_offset is ignored, so your causal mask is aligned top-left; the contract is j <= i + q_offset"),
    ("causal-strict", "a query does not see itself",
     "blatant", CausalStrict,
     "a query does not see itself; the contract is j <= i + q_offset, not <"),
    ("causal-next", "a query sees one key of its future",
     "blatant", CausalNext,
     "a query sees the key after it; the contract is j <= i + q_offset"),
    ("causal-transposed", "the wrong triangle",
     "blatant", CausalTransposed,
     "your causal mask is the other triangle; the contract is j <= i + q_offset"),
    ("causal-lost-with-bias", "a bias switches causality off",
     "subtle", CausalLostWithBias,
     "causal is dropped where a bias is given; the contract is that both hold"),
    ("causal-lost-with-dropout", "dropout switches causality off [keras 23038]",
     "subtle", CausalLostWithDropout,
     "causal is dropped where dropout is on; the contract is that both hold"),
    ("causal-one-query", "a single query sees everything at any offset",
     "rare", CausalIgnoredForOneQuery,
     "a single query sees every key; the contract is j <= i + q_offset whatever the number of queries"),
    ("offset-absolute", "a negative offset loses its sign",
     "rare", OffsetSignedAway,
     "a negative q_offset loses its sign; the contract is j <= i + q_offset with any sign"),
    ("offset-first-element", "all batch elements take the first one's offset [onnxruntime 29020]",
     "subtle", OffsetOfFirstElement,
     "all batch elements use the first one's q_offset; the contract is one offset per batch element"),
    ("window-counts-keys", "left as a number of keys, itself included [transformers 29623]",
     "subtle", WindowCountsKeys,
     "left counts keys, the query itself included; the contract is a distance: left = 1 sees two keys"),
    ("window-one-more", "one key too many on the left",
     "subtle", WindowOneMore,
     "your window reaches one key too far to the left; the contract is j >= i + q_offset - left"),
    ("window-swapped", "left and right swapped",
     "blatant", WindowSwapped,
     "left and right of the window are swapped; the contract is (left, right)"),
    ("window-both-sides", "one size for both sides of the window",
     "subtle", WindowBothSides,
     "left bounds both sides of your window; the contract is (left, right), None for unbounded"),
    ("window-right-ignored", "the right side is never bounded",
     "subtle", WindowRightIgnored,
     "the right side of the window is not applied; the contract is j <= i + q_offset + right"),
    ("window-right-more", "one key too many on the right",
     "subtle", WindowRightMore,
     "your window reaches one key too far to the right; the contract is j <= i + q_offset + right"),
    ("window-right-less", "the right side as the end of a range, which it excludes",
     "subtle", WindowRightLess,
     "your window ends one key too early on the right; the contract is j <= i + q_offset + right"),
    ("window-without-offset", "the window ignores the offset",
     "subtle", WindowWithoutOffset,
     "your window ignores q_offset; the contract is that it moves with the query's position"),
    ("window-whole-blocks", "whole blocks at the window's edge",
     "rare", WindowBlocked,
     "whole blocks of 64 keys are visible at the window's edge; the contract is exact key by key"),
    ("length-one-more", "one key past the length",
     "subtle", LengthOneMore,
     "one key past kv_lengths is visible; the contract is j < kv_length"),
    ("length-ignored", "the lengths are ignored",
     "blatant", LengthIgnored,
     "kv_lengths are ignored; the contract is j < kv_length"),
    ("length-from-end", "lengths count from the end, as with left padding [transformers 22161]",
     "blatant", LengthFromEnd,
     "kv_lengths leave the last keys visible; the contract is the first: j < kv_length"),
    ("length-inverted", "True taken for padding where the lengths become a mask",
     "blatant", LengthInverted,
     "what kv_lengths hide and what they leave visible is exchanged; the contract is j < kv_length"),
    ("length-zero-all", "length 0 taken for no length",
     "rare", LengthZeroMeansAll,
     "a length of 0 is taken for no length; the contract is that no key is visible then"),
    ("length-masks-queries", "lengths applied to queries too",
     "subtle", LengthMasksQueries,
     "kv_lengths hide queries too; the contract is that they restrict keys alone"),
    ("segments-ignored", "packed documents see each other [nanoVLM 204]",
     "blatant", SegmentsIgnored,
     "segments are ignored; the contract is that only equal ids see each other"),
    ("segments-padding-matches", "padding attends to padding",
     "rare", SegmentsOfPaddingMatch,
     "padding (a negative segment) sees padding; the contract is that it matches nothing"),
    ("segments-first-row", "all batch elements take the first one's segments",
     "subtle", SegmentsFirstRow,
     "all batch elements use the first one's segments; the contract is each its own"),
    ("segments-ordered", "later documents see earlier ones",
     "subtle", SegmentsOrdered,
     "later segments see earlier ones; the contract is that only equal ids see each other"),
    ("restrictions-or", "restrictions joined by or",
     "blatant", RestrictionsJoinedByOr,
     "restrictions are joined by or; the contract is that all of them hold at once"),
)  # fmt: skip


def faults() -> list[Fault]:
    return [Fault(name, why, strength, says, partial(functions, kind)) for name, why, strength, kind, says in _TABLE]
