"""See docs/spec.md."""

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
    "causal_mask",
    "combine_masks",
    "from_blocked",
    "mask_to_bias",
    "padding_mask",
    "padding_mask_from_tokens",
    "positions_from_mask",
    "prefix_mask",
    "segment_mask",
    "sliding_window_mask",
]
