"""`torch.nn.functional.multi_head_attention_forward` with projections that change nothing: what nn.MultiheadAttention
computes. "fast" asks for no weights, "weights" for the weights of each head; the two are different code."""

from __future__ import annotations

import torch

from .limits import equal_heads, equal_sizes, one_batch_axis, one_of_mask_and_bias

FRAMEWORK = "torch"


def available_kernels() -> dict[str, str]:
    return dict.fromkeys(("fast", "weights"), "")


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: torch.Tensor | None, weights: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    one_batch_axis(q)
    equal_heads(q, k)
    B, H, T, D = q.shape
    S = k.shape[-2]
    equal_sizes(k, v)

    def folded(x: torch.Tensor) -> torch.Tensor:  # (B, H, L, D) -> (L, B, H D)
        return x.permute(2, 0, 1, 3).reshape(x.shape[2], B, H * D)

    if given is not None:
        if given.dtype == torch.bool:  # True = blocked here
            given = ~given
        given = given.expand(B, H, T, S).reshape(B * H, T, S)
    eye = torch.eye(H * D, dtype=q.dtype)
    out, averaged = torch.nn.functional.multi_head_attention_forward(
        folded(q), folded(k), folded(v), H * D, H, None, None, None, None, False, 0.0, eye, None,
        training=False, need_weights=weights, attn_mask=given, use_separate_proj_weight=True,
        q_proj_weight=eye, k_proj_weight=eye, v_proj_weight=eye, average_attn_weights=False,
    )  # fmt: skip
    return out.reshape(T, B, H, D).permute(1, 2, 0, 3), averaged


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    kernel: str = "fast",
) -> torch.Tensor:
    out, _ = _forward(q, k, v, one_of_mask_and_bias(mask, bias), kernel == "weights")
    return out


def attention_weights(
    q: torch.Tensor, k: torch.Tensor, *, mask: torch.Tensor | None = None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    _, weights = _forward(q, k, k, one_of_mask_and_bias(mask, bias), True)
    assert weights is not None
    return weights
