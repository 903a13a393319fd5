"""Boolean masks for `attention`, True = may attend. Rules: core_numpy.masks.

Native: a mask lives on the device of the tensors it is made from, or on torch's default device where it is made from
sizes alone. Values of lengths are checked on CPU tensors.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from core_numpy.contract.checks import masks as checks

from .arrays import require_tensors, values


def causal_mask(T: int, S: int | None = None, *, q_offset: int | Tensor | None = None) -> Tensor:
    """j <= i + q_offset -> (T, S) bool; with offsets (B,) (B, 1, T, S). Rules: core_numpy.masks."""
    T, S = checks.check_grid(T, S, q_offset)
    i, j = _positions(T, S, q_offset)
    return j <= i


def sliding_window_mask(
    T: int, S: int | None = None, *, left: int | None, right: int | None, q_offset: int | Tensor | None = None
) -> Tensor:
    """i + q_offset - left <= j <= i + q_offset + right -> (T, S) bool; with offsets (B,) (B, 1, T, S).

    None leaves a side unbounded. Rules: core_numpy.masks.
    """
    T, S = checks.check_grid(T, S, q_offset)
    left, right = checks.check_side("left", left), checks.check_side("right", right)
    i, j = _positions(T, S, q_offset)
    visible = torch.ones(torch.broadcast_shapes(i.shape, j.shape), dtype=torch.bool, device=i.device)
    if left is not None:
        visible = visible & (i - left <= j)
    if right is not None:
        visible = visible & (j <= i + right)
    return visible


def padding_mask(lengths: Tensor, S: int) -> Tensor:
    """j < length; lengths (B,) -> (B, 1, 1, S) bool. Rules: core_numpy.masks."""
    S = checks.check_lengths(lengths, S, values)
    require_tensors(lengths=lengths)
    return torch.arange(S, device=lengths.device) < lengths.to(torch.int64)[:, None, None, None]


def padding_mask_from_tokens(tokens: Tensor, pad_id: int) -> Tensor:
    """tokens != pad_id; tokens (B, S) -> (B, 1, 1, S) bool. Rules: core_numpy.masks."""
    pad_id = checks.check_tokens(tokens, pad_id)
    require_tensors(tokens=tokens)
    return (tokens != pad_id)[:, None, None, :]


def segment_mask(q_segments: Tensor, kv_segments: Tensor | None = None) -> Tensor:
    """Equal ids that are not negative; (B, T), (B, S) or None for the same -> (B, 1, T, S) bool.

    Rules: core_numpy.masks.
    """
    kv_segments = q_segments if kv_segments is None else kv_segments
    checks.check_segment_ids(q_segments, kv_segments)
    require_tensors(q_segments=q_segments, kv_segments=kv_segments)
    of_q, of_k = q_segments[:, None, :, None], kv_segments[:, None, None, :]
    return (of_q == of_k) & (of_q >= 0)


def prefix_mask(T: int, S: int | None, prefix_lengths: Tensor, *, q_offset: int | Tensor | None = None) -> Tensor:
    """j < prefix or j <= i + q_offset; prefix_lengths (B,) -> (B, 1, T, S) bool. Rules: core_numpy.masks."""
    T, S = checks.check_grid(T, S, q_offset)
    checks.check_prefix(prefix_lengths, q_offset, S, values)
    require_tensors(prefix_lengths=prefix_lengths)
    i, j = _positions(T, S, q_offset, device=prefix_lengths.device)
    return (j < prefix_lengths.to(torch.int64)[:, None, None, None]) | (j <= i)


def combine_masks(*masks: Tensor | None) -> Tensor | None:
    """Logical and of boolean masks that broadcast; None is ignored. Rules: core_numpy.masks."""
    given = tuple(mask for mask in masks if mask is not None)
    checks.check_masks(given)
    require_tensors(**{f"masks[{i}]": mask for i, mask in enumerate(masks)})
    return reduce(torch.logical_and, given) if given else None


def from_blocked(mask: Tensor) -> Tensor:
    """True = blocked -> True = may attend, as `torch.nn.MultiheadAttention` needs it. Rules: core_numpy.masks."""
    checks.check_boolean("mask", mask)
    require_tensors(mask=mask)
    return torch.logical_not(mask)


def mask_to_bias(mask: Tensor, dtype: str) -> Tensor:
    """0 where a pair may attend, -inf where not; mask's shape, dtype by name. Rules: core_numpy.masks."""
    checks.check_boolean("mask", mask)
    checks.check_bias_dtype(dtype)
    require_tensors(mask=mask)
    bias = torch.zeros(mask.shape, dtype=getattr(torch, dtype), device=mask.device)
    return bias.masked_fill(~mask, -torch.inf)


def positions_from_mask(padding: Tensor) -> Tensor:
    """Real tokens so far minus 1, at least 0; padding (B, S) bool -> (B, S) int32. Rules: core_numpy.masks."""
    checks.check_padding(padding)
    require_tensors(padding=padding)
    return (torch.cumsum(padding, dim=1, dtype=torch.int32) - 1).clamp_min(0)


def _positions(
    T: int, S: int, q_offset: int | Tensor | None, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """Positions of the queries, (T, 1) or (B, 1, T, 1), and of the keys, (S,)."""
    offset: int | Tensor = 0 if q_offset is None else q_offset
    if isinstance(offset, Tensor):
        device = offset.device if device is None else device
        offset = offset.to(device=device, dtype=torch.int64)
        if offset.ndim == 1:
            offset = offset[:, None, None, None]
    return torch.arange(T, device=device)[:, None] + offset, torch.arange(S, device=device)
