"""`x_transformers.attend.Attend`: "eager" is its own formula, "flash" what it hands to torch."""

from __future__ import annotations

from typing import Any

import torch
from x_transformers.attend import Attend

from .limits import aligned_bottom_right, one_batch_axis

FRAMEWORK = "torch"
# Its own softmax is in float32 whatever comes in: it does not offer float64.
DTYPES = ("float32", "bfloat16", "float16")


def available_kernels() -> dict[str, str]:
    return dict.fromkeys(("eager", "flash"), "")


def _call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    causal: bool,
    q_offset: Any,
    sinks: torch.Tensor | None,
    scale: float | None,
    softcap: float | None,
    kernel: str,
) -> tuple[torch.Tensor, Any]:
    one_batch_axis(q)
    aligned_bottom_right(causal, q, k, q_offset)
    if kernel == "flash" and (sinks is not None or softcap is not None):
        raise ValueError("kernel='flash' does not serve this call: no sinks, no soft-cap")
    more: dict[str, Any] = {} if softcap is None else {"softclamp_logits": True, "logit_softclamp_value": softcap}
    attend = Attend(
        causal=causal,
        scale=scale,
        flash=kernel == "flash",
        heads=q.shape[1],
        head_learned_sink=sinks is not None,
        **more,
    )
    if sinks is not None:  # its parameter, so that the gradient reaches the argument
        del attend.head_attn_sink
        attend.head_attn_sink = sinks
    if mask is not None and mask.ndim == 2:
        mask = mask[None, None]
    if bias is not None and bias.ndim == 2:
        bias = bias[None, None]
    return attend(q, k, v, mask=mask, attn_bias=bias)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    causal: bool = False,
    q_offset: Any = None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    kernel: str = "eager",
) -> torch.Tensor:
    return _call(q, k, v, mask, bias, causal, q_offset, sinks, scale, softcap, kernel)[0]
