"""Boolean masks for `attention`, True = may attend, and what is made from them.

masks-1: True = may attend, in every mask that a function here returns or takes, except the input of `from_blocked`.
masks-2: a mask that depends on the batch element has the full rank (B, 1, T, S), axes of size 1 included.
masks-3: S = None means S = T; where T != S, q_offset must be given.
"""

from __future__ import annotations

from functools import reduce

import numpy as np

from .contract.checks import masks as checks
from .contract.tensor_file import numpy_dtype


def causal_mask(T: int, S: int | None = None, *, q_offset: int | np.ndarray | None = None) -> np.ndarray:
    """Each query sees the keys up to its own position.

        visible_ij = j <= i + q_offset

    -> (T, S) bool; with offsets (B,) of integers (B, 1, T, S). Refuses negative sizes, and T != S without q_offset.

    masks-4: causal_mask lets query i see key j where j <= i + q_offset; the offset may be negative or past the keys.
    """
    T, S = checks.check_grid(T, S, q_offset)
    i, j = _positions(T, S, q_offset)
    return j <= i


def sliding_window_mask(
    T: int, S: int | None = None, *, left: int | None, right: int | None, q_offset: int | np.ndarray | None = None
) -> np.ndarray:
    """Each query sees the keys from `left` before to `right` after its own position.

        visible_ij = i + q_offset - left <= j <= i + q_offset + right

    -> (T, S) bool; with offsets (B,) (B, 1, T, S). None leaves a side unbounded. Refuses negative sizes and sides.

    masks-5: sliding_window_mask counts distances: (left, right) = (2, 0) lets a query see three keys, itself included.
    """
    T, S = checks.check_grid(T, S, q_offset)
    left, right = checks.check_side("left", left), checks.check_side("right", right)
    i, j = _positions(T, S, q_offset)
    visible = np.ones(np.broadcast_shapes(i.shape, j.shape), dtype=np.bool_)
    if left is not None:
        visible &= i - left <= j
    if right is not None:
        visible &= j <= i + right
    return visible


def padding_mask(lengths: np.ndarray, S: int) -> np.ndarray:
    """Keys before the length of their row are seen.

        visible_bj = j < length_b

    lengths (B,) of integers from 0 to S -> (B, 1, 1, S) bool.

    masks-6: padding_mask lets every query of row b see the keys j < lengths[b]; a length of 0 leaves none.
    """
    S = checks.check_lengths(lengths, S, np.asarray)
    return np.arange(S) < np.asarray(lengths).astype(np.int64)[:, None, None, None]


def padding_mask_from_tokens(tokens: np.ndarray, pad_id: int) -> np.ndarray:
    """Keys whose token is not padding are seen.

        visible_bj = token_bj != pad_id

    tokens (B, S) of integers -> (B, 1, 1, S) bool.

    masks-7: padding_mask_from_tokens masks each token equal to pad_id, wherever it stands.
    """
    pad_id = checks.check_tokens(tokens, pad_id)
    return (np.asarray(tokens) != pad_id)[:, None, None, :]


def segment_mask(q_segments: np.ndarray, kv_segments: np.ndarray | None = None) -> np.ndarray:
    """Each query sees the keys of its own document.

        visible_bij = q_segment_bi = kv_segment_bj >= 0

    q_segments (B, T), kv_segments (B, S) of signed integers, None for the same -> (B, 1, T, S) bool.

    masks-8: segment_mask lets only equal ids attend; a negative id is padding and matches nothing, itself included.
    """
    kv_segments = q_segments if kv_segments is None else kv_segments
    checks.check_segment_ids(q_segments, kv_segments)
    of_q, of_k = np.asarray(q_segments)[:, None, :, None], np.asarray(kv_segments)[:, None, None, :]
    return (of_q == of_k) & (of_q >= 0)


def prefix_mask(
    T: int, S: int | None, prefix_lengths: np.ndarray, *, q_offset: int | np.ndarray | None = None
) -> np.ndarray:
    """Each query sees the prefix of its row, and the keys up to its own position.

        visible_bij = j < prefix_b or j <= i + q_offset

    prefix_lengths (B,) of integers from 0 to S -> (B, 1, T, S) bool. q_offset: an int or (B,).

    masks-9: prefix_mask opens causality for the keys j < prefix_lengths[b]; it lifts no other restriction.
    """
    T, S = checks.check_grid(T, S, q_offset)
    checks.check_prefix(prefix_lengths, q_offset, S, np.asarray)
    i, j = _positions(T, S, q_offset)
    return (j < np.asarray(prefix_lengths).astype(np.int64)[:, None, None, None]) | (j <= i)


def combine_masks(*masks: np.ndarray | None) -> np.ndarray | None:
    """The logical and of all masks given.

    Boolean masks of rank 2 or of one common full rank, that broadcast; None is ignored. Refuses other dtypes.

    masks-10: combine_masks is the logical and; None restricts nothing, and only None gives None.
    """
    given = tuple(mask for mask in masks if mask is not None)
    checks.check_masks(given)
    return reduce(np.logical_and, given) if given else None


def from_blocked(mask: np.ndarray) -> np.ndarray:
    """A mask whose True means blocked, as `torch.nn.MultiheadAttention` takes it, turned into one of this project.

    Boolean of any shape -> the same shape. Refuses every other dtype.

    masks-11: from_blocked is the logical not; numbers are refused, for 0 and 1 do not say which of them blocks.
    """
    checks.check_boolean("mask", mask)
    return np.logical_not(mask)


def mask_to_bias(mask: np.ndarray, dtype: str) -> np.ndarray:
    """The mask as a bias to add to the scores: 0 where a pair may attend, -inf where not.

    Boolean of any shape; dtype "float16", "bfloat16", "float32" or "float64" -> the same shape.

    masks-12: mask_to_bias gives exactly 0 and -inf in every dtype, never a large finite number.
    """
    checks.check_boolean("mask", mask)
    checks.check_bias_dtype(dtype)
    return np.where(mask, 0.0, -np.inf).astype(numpy_dtype(dtype))


def positions_from_mask(padding: np.ndarray) -> np.ndarray:
    """The position of each real token, counted from the first real token of its row.

        position_bj = max(number of real tokens of row b up to and including j, minus 1, 0)

    padding (B, S) bool, True = real token -> (B, S) int32.

    masks-13: positions_from_mask counts real tokens 0, 1, 2, ... whichever side is padded; padding after n of them has
        max(n - 1, 0).
    """
    checks.check_padding(padding)
    return np.maximum(np.cumsum(padding, axis=1, dtype=np.int32) - 1, 0).astype(np.int32)


def _positions(T: int, S: int, q_offset: int | np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Positions of the queries, (T, 1) or (B, 1, T, 1), and of the keys, (S,)."""
    offset = np.asarray(0 if q_offset is None else q_offset).astype(np.int64)
    if offset.ndim == 1:
        offset = offset[:, None, None, None]
    return np.arange(T)[:, None] + offset, np.arange(S)
