"""Attention by plain Python loops over numbers, written from the rules alone: the reference's own reference."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np


def attention_by_loops(q, k, v, **arguments: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(out, lse, weights before dropout), all float64. `kept` (..., H, T, S) stands for dropout's random choice."""
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    if q.ndim == 2:
        for name in ("mask", "bias", "kept"):
            if arguments.get(name) is not None:
                arguments[name] = np.asarray(arguments[name])[None]
        if arguments.get("sinks") is not None:
            arguments["sinks"] = np.asarray(arguments["sinks"])[None]
        return tuple(x[0] for x in attention_by_loops(q[None], k[None], v[None], **arguments))  # type: ignore[return-value]
    *batch, H, T, _ = q.shape
    G, S, Dv = v.shape[-3:]
    out, lse = np.zeros((*batch, H, T, Dv)), np.full((*batch, H, T), -np.inf)
    weights = np.zeros((*batch, H, T, S))
    for b in itertools.product(*map(range, batch)):
        for h, i in itertools.product(range(H), range(T)):
            g = h // (H // G)
            row = _row(b, h, i, q[(*b, h, i)], k[(*b, g)], **arguments)
            terms = [math.exp(s - row["top"]) for s in row["scores"].values()]
            total = math.fsum([*terms, *([math.exp(row["sink"] - row["top"])] if row["sink"] is not None else [])])
            if total == 0:
                continue
            lse[(*b, h, i)] = row["top"] + math.log(total)
            for (j, _), term in zip(row["scores"].items(), terms, strict=True):
                p = weights[(*b, h, i, j)] = term / total
                rate = arguments.get("dropout_rate", 0.0)
                if rate and not arguments["kept"][(*b, h, i, j)]:
                    continue
                for c in range(Dv):
                    out[(*b, h, i, c)] += p / (1 - rate) * v[(*b, g, j, c)]
    return out, lse, weights


def _row(b, h, i, q, k, **a: Any) -> dict[str, Any]:
    """The scores of the keys that query i of head h may attend to, by key."""
    S, D = k.shape
    scale, softcap = a.get("scale"), a.get("softcap")
    scores: dict[int, float] = {}
    for j in range(S):
        if not _visible(b, h, i, j, **a):
            continue
        s = (1 / math.sqrt(D) if scale is None else scale) * math.fsum(q[d] * k[j, d] for d in range(D))
        if softcap is not None:
            s = softcap * math.tanh(s / softcap)
        if a.get("bias") is not None:
            s += float(_at(a["bias"], b, h, i, j))
        if s != -math.inf:
            scores[j] = s
    sink = None if a.get("sinks") is None else float(a["sinks"][h])
    return {
        "scores": scores,
        "sink": sink,
        "top": max([*scores.values(), *([] if sink is None else [sink])], default=0),
    }


def _visible(b, h, i, j, **a: Any) -> bool:
    offset = a.get("q_offset")
    place = i + (0 if offset is None else int(np.asarray(offset)[b] if np.ndim(offset) else offset))
    left, right = a.get("window") or (None, None)
    if a.get("causal") and j > place:
        return False
    if (left is not None and j < place - left) or (right is not None and j > place + right):
        return False
    if a.get("kv_lengths") is not None and j >= a["kv_lengths"][b]:
        return False
    if a.get("q_segments") is not None:
        mine, other = a["q_segments"][(*b, i)], a["kv_segments"][(*b, j)]
        if mine != other or mine < 0:
            return False
    return a.get("mask") is None or bool(_at(a["mask"], b, h, i, j))


def _at(x, b, h, i, j):
    """x[b, h, i, j], an axis of size 1 standing for every index; rank 2 is (T, S)."""
    index = (i, j) if x.ndim == 2 else (*b, h, i, j)
    return x[tuple(0 if size == 1 else n for size, n in zip(x.shape, index, strict=True))]
