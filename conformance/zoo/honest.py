"""Right implementations that differ in how they compute: the suite must blame none of them."""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType
from typing import Any

import numpy as np

import core_numpy as core

from .faults import Fault
from .naive import Naive, functions
from .plain_trainer import PlainTrainer


class Narrow(Naive):
    """Computed in float32 where the inputs are no float64, as kernels do."""

    def wide(self, x: np.ndarray) -> np.ndarray:
        return x.astype(np.float64 if self.dtype == np.float64 else np.float32)

    def keep(self) -> np.ndarray:
        return super().keep().astype(self.q.dtype)


class Permuted(Narrow):
    """Sums run over the keys in another order."""

    def _order(self) -> np.ndarray:
        return np.random.Generator(np.random.Philox(self.S)).permutation(self.S)

    def softmax(self, s: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        order = self._order()
        p, lse = super().softmax(s[..., order], np.broadcast_to(seen, s.shape)[..., order])
        return p[..., np.argsort(order)], lse

    def product(self, p: np.ndarray, seen: np.ndarray) -> np.ndarray:
        order, v = self._order(), self.v
        assert v is not None
        self.v = v[..., order, :]
        try:
            return super().product(p[..., order], seen[..., order])
        finally:
            self.v = v


class Blocked(Narrow):
    """Blocks of keys by themselves; `parts` says where they end."""

    def parts(self) -> Iterator[slice]:
        yield from (slice(start, min(start + 3, self.S)) for start in range(0, self.S, 3))

    def sums(self, s: np.ndarray, seen: np.ndarray, top: np.ndarray, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Denominator and weighted sum of one block, relative to `top`."""
        e = np.where(seen, np.exp(s - top), 0.0).astype(s.dtype)
        return e.sum(axis=-1, keepdims=True), e * kept

    def result(self) -> dict[str, np.ndarray]:
        if self.v is None or self.S == 0:
            return super().result()
        with np.errstate(all="ignore"):
            seen = np.broadcast_to(self.visible(), (*self.batch, self.H, self.T, self.S))
            s = np.where(seen, self.scores(), -np.inf)
            kept = np.broadcast_to(self.keep() if self.a["dropout_rate"] > 0 else s.dtype.type(1.0), s.shape)
            return self.joined(s, seen, kept)

    def joined(self, s: np.ndarray, seen: np.ndarray, kept: np.ndarray) -> dict[str, np.ndarray]:
        raise NotImplementedError

    def values(self, e: np.ndarray, seen: np.ndarray, part: slice) -> np.ndarray:
        assert self.v is not None
        v = self.v[..., part, :][..., None, :, :]
        return np.where(seen[..., part, None], e[..., None] * v, 0.0).sum(axis=-2).astype(e.dtype)


class Online(Blocked):
    """The running maximum, denominator and sum over blocks of keys."""

    def joined(self, s: np.ndarray, seen: np.ndarray, kept: np.ndarray) -> dict[str, np.ndarray]:
        sink = self.sink()
        top = np.broadcast_to(s.dtype.type(-np.inf) if sink is None else sink, (*s.shape[:-1], 1))
        total = np.zeros_like(top) if sink is None else np.ones_like(top)
        out = np.zeros((*s.shape[:-1], self.v.shape[-1]), dtype=s.dtype)  # type: ignore[union-attr]
        for part in self.parts():
            new = np.maximum(top, s[..., part].max(axis=-1, keepdims=True))
            finite = np.where(np.isfinite(new), new, 0.0).astype(s.dtype)
            shrink = np.exp(top - finite)
            block, e = self.sums(s[..., part], seen[..., part], finite, kept[..., part])
            total, out, top = total * shrink + block, out * shrink + self.values(e, seen, part), new
        lse = np.where(total > 0, np.where(np.isfinite(top), top, 0.0) + np.log(total), -np.inf)
        return {"out": np.where(total > 0, out / np.where(total > 0, total, 1.0), 0.0), "lse": lse[..., 0]}


class SplitKeys(Blocked):
    """Two parts of the keys, each with its own softmax, merged by their log-sum-exp; the sink joins the first."""

    def parts(self) -> Iterator[slice]:
        yield slice(0, (self.S + 1) // 2)
        yield slice((self.S + 1) // 2, self.S)

    def joined(self, s: np.ndarray, seen: np.ndarray, kept: np.ndarray) -> dict[str, np.ndarray]:
        outs, lses, sink = [], [], self.sink()
        for part in self.parts():
            top = s[..., part].max(axis=-1, keepdims=True, initial=-np.inf)
            top = top if sink is None else np.maximum(top, sink)
            top = np.where(np.isfinite(top), top, 0.0).astype(s.dtype)
            total, e = self.sums(s[..., part], seen[..., part], top, kept[..., part])
            total = total if sink is None else total + np.exp(sink - top)
            sink = None
            outs.append(np.where(total > 0, self.values(e, seen, part) / np.where(total > 0, total, 1.0), 0.0))
            lses.append((top + np.log(total))[..., 0])
        out, lse = core.merge_attention([np.asarray(o, dtype=s.dtype) for o in outs], lses)
        return {"out": out, "lse": lse}


class FusedProjections(core.Transformer):
    """Queries, keys and values by one product of matrices, then cut at their widths."""

    def __init__(self, config: Any, *, seed: int = 0, dtype: str = "float32", device: Any = None) -> None:
        super().__init__(config, seed=seed, dtype=dtype, device=device)
        for stack in (self.encoder, self.decoder) if config.kind == "encoder_decoder" else (self,):
            for block in stack.blocks:
                _fuse(block.attention)


def _fuse(attention: Any) -> None:
    parts = (attention.query, attention.key, attention.value)

    def run(self: Any, x: np.ndarray) -> np.ndarray:
        fused = x @ np.concatenate([part.weight for part in parts], axis=1).astype(np.float64)
        if self.bias is not None:
            fused = fused + np.concatenate([part.bias for part in parts]).astype(np.float64)
        ends = np.cumsum([part.weight.shape[1] for part in parts])
        return np.split(fused, ends[:-1], axis=-1)[parts.index(self)]

    for part in parts:
        part.run = MethodType(run, part)


def variants() -> list[Fault]:
    """As faults, so that the suite runs on them alike; none is one."""
    of = {
        "honest-naive": functions(Naive),
        "honest-narrow": functions(Narrow),
        "honest-permuted": functions(Permuted),
        "honest-online": functions(Online),
        "honest-split-keys": functions(SplitKeys),
        "honest-fused": {"Transformer": FusedProjections},
        "honest-trainer": {"Trainer": PlainTrainer},
    }
    return [Fault(name, "nothing is wrong", "blatant", "nothing is wrong", given.copy) for name, given in of.items()]
