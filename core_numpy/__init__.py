"""The definition: attention, masks, encodings, layers, the transformer block and its training, in NumPy.

Every function computes in float64 and rounds once; its docstring has the formula and the numbered rules. The gradients,
derived by hand, are `<name>_vjp`. `backend_torch` and `backend_jax` offer the same names in their framework.
"""

# ruff: noqa: F405 - what the star below brings is compared with the list by a test

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Not on demand: Python would put the module of that name in the function's place.
from .attention import (
    attention,
    attention_weights,
    attention_with_lse,
    available_kernels,
    explain_kernel,
    merge_attention,
)
from .contract import __version__ as __version__

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
    "alibi_bias",
    "alibi_slopes",
    "apply_rotary",
    "apply_rotary_vjp",
    "attention",
    "attention_cost",
    "attention_vjp",
    "attention_weights",
    "attention_weights_vjp",
    "attention_with_lse",
    "attention_with_lse_vjp",
    "available_kernels",
    "bernoulli",
    "bits_at",
    "block_vjp",
    "categorical",
    "causal_mask",
    "combine_masks",
    "cross_entropy",
    "cross_entropy_vjp",
    "dropout",
    "dropout_vjp",
    "embed",
    "embed_vjp",
    "explain_kernel",
    "fold_in",
    "from_blocked",
    "gelu",
    "gelu_vjp",
    "generate",
    "get_params",
    "import_params",
    "key",
    "layer_norm",
    "layer_norm_vjp",
    "linear_vjp",
    "load_params",
    "loss_and_gradients",
    "mask_to_bias",
    "merge_attention",
    "merge_attention_vjp",
    "normal",
    "padding_mask",
    "padding_mask_from_tokens",
    "permute_rotary",
    "permute_rotary_vjp",
    "positions_from_mask",
    "prefix_mask",
    "random_bits",
    "relative_bias",
    "relative_bias_vjp",
    "relative_buckets",
    "relu",
    "relu_vjp",
    "rms_norm",
    "rms_norm_vjp",
    "rotary_frequencies",
    "rotary_tables",
    "rotary_tables_vjp",
    "save_params",
    "segment_mask",
    "set_params",
    "silu",
    "silu_vjp",
    "sinusoidal_encoding",
    "sliding_window_mask",
    "softmax",
    "softmax_vjp",
    "split",
    "step_cost",
    "uniform",
    "uniform_at",
]

if TYPE_CHECKING:
    from .public import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        """All that is public, and the modules, when the first is asked for: the backends share the contract alone."""
        # Asked for again is what there is not. Names with underscores are what tools ask every module for.
        if "public" not in globals() and not name.startswith("__"):
            public = import_module(".public", __name__)
            globals().update({each: getattr(public, each) for each in __all__})
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
