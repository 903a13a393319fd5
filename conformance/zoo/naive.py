"""Attention written a second time, the plain way, in steps that a planted fault can replace one at a time.

`Naive` is right: it is the honest variant that the suite must not blame. A fault is a subclass that overrides one
step. Everything is float64 and builds whole (..., H, T, S) arrays; an honest variant may compute narrower (`wide`).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np


class Naive:
    """One attention call, step by step; `a` holds the arguments by name, None where not given."""

    def __init__(self, q: np.ndarray, k: np.ndarray, v: np.ndarray | None, **arguments: Any) -> None:
        names = (
            "mask",
            "bias",
            "window",
            "q_offset",
            "kv_lengths",
            "q_segments",
            "kv_segments",
            "sinks",
            "scale",
            "softcap",
        )
        self.a: dict[str, Any] = dict.fromkeys(names) | {"causal": False, "dropout_rate": 0.0, "dropout_key": None}
        self.a |= {name: value for name, value in arguments.items() if name != "kernel"}
        self.dtype = q.dtype
        self.flat = q.ndim == 2
        q, k = (self.wide(x)[(None,) * self.flat] for x in (q, k))
        v = None if v is None else self.wide(v)[(None,) * self.flat]
        self.H, self.T, self.D = q.shape[-3:]
        self.S = k.shape[-2]
        self.batch = q.shape[:-3]
        self.q, self.k = q, self.repeat(k)
        self.v = None if v is None else self.repeat(v)

    # --- steps
    def wide(self, x: np.ndarray) -> np.ndarray:
        return x.astype(np.float64)

    def repeat(self, x: np.ndarray) -> np.ndarray:
        return np.repeat(x, self.H // x.shape[-3], axis=-3)

    def scale(self) -> float:
        return 1.0 / math.sqrt(self.D) if self.a["scale"] is None else self.a["scale"]

    def raw(self) -> np.ndarray:
        return self.scale() * (self.q @ np.swapaxes(self.k, -1, -2))

    def capped(self, s: np.ndarray) -> np.ndarray:
        cap = self.a["softcap"]
        return s if cap is None else cap * np.tanh(s / cap)

    def biased(self, s: np.ndarray) -> np.ndarray:
        return s if self.a["bias"] is None else s + self.wide(self.a["bias"])

    def scores(self) -> np.ndarray:
        return self.biased(self.capped(self.raw()))

    def per_batch(self, x: Any) -> np.ndarray:
        """A number per batch element, with axes for heads, queries and keys."""
        return np.asarray(x).reshape(*np.shape(x), 1, 1, 1)

    def offset(self) -> np.ndarray:
        return self.per_batch(0 if self.a["q_offset"] is None else self.a["q_offset"])

    def distance(self) -> np.ndarray:
        """j - (i + q_offset)."""
        return np.arange(self.S)[None, :] - (np.arange(self.T)[:, None] + self.offset())

    def causal(self) -> np.ndarray:
        return self.distance() <= 0

    def windowed(self) -> np.ndarray:
        left, right = self.a["window"]
        d = self.distance()
        return np.asarray((True if left is None else d >= -left) & (True if right is None else d <= right))

    def within(self) -> np.ndarray:
        return np.arange(self.S) < self.per_batch(self.a["kv_lengths"])

    def same_segment(self) -> np.ndarray:
        mine, theirs = self.a["q_segments"], self.a["kv_segments"]
        same = (mine[..., :, None] == theirs[..., None, :]) & (mine[..., :, None] >= 0)
        return same[..., None, :, :]

    def masked(self) -> np.ndarray:
        return self.a["mask"]

    def restrictions(self) -> list[np.ndarray]:
        given = {
            "mask": self.masked,
            "causal": self.causal,
            "window": self.windowed,
            "kv_lengths": self.within,
            "q_segments": self.same_segment,
        }
        return [make() for name, make in given.items() if self.a[name] is not None and self.a[name] is not False]

    def visible(self) -> np.ndarray:
        seen = np.ones((*self.batch, self.H, self.T, self.S), dtype=bool)
        for restriction in self.restrictions():
            seen = seen & restriction
        if self.a["bias"] is not None:
            seen = seen & (self.a["bias"].astype(np.float64) != -np.inf)
        return seen

    def counted(self, seen: np.ndarray) -> np.ndarray:
        """The pairs whose value enters the sum."""
        return seen

    def sink(self) -> np.ndarray | None:
        return None if self.a["sinks"] is None else self.wide(self.a["sinks"]).reshape(-1, 1, 1)

    def softmax(self, s: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        sink = self.sink()
        s = np.where(seen, s, -np.inf)
        top = s.max(axis=-1, keepdims=True, initial=-np.inf)
        top = top if sink is None else np.maximum(top, sink)
        top = np.where(np.isfinite(top), top, 0.0)
        e = np.exp(s - top)
        total = e.sum(axis=-1, keepdims=True) + (0.0 if sink is None else np.exp(sink - top))
        return np.where(total > 0, e / np.where(total > 0, total, 1.0), 0.0), (top + np.log(total))[..., 0]

    def keep(self) -> np.ndarray:
        import core_numpy

        rate = self.a["dropout_rate"]
        shape = (*self.batch, *(() if self.flat else (self.H,)), self.T, self.S)
        if rate >= 1.0:
            return np.zeros((*self.batch, self.H, self.T, self.S))
        kept = core_numpy.bernoulli(self.a["dropout_key"], 1.0 - rate, shape)
        return kept.reshape(*self.batch, self.H, self.T, self.S) / (1.0 - rate)

    def dropped(self, p: np.ndarray) -> np.ndarray:
        return p * self.keep() if self.a["dropout_rate"] > 0 else p

    def product(self, p: np.ndarray, seen: np.ndarray) -> np.ndarray:
        """sum_j p_ij v_j over the visible j alone, so that 0 * NaN of a masked pair does not enter."""
        assert self.v is not None
        return np.where(seen[..., None], p[..., None] * self.v[..., None, :, :], 0.0).sum(axis=-2)

    # --- results
    def result(self) -> dict[str, np.ndarray]:
        with np.errstate(all="ignore"):
            seen = self.visible()
            p, lse = self.softmax(self.scores(), seen)
            out = {"weights": self.shown(p), "lse": lse}
            if self.v is not None:
                out["out"] = self.product(self.dropped(p), self.counted(seen))
        return out

    def shown(self, p: np.ndarray) -> np.ndarray:
        """The weights that are given back."""
        return p

    def give(self, name: str, value: np.ndarray) -> np.ndarray:
        value = value[0] if self.flat else value
        if name == "lse":
            return value.astype(np.float64 if self.dtype == np.float64 else np.float32)
        return value.astype(self.dtype)


def functions(kind: type[Naive]) -> dict[str, Any]:
    """The three attention functions as `kind` computes them."""

    def attention(q: Any, k: Any, v: Any, **arguments: Any) -> Any:
        call = kind(q, k, v, **arguments)
        return call.give("out", call.result()["out"])

    def attention_weights(q: Any, k: Any, **arguments: Any) -> Any:
        call = kind(q, k, None, **arguments)
        return call.give("weights", call.result()["weights"])

    def attention_with_lse(q: Any, k: Any, v: Any, **arguments: Any) -> Any:
        call = kind(q, k, v, **arguments)
        got = call.result()
        return call.give("out", got["out"]), call.give("lse", got["lse"])

    return {"attention": attention, "attention_weights": attention_weights, "attention_with_lse": attention_with_lse}
