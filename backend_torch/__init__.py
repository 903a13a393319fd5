"""The definition of `core_numpy`, in PyTorch: the same names, functions on tensors and `torch.nn.Module`s.

Rules and formulas: `core_numpy`. What is native stands in each docstring.
"""

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    from core_numpy.contract.missing import missing

    raise missing("backend_torch needs PyTorch", "torch") from error

from core_numpy.contract import __version__ as __version__
from core_numpy.contract.config import BlockConfig, ModelConfig, RotaryScaling, TrainConfig
from core_numpy.contract.cost import attention_cost, step_cost
from core_numpy.contract.files import load_params, save_params
from core_numpy.contract.interop import import_params

from .arrays import describe, from_numpy, to_numpy, wait
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
from .encodings import (
    alibi_bias,
    alibi_slopes,
    apply_rotary,
    embed,
    permute_rotary,
    relative_bias,
    relative_buckets,
    rotary_frequencies,
    rotary_tables,
    sinusoidal_encoding,
)
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
from .random import bernoulli, bits_at, categorical, fold_in, key, normal, random_bits, split, uniform, uniform_at
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
    "alibi_bias",
    "alibi_slopes",
    "apply_rotary",
    "attention",
    "attention_cost",
    "attention_weights",
    "attention_with_lse",
    "available_kernels",
    "bernoulli",
    "bits_at",
    "categorical",
    "causal_mask",
    "combine_masks",
    "cross_entropy",
    "describe",
    "dropout",
    "embed",
    "explain_kernel",
    "fold_in",
    "from_blocked",
    "from_numpy",
    "gelu",
    "generate",
    "get_params",
    "import_params",
    "key",
    "layer_norm",
    "load_params",
    "loss_and_gradients",
    "mask_to_bias",
    "merge_attention",
    "normal",
    "padding_mask",
    "padding_mask_from_tokens",
    "permute_rotary",
    "positions_from_mask",
    "prefix_mask",
    "random_bits",
    "relative_bias",
    "relative_buckets",
    "relu",
    "rms_norm",
    "rotary_frequencies",
    "rotary_tables",
    "save_params",
    "segment_mask",
    "set_params",
    "silu",
    "sinusoidal_encoding",
    "sliding_window_mask",
    "softmax",
    "split",
    "step_cost",
    "to_numpy",
    "uniform",
    "uniform_at",
    "wait",
]
