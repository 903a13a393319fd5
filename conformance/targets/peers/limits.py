"""What several originals do not take, said in one way."""

from __future__ import annotations

from typing import Any

from ..protocol import NotOffered


def one_batch_axis(q: Any) -> None:
    if q.ndim != 4:
        raise NotOffered(f"four axes only; the case has {q.ndim}")


def equal_heads(q: Any, k: Any) -> None:
    if q.shape[-3] != k.shape[-3]:
        raise NotOffered("no grouped queries")


def equal_sizes(k: Any, v: Any) -> None:
    if k.shape[-1] != v.shape[-1]:
        raise NotOffered("value heads have the size of query heads")


def aligned_top_left(causal: bool, q: Any, k: Any, q_offset: Any) -> None:
    """The original's causal flag means offset 0."""
    same = q.shape[-2] == k.shape[-2] and q_offset is None
    if q_offset is not None and not causal:
        raise NotOffered("no offset without a causal flag")
    if causal and not same and not (isinstance(q_offset, int) and q_offset == 0):
        raise NotOffered(f"causal at offset 0 only; the case has {q_offset!r}")


def aligned_bottom_right(causal: bool, q: Any, k: Any, q_offset: Any) -> None:
    """The original's causal flag means that the last query sees the last key."""
    wanted = k.shape[-2] - q.shape[-2]
    if q_offset is not None and not causal:
        raise NotOffered("no offset without a causal flag")
    if causal and not (isinstance(q_offset or 0, int) and (q_offset or 0) == wanted):
        raise NotOffered(f"causal at offset S - T only; the case has {q_offset!r}")


def one_of_mask_and_bias(mask: Any, bias: Any) -> Any:
    if mask is not None and bias is not None:
        raise NotOffered("one of mask and bias, not both")
    return bias if mask is None else mask
