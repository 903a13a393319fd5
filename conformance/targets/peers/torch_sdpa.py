"""`torch.nn.functional.scaled_dot_product_attention`, each of its CPU kernels."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..protocol import NotOffered
from .limits import aligned_top_left, one_of_mask_and_bias

FRAMEWORK = "torch"
_BACKENDS = {"math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION}


def available_kernels() -> dict[str, str]:
    return dict.fromkeys(_BACKENDS, "")


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
    kernel: str = "auto",
) -> torch.Tensor:
    aligned_top_left(causal, q, k, q_offset)
    given = one_of_mask_and_bias(mask, bias)
    if causal and given is not None:
        raise NotOffered("a causal flag or a mask, not both")
    grouped = q.ndim > 2 and q.shape[-3] != k.shape[-3]
    chosen = contextlib.nullcontext() if kernel == "auto" else sdpa_kernel([_BACKENDS[kernel]])
    try:
        with chosen, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # why a kernel cannot serve; the error below says that it cannot
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=given, is_causal=causal, scale=scale, enable_gqa=grouped
            )
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
        raise ValueError(f"kernel={kernel!r} does not serve this call: {error}") from error
