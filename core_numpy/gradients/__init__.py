"""The hand-derived gradient of each function, as vector-Jacobian products named `<name>_vjp`."""

from .attention import attention_vjp, attention_weights_vjp, attention_with_lse_vjp, merge_attention_vjp
from .block import block_vjp
from .encodings import apply_rotary_vjp, embed_vjp, permute_rotary_vjp, relative_bias_vjp, rotary_tables_vjp
from .layers import (
    cross_entropy_vjp,
    dropout_vjp,
    gelu_vjp,
    layer_norm_vjp,
    linear_vjp,
    relu_vjp,
    rms_norm_vjp,
    silu_vjp,
    softmax_vjp,
)

__all__ = [
    "apply_rotary_vjp",
    "attention_vjp",
    "attention_weights_vjp",
    "attention_with_lse_vjp",
    "block_vjp",
    "cross_entropy_vjp",
    "dropout_vjp",
    "embed_vjp",
    "gelu_vjp",
    "layer_norm_vjp",
    "linear_vjp",
    "merge_attention_vjp",
    "permute_rotary_vjp",
    "relative_bias_vjp",
    "relu_vjp",
    "rms_norm_vjp",
    "rotary_tables_vjp",
    "silu_vjp",
    "softmax_vjp",
]
