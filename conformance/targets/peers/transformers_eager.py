"""`transformers`' eager attention function (Llama's), with masks in the additive form that its models make."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from transformers.models.llama.modeling_llama import eager_attention_forward

from .limits import one_batch_axis, one_of_mask_and_bias

FRAMEWORK = "torch"
# Its softmax is in float32 whatever comes in (`dtype=torch.float32` in its source): it does not offer float64.
DTYPES = ("float32", "bfloat16", "float16")


def _call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    one_batch_axis(q)
    given = one_of_mask_and_bias(mask, bias)
    if mask is not None:  # transformers.masking_utils.eager_mask
        given = torch.where(mask, torch.tensor(0.0, dtype=q.dtype), torch.finfo(q.dtype).min)
    module: Any = SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], training=False)
    out, weights = eager_attention_forward(
        module, q, k, v, given, scaling=1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    )
    return out.transpose(1, 2), weights


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    return _call(q, k, v, mask, bias, scale)[0]


def attention_weights(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    return _call(q, k, k, mask, bias, scale)[1]
