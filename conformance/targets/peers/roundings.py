"""Attention in a half type, the plain way: what a known difference of rounding is measured against.

A peer that keeps intermediate results in the half type uses more than the budget on some inputs. Its row in
`conformance/differences` names one of `KINDS`, and explains a failure only where the peer's error is that of the plain
way on the same inputs. The peer's published source says which kind it is.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from ..protocol import Target

# query: queries are scaled in the half type, by the scale rounded to it; scores and weights are stored in it, and the
# softmax between them is float32.
# all: every operation is NumPy's in the half type, the softmax's sum too; the scale's root multiplies both factors.
KINDS = ("query", "all")
# The peers' errors are those of the plain way to three digits here; sums in another order move them by some per cent.
TIMES = 1.25


class Plain:
    """A target with `attention` in the arithmetic of `kind`."""

    def __init__(self, kind: str) -> None:
        if kind not in KINDS:
            raise ValueError(f"rounding must be one of {', '.join(KINDS)}; got {kind!r}")
        self.kind = kind

    def attention(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        *,
        mask: np.ndarray | None = None,
        bias: np.ndarray | None = None,
        causal: bool = False,
        q_offset: Any = None,
        kv_lengths: np.ndarray | None = None,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> np.ndarray:
        heads = q.shape[-3] // k.shape[-3] if q.ndim > 2 else 1
        k, v = (np.repeat(x, heads, axis=-3) if heads > 1 else x for x in (k, v))
        scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
        s = self.scores(q, k, scale)
        if softcap is not None:
            s = _stored(softcap * _stored(np.tanh(_stored(_wide(s) / softcap, s)), s), s)
        if bias is not None:
            s = _stored(_wide(s) + _wide(bias), s)
        seen = np.ones(s.shape, dtype=bool)
        if causal:
            offset = np.reshape(0 if q_offset is None else q_offset, np.shape(q_offset or 0) + (1,) * 3)
            seen = seen & (np.arange(s.shape[-1]) <= np.arange(s.shape[-2])[:, None] + offset)
        if kv_lengths is not None:
            seen = seen & (np.arange(s.shape[-1]) < kv_lengths[..., None, None, None])
        seen = seen if mask is None else seen & mask
        p = self.softmax(np.where(seen, _wide(s), -np.inf), s)
        return _stored(np.matmul(p, v) if self.kind == "all" else _wide(p) @ _wide(v), q)

    def scores(self, q: np.ndarray, k: np.ndarray, scale: float) -> np.ndarray:
        if self.kind == "all":
            root = q.dtype.type(math.sqrt(abs(scale)))
            return _stored(np.matmul(q * root, np.swapaxes(k * root, -1, -2)) * q.dtype.type(np.sign(scale)), q)
        return _stored(_wide(q * q.dtype.type(scale)) @ _wide(np.swapaxes(k, -1, -2)), q)

    def softmax(self, s: np.ndarray, like: np.ndarray) -> np.ndarray:
        if self.kind != "all":
            e = np.exp(s - np.maximum(s.max(-1, keepdims=True, initial=-np.inf), np.finfo(np.float32).min))
            return _stored(e / np.maximum(e.sum(-1, keepdims=True), np.float32(1e-30)), like)
        half = _stored(s, like)
        top = half.max(-1, keepdims=True) if half.shape[-1] else _stored(np.zeros((*half.shape[:-1], 1)), like)
        e = np.exp(half - np.where(np.isfinite(_wide(top)), top, like.dtype.type(0)))
        total = np.sum(e, axis=-1, keepdims=True)
        return _stored(e / np.where(total == 0, like.dtype.type(1), total), like)


def _wide(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, dtype=np.float32)


def _stored(x: np.ndarray, like: np.ndarray) -> np.ndarray:
    return np.asarray(x).astype(like.dtype)


@cache
def share(kind: str, case_id: str, dtype: str) -> float:
    """The share of its error budget that the plain way uses on a case."""
    from ...rows import load_cases
    from ...runner import judge
    from ...space import select

    written = next((case for case in load_cases() if case.id == case_id), None)
    case = written or next(case for case in select("exhaustive") if case.id == case_id)
    return judge(case, Target(Plain(kind), f"plain {kind}"), dtype).share or 0.0


def explains(kind: str, case_id: str, dtype: str, found: float) -> bool:
    """Whether an error of `found` budgets is at most `TIMES` that of the plain way."""
    return dtype in ("bfloat16", "float16") and found <= TIMES * share(kind, case_id, dtype)
