"""Small configurations that between them use every field, and random models and batches for them."""

from __future__ import annotations

import numpy as np

from core_numpy import ModelConfig, RotaryScaling, Transformer, get_params, set_params

# Axes of different sizes: V 11, W 6, H 2, hidden 10, max_length 8, B 3, T 5.
# A large eps keeps the fifth derivatives small, on which differences depend.
BASE = {"vocab": 11, "width": 6, "heads": 2, "hidden": 10, "layers": 2, "max_length": 8, "norm_eps": 0.05}
B, T = 3, 5
LONG = RotaryScaling(
    kind="longrope", factor=2.0, original_max_length=4, short_factors=(1.0, 2.0), long_factors=(3.0, 5.0)
)
CONFIGS = {
    "plain": {},
    "post": {"norm_place": "post", "final_norm": False},
    "sandwich": {"norm_place": "sandwich", "norm": "rms"},
    "parallel": {"norm_place": "parallel"},
    "parallel-shared": {"norm_place": "parallel", "shared_norm": True, "positions": "rotary", "head_dim": 4},
    "rms-offset": {"norm": "rms", "unit_offset": True},
    "layer-offset": {"unit_offset": True},
    "no-bias": {"attention_bias": False, "ffn_bias": False, "norm_bias": False},
    "query-bias-only": {"attention_bias": True, "output_bias": False},
    "gelu-tanh": {"activation": "gelu_tanh"},
    "relu": {"activation": "relu"},
    "silu": {"activation": "silu"},
    "swiglu": {"activation": "swiglu"},
    "geglu": {"activation": "geglu", "ffn_bias": False},
    "geglu-tanh": {"activation": "geglu_tanh"},
    "grouped": {"heads": 4, "kv_heads": 2, "head_dim": 3, "value_dim": 5},
    "qk-norm": {"qk_norm": True, "positions": "rotary", "head_dim": 4},
    "qk-norm-offset": {"qk_norm": True, "unit_offset": True, "norm": "rms"},
    "caps": {"softcap": 0.5, "logit_softcap": 0.2, "logit_scale": 3.0, "scale": 0.7},
    "windows": {"layer_windows": ((1, 0), None)},
    "encoder-window": {"kind": "encoder", "window": (1, 2)},
    "sinks": {"sinks": True, "heads": 3, "kv_heads": 1},
    "tied": {"tie_embeddings": True, "embedding_scale": 2.5, "embedding_norm": True, "head_bias": True},
    "sinusoidal": {"positions": "sinusoidal"},
    "rotary-part": {"positions": "rotary", "head_dim": 6, "rotary_dim": 4, "rotary_layout": "interleaved"},
    "rotary-longrope": {"positions": "rotary", "head_dim": 4, "rotary_scaling": LONG},
    "alibi": {"positions": "alibi", "heads": 3},
    "relative": {"positions": "relative", "relative_buckets": 6, "relative_max_distance": 4},
    "relative-encoder": {"positions": "relative", "relative_buckets": 8, "relative_max_distance": 4, "kind": "encoder"},
    "no-positions": {"positions": "none"},
    "no-layers": {"layers": 0, "positions": "relative", "relative_buckets": 4},
    "mean": {"head": "classifier", "classes": 4, "kind": "encoder"},
    "first": {"head": "classifier", "classes": 4, "pool": "first", "head_bias": False},
    "last": {"head": "classifier", "classes": 4, "pool": "last"},
    "encoder-decoder": {"kind": "encoder_decoder", "qk_norm": True, "sinks": True},
    "encoder-decoder-post": {"kind": "encoder_decoder", "norm_place": "post", "positions": "sinusoidal"},
    "encoder-decoder-shared": {
        "kind": "encoder_decoder", "share_embedding": True, "tie_embeddings": True, "positions": "relative",
        "relative_buckets": 4, "relative_max_distance": 4, "attention_bias": False, "norm": "rms",
    },
    "dropout": {"dropout": 0.3, "positions": "rotary", "head_dim": 4},
    "dropout-encoder-decoder": {"dropout": 0.3, "kind": "encoder_decoder", "norm_place": "post"},
    "dropout-sandwich": {"dropout": 0.3, "norm_place": "sandwich"},
}  # fmt: skip


def config_of(name, **changes):
    return ModelConfig(**{**BASE, **CONFIGS[name], **changes})


def make(config, seed=0, dtype="float64"):
    """A model whose every parameter is random: zeros and ones would hide what belongs to biases, norms and sinks."""
    model = Transformer(config, seed=seed, dtype=dtype)
    rng = np.random.default_rng(seed)
    params = get_params(model)
    noise = {name: 0.4 * rng.standard_normal(p.shape) for name, p in params.items()}
    set_params(model, {name: (p + noise[name]).astype(p.dtype) for name, p in params.items()})
    return model


def batch_of(config, seed=0):
    rng = np.random.default_rng(seed)
    classifier = config.head == "classifier"
    targets = rng.integers(0, config.classes if classifier else config.vocab, (B,) if classifier else (B, T))
    if not classifier:
        targets[0, 1] = targets[2] = -100
    batch = {"tokens": rng.integers(0, config.vocab, (B, T)), "targets": targets}
    if config.kind == "encoder_decoder":
        batch["context"] = rng.integers(0, config.vocab, (B, 7))
        batch["context_lengths"] = np.array([7, 2, 4])
    elif classifier:
        batch["lengths"] = np.array([5, 2, 4])
    else:
        batch["segments"] = np.array([[0, 0, 1, 1, 1], [0, 0, 0, 0, -1], [2, 2, 2, 2, 2]])
    return batch
