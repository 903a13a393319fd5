"""Faults of the mask builders."""

from __future__ import annotations

from typing import Any

import numpy as np

import core_numpy as core

from .faults import Fault, Row, from_rows


def causal_strict(T: int, S: int | None = None, *, q_offset: Any = None) -> np.ndarray:
    return core.causal_mask(T, S, q_offset=(0 if q_offset is None else q_offset) - 1)


def causal_end(T: int, S: int | None = None, *, q_offset: Any = None) -> np.ndarray:
    size = T if S is None else S
    return core.causal_mask(T, size, q_offset=size - T if np.ndim(q_offset) == 0 else np.full_like(q_offset, size - T))


def causal_rank_three(T: int, S: int | None = None, *, q_offset: Any = None) -> np.ndarray:
    mask = core.causal_mask(T, S, q_offset=q_offset)
    return mask[:, 0] if mask.ndim == 4 else mask


def window_counts(T: int, S: int | None = None, *, left: Any, right: Any, q_offset: Any = None) -> np.ndarray:
    return core.sliding_window_mask(
        T, S, left=None if left is None else max(left - 1, 0), right=right, q_offset=q_offset
    )


def window_swapped(T: int, S: int | None = None, *, left: Any, right: Any, q_offset: Any = None) -> np.ndarray:
    return core.sliding_window_mask(T, S, left=right, right=left, q_offset=q_offset)


def window_no_offset(T: int, S: int | None = None, *, left: Any, right: Any, q_offset: Any = None) -> np.ndarray:
    return core.sliding_window_mask(T, S, left=left, right=right, q_offset=0)


def padding_one_more(lengths: np.ndarray, S: int) -> np.ndarray:
    return np.arange(S) <= np.asarray(lengths)[:, None, None, None]


def padding_from_end(lengths: np.ndarray, S: int) -> np.ndarray:
    return core.padding_mask(lengths, S)[..., ::-1]


def tokens_inverted(tokens: np.ndarray, pad_id: int) -> np.ndarray:
    return ~core.padding_mask_from_tokens(tokens, pad_id)


def tokens_at_end(tokens: np.ndarray, pad_id: int) -> np.ndarray:
    """Only padding at the end of a row."""
    real = np.asarray(tokens) != pad_id
    return (np.cumsum(real[:, ::-1], axis=1)[:, ::-1] > 0)[:, None, None, :]


def segments_padding(q_segments: np.ndarray, kv_segments: np.ndarray | None = None) -> np.ndarray:
    other = q_segments if kv_segments is None else kv_segments
    return q_segments[:, None, :, None] == other[:, None, None, :]


def segments_from(q_segments: np.ndarray, kv_segments: np.ndarray | None = None) -> np.ndarray:
    other = q_segments if kv_segments is None else kv_segments
    return (q_segments[:, None, :, None] >= other[:, None, None, :]) & (other[:, None, None, :] >= 0)


def prefix_ignored(T: int, S: int | None, prefix_lengths: np.ndarray, *, q_offset: Any = None) -> np.ndarray:
    return core.prefix_mask(T, S, np.zeros_like(prefix_lengths), q_offset=q_offset)


def prefix_one_more(T: int, S: int | None, prefix_lengths: np.ndarray, *, q_offset: Any = None) -> np.ndarray:
    return core.prefix_mask(T, S, np.minimum(prefix_lengths + 1, T if S is None else S), q_offset=q_offset)


def combine_or(*masks: np.ndarray | None) -> Any:
    given = [mask for mask in masks if mask is not None]
    return np.logical_or(*given) if len(given) == 2 else core.combine_masks(*masks)


def blocked_kept(mask: np.ndarray) -> np.ndarray:
    return mask.copy()


def bias_finite(mask: np.ndarray, dtype: str) -> np.ndarray:
    bias = core.mask_to_bias(mask, dtype)
    return np.where(np.isinf(bias), np.finfo(bias.dtype).min, bias).astype(bias.dtype)


def bias_swapped(mask: np.ndarray, dtype: str) -> np.ndarray:
    return core.mask_to_bias(~mask, dtype)


def positions_of_columns(padding: np.ndarray) -> np.ndarray:
    return np.broadcast_to(np.arange(padding.shape[1], dtype=np.int32), padding.shape)


def positions_from_one(padding: np.ndarray) -> np.ndarray:
    return np.cumsum(padding, axis=1, dtype=np.int32)


_ROWS: list[Row] = [
    ("causal-mask-strict", "a query does not see itself",
     "blatant", {"causal_mask": causal_strict},
     "causal_mask is strict; the contract is j <= i + q_offset"),
    ("causal-mask-end", "bottom-right, whatever the offset [pytorch 108108]",
     "subtle", {"causal_mask": causal_end},
     "causal_mask is aligned bottom-right; the contract is j <= i + q_offset"),
    ("causal-mask-rank", "a rank-3 mask: batch or head [onnx 8108]",
     "subtle", {"causal_mask": causal_rank_three},
     "causal_mask gives (B, T, S) for offsets per batch element; the contract is (B, 1, T, S)"),
    ("window-mask-counts-keys", "left as a number of keys [transformers 29623]",
     "subtle", {"sliding_window_mask": window_counts},
     "sliding_window_mask counts keys; the contract is distances: left = 1 sees two keys"),
    ("window-mask-swapped", "left and right swapped",
     "subtle", {"sliding_window_mask": window_swapped},
     "sliding_window_mask swaps left and right; the contract is i - left <= j <= i + right"),
    ("window-mask-offset", "the window ignores the offset",
     "subtle", {"sliding_window_mask": window_no_offset},
     "sliding_window_mask ignores q_offset; the contract is that the window moves with the query's position"),
    ("padding-mask-one-more", "one key past the length",
     "blatant", {"padding_mask": padding_one_more},
     "padding_mask shows one key too many; the contract is j < length"),
    ("padding-mask-from-end", "lengths count from the end [transformers 22161]",
     "blatant", {"padding_mask": padding_from_end},
     "padding_mask shows the last keys; the contract is the first: j < length"),
    ("token-mask-inverted", "True taken for padding [LLMs-from-scratch 1061]",
     "blatant", {"padding_mask_from_tokens": tokens_inverted},
     "padding_mask_from_tokens is inverted; the contract is True = may attend"),
    ("token-mask-at-end", "padding looked for at the end alone",
     "subtle", {"padding_mask_from_tokens": tokens_at_end},
     "padding_mask_from_tokens hides padding at the end alone; the contract is each token equal to pad_id"),
    ("segment-mask-padding", "padding attends to padding [nanoVLM 204]",
     "rare", {"segment_mask": segments_padding},
     "segment_mask lets padding see padding; the contract is that a negative id matches nothing"),
    ("segment-mask-ordered", "later documents see earlier ones [nanoVLM 204]",
     "subtle", {"segment_mask": segments_from},
     "segment_mask lets later ids see earlier ones; the contract is equal ids alone"),
    ("prefix-mask-ignored", "the prefix is causal too",
     "blatant", {"prefix_mask": prefix_ignored},
     "prefix_mask is causal inside the prefix; the contract is j < prefix or j <= i + q_offset"),
    ("prefix-mask-one-more", "one key past the prefix",
     "subtle", {"prefix_mask": prefix_one_more},
     "prefix_mask opens one key too many; the contract is j < prefix or j <= i + q_offset"),
    ("combine-masks-or", "masks joined by or [keras 23040]",
     "blatant", {"combine_masks": combine_or},
     "combine_masks joins by or; the contract is and"),
    ("from-blocked-kept", "True = blocked taken over as it is [LLMs-from-scratch 1061]",
     "blatant", {"from_blocked": blocked_kept},
     "from_blocked does not invert; the contract is True = blocked in, True = may attend out"),
    ("bias-of-mask-finite", "the most negative finite number for -inf [transformers 17306]",
     "rare", {"mask_to_bias": bias_finite},
     "mask_to_bias fills with the most negative finite number; the contract is -inf"),
    ("bias-of-mask-swapped", "a 0/1 mask added with the wrong polarity [pytorch 21518]",
     "blatant", {"mask_to_bias": bias_swapped},
     "mask_to_bias is inverted; the contract is 0 where a pair may attend and -inf elsewhere"),
    ("positions-of-columns", "positions that count padding [transformers 22161]",
     "subtle", {"positions_from_mask": positions_of_columns},
     "positions_from_mask counts columns; the contract is real tokens, from 0"),
    ("positions-from-one", "positions from 1, as for a table with a padding row [transformers 20761]",
     "subtle", {"positions_from_mask": positions_from_one},
     "positions_from_mask starts at 1; the contract is 0"),
]  # fmt: skip


def faults() -> list[Fault]:
    return from_rows(_ROWS)
