"""See docs/spec.md."""

from .attention import (
    attention,
    attention_weights,
    attention_with_lse,
    available_kernels,
    explain_kernel,
    merge_attention,
)
from .masks import (
    causal_mask,
    combine_masks,
    from_blocked,
    mask_to_bias,
    padding_mask,
    padding_mask_from_tokens,
    positions_from_mask,
    prefix_mask,
    segment_mask,
    sliding_window_mask,
)

__all__ = [
    "attention",
    "attention_weights",
    "attention_with_lse",
    "available_kernels",
    "causal_mask",
    "combine_masks",
    "explain_kernel",
    "from_blocked",
    "mask_to_bias",
    "merge_attention",
    "padding_mask",
    "padding_mask_from_tokens",
    "positions_from_mask",
    "prefix_mask",
    "segment_mask",
    "sliding_window_mask",
]
