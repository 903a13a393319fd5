"""Rows of different lengths, the mistakes one can make with them, and masks as weights: parts of `masks`."""

from __future__ import annotations

from typing import Any

import numpy as np

from core_numpy.contract.data import Batch
from core_numpy.contract.shuffle import random_words

from .common import back, into


def padded(whole: Batch) -> Batch:
    """Rows cut to 3 to 7 digits, a repeat kept inside; behind them stands what a buffer held before: other digits."""
    tokens, count = whole["tokens"].copy(), len(whole["tokens"])
    words = random_words(5, count, count * 9).reshape(count, 9)
    lengths = (3 + words[:, 0] % 5).astype(np.int32)
    for row in np.flatnonzero(whole["targets"]):
        found = 1 + int(np.flatnonzero(tokens[row, 1:] == tokens[row, 0])[0])
        place = 1 + found % (int(lengths[row]) - 1)
        tokens[row, [found, place]] = tokens[row, [place, found]]
    real = np.arange(8) < lengths[:, None]
    tokens = np.where(real, tokens, words[:, 1:] % 9 + 1).astype(np.int32)
    return {"tokens": tokens, "targets": whole["targets"], "lengths": lengths}


def without(batch: Batch) -> Batch:
    return {"tokens": batch["tokens"], "targets": batch["targets"]}


def inverted(batch: Batch) -> Batch:
    """Real tokens blocked and padding open: what comes of handing torch.nn.MultiheadAttention's mask to ours."""
    padding = np.arange(8) >= batch["lengths"][:, None]
    return {**without(batch), "segments": np.where(padding, 0, -1).astype(np.int32)}


def weights(B: Any) -> dict[str, np.ndarray]:
    """The kinds of attention, on random queries and keys of six tokens (cross: two queries more than keys)."""
    q, k = (B.normal(key, (1, 1, 6, 16)) for key in B.split(B.key(9)))
    ends = {"kv_lengths": into(B, np.array([4], np.int32))}
    late = {"causal": True, "q_offset": 4}
    found = {
        "self": B.attention_weights(q, k), "cross": B.attention_weights(q, k[:, :, :4]),
        "causal": B.attention_weights(q, k, causal=True), "padding": B.attention_weights(q, k, **ends),
        "causal and padding": B.attention_weights(q, k, causal=True, **ends),
        "inverted padding": B.attention_weights(q, k, mask=~B.padding_mask(ends["kv_lengths"], 6)),
        "2 queries, bottom-right": B.attention_weights(q[:, :, :2], k, **late),
        "2 queries, top-left": B.attention_weights(q[:, :, :2], k, causal=True, q_offset=0),
    }  # fmt: skip
    return {name: back(B, x)[0, 0] for name, x in found.items()}
