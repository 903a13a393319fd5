"""`torch.nn.attention.flex_attention`, uncompiled: the contract's arguments as the functions of indices that it takes.

Soft-cap and bias are `score_mod`, everything that hides a key is `mask_mod`. It has no backward on the CPU.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import flex_attention as flex

from ..protocol import NotOffered
from .limits import one_batch_axis

FRAMEWORK = "torch"
Visible = Callable[[Any, Any, Any, Any], Any]


def _full(x: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return x.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def _rules(
    q: torch.Tensor, k: torch.Tensor, mask: Any, causal: bool, window: Any, offset: torch.Tensor, lengths: Any
) -> list[Visible]:
    """What must hold for query i of head h in batch element b to see key j."""
    rules: list[Visible] = []
    if mask is not None:
        full = _full(mask, q, k)
        rules.append(lambda b, h, i, j: full[b, h, i, j])
    if causal:
        rules.append(lambda b, h, i, j: j <= i + offset[b])
    left, right = (None, None) if window is None else window
    if left is not None:
        rules.append(lambda b, h, i, j: i + offset[b] - j <= left)
    if right is not None:
        rules.append(lambda b, h, i, j: j - i - offset[b] <= right)
    if lengths is not None:
        rules.append(lambda b, h, i, j: j < lengths[b])
    return rules


def _block_mask(rules: list[Visible], q: torch.Tensor, k: torch.Tensor) -> Any:
    if not rules:
        return None

    def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        seen = rules[0](b, h, i, j)
        for rule in rules[1:]:
            seen = seen & rule(b, h, i, j)
        return seen

    B, H, T, S = (*q.shape[:3], k.shape[2])
    return flex.create_block_mask(mask_mod, B, H, T, S, device="cpu")


def _score_mod(bias: torch.Tensor | None, softcap: float | None, q: torch.Tensor, k: torch.Tensor) -> Any:
    if bias is None and softcap is None:
        return None
    added = None if bias is None else _full(bias, q, k)

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        return score if added is None else score + added[b, h, i, j]

    return score_mod


def attention_with_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    causal: bool = False,
    window: Any = None,
    q_offset: Any = None,
    kv_lengths: torch.Tensor | None = None,
    q_segments: torch.Tensor | None = None,
    kv_segments: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    one_batch_axis(q)
    if 0 in q.shape or 0 in k.shape:
        raise NotOffered("no empty axes")
    if q.requires_grad or k.requires_grad or v.requires_grad:
        raise NotOffered("no backward on the CPU")
    offset = torch.as_tensor(0 if q_offset is None else q_offset).expand(q.shape[0])
    rules = _rules(q, k, mask, causal, window, offset, kv_lengths)
    if q_segments is not None:
        keys = q_segments if kv_segments is None else kv_segments
        rules.append(lambda b, h, i, j: (q_segments[b, i] == keys[b, j]) & (q_segments[b, i] >= 0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not compiled
        out, more = flex.flex_attention(
            q, k, v, _score_mod(bias, softcap, q, k), _block_mask(rules, q, k), scale,
            enable_gqa=q.shape[1] != k.shape[1], return_aux=flex.AuxRequest(lse=True),
        )  # fmt: skip
    assert more.lse is not None
    return out, more.lse


@functools.wraps(attention_with_lse)  # the same arguments
def attention(*arrays: torch.Tensor, **arguments: Any) -> torch.Tensor:
    return attention_with_lse(*arrays, **arguments)[0]
