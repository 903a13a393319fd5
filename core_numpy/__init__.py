"""See docs/spec.md."""

from .attention import (
    attention,
    attention_weights,
    attention_with_lse,
    available_kernels,
    explain_kernel,
    merge_attention,
)
from .block import Block, FeedForward, MultiHeadAttention
from .cache import KVCache, generate
from .contract.config import BlockConfig, ModelConfig, RotaryScaling, TrainConfig
from .layers import cross_entropy, dropout, gelu, layer_norm, relu, rms_norm, silu, softmax
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
from .model import Transformer, get_params, set_params
from .training import Trainer, loss_and_gradients

__all__ = [
    "Block",
    "BlockConfig",
    "FeedForward",
    "KVCache",
    "ModelConfig",
    "MultiHeadAttention",
    "RotaryScaling",
    "TrainConfig",
    "Trainer",
    "Transformer",
    "attention",
    "attention_weights",
    "attention_with_lse",
    "available_kernels",
    "causal_mask",
    "combine_masks",
    "cross_entropy",
    "dropout",
    "explain_kernel",
    "from_blocked",
    "gelu",
    "generate",
    "get_params",
    "layer_norm",
    "loss_and_gradients",
    "mask_to_bias",
    "merge_attention",
    "padding_mask",
    "padding_mask_from_tokens",
    "positions_from_mask",
    "prefix_mask",
    "relu",
    "rms_norm",
    "segment_mask",
    "set_params",
    "silu",
    "sliding_window_mask",
    "softmax",
]
