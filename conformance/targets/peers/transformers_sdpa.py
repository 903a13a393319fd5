"""`transformers`' "sdpa" attention function, as its models call it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..protocol import NotOffered
from .limits import aligned_top_left, one_batch_axis, one_of_mask_and_bias

FRAMEWORK = "torch"


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    causal: bool = False,
    q_offset: Any = None,
    scale: float | None = None,
) -> torch.Tensor:
    one_batch_axis(q)
    aligned_top_left(causal, q, k, q_offset)
    given = one_of_mask_and_bias(mask, bias)
    if causal and given is not None:
        raise NotOffered("a causal flag or a mask, not both")
    module: Any = SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], is_causal=causal, training=False)
    out, _ = sdpa_attention_forward(module, q, k, v, given, dropout=0.0, scaling=scale, is_causal=causal)
    return out.transpose(1, 2)
