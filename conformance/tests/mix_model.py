"""Small model configurations and batches that between them use every field, for tests that compare two backends."""

from __future__ import annotations

import numpy as np

import core_numpy as C

BASE = {"vocab": 13, "width": 12, "heads": 4, "kv_heads": 2, "head_dim": 6, "hidden": 10, "layers": 2, "max_length": 9}
YARN = C.RotaryScaling(kind="yarn", factor=4.0, original_max_length=4)
DYNAMIC = C.RotaryScaling(kind="dynamic", factor=2.0, original_max_length=3)
LONGROPE = C.RotaryScaling(
    kind="longrope", factor=2.0, original_max_length=4, short_factors=(1.0, 1.5), long_factors=(2.0, 3.0)
)
# Each line is one configuration: what it changes in BASE. All axes differ; the square one is last.
CONFIGS = {
    "plain": {},
    "rotary": {"positions": "rotary"},
    "interleaved": {"positions": "rotary", "rotary_layout": "interleaved", "rotary_dim": 4, "rotary_base": 50.0},
    "yarn": {"positions": "rotary", "rotary_scaling": YARN},
    "dynamic": {"positions": "rotary", "rotary_scaling": DYNAMIC},
    "longrope": {"positions": "rotary", "rotary_dim": 4, "rotary_scaling": LONGROPE},
    "alibi": {"positions": "alibi", "heads": 6, "kv_heads": 3},
    "relative": {"positions": "relative", "relative_buckets": 6, "relative_max_distance": 8},
    "relative encoder": {"positions": "relative", "relative_buckets": 8, "relative_max_distance": 7, "kind": "encoder"},
    "sinusoidal": {"positions": "sinusoidal", "embedding_scale": 3.5},
    "none": {"positions": "none"},
    "post": {"norm_place": "post", "final_norm": False},
    "sandwich": {"norm_place": "sandwich", "norm": "rms", "unit_offset": True, "norm_eps": 1e-2},
    "parallel": {"norm_place": "parallel", "activation": "relu"},
    "parallel shared": {"norm_place": "parallel", "shared_norm": True},
    "rms": {"norm": "rms", "norm_eps": 1e-3, "activation": "silu"},
    "layer offset": {"unit_offset": True, "norm_bias": False},
    "swiglu": {"activation": "swiglu", "attention_bias": False, "ffn_bias": False},
    "geglu": {"activation": "geglu", "attention_bias": False, "output_bias": True},
    "geglu tanh": {"activation": "geglu_tanh", "attention_bias": True, "output_bias": False},
    "gelu tanh": {"activation": "gelu_tanh", "ffn_bias": False},
    "value dim": {"value_dim": 5, "kv_heads": 1},
    "q/k norm": {"qk_norm": True, "positions": "rotary", "norm_eps": 1e-2, "unit_offset": True},
    "soft caps": {"softcap": 0.7, "logit_softcap": 0.3, "logit_scale": 2.5, "scale": 0.9},
    "windows": {"layer_windows": ((2, 0), None), "window": (1, 1)},
    "window both ways": {"kind": "encoder", "window": (1, 2)},
    "sinks": {"sinks": True, "positions": "rotary"},
    "tied": {"tie_embeddings": True, "embedding_norm": True, "head_bias": True},
    "tied bare": {"tie_embeddings": True},
    "head bias": {"head_bias": True},
    "classifier": {"kind": "encoder", "head": "classifier", "classes": 5, "pool": "mean"},
    "classifier first": {"head": "classifier", "classes": 5, "pool": "first"},
    "classifier last": {"head": "classifier", "classes": 5, "pool": "last", "head_bias": False},
    "hidden": {"head": "none", "final_norm": False},
    "no layers": {"layers": 0},
    "pair": {"kind": "encoder_decoder"},
    "pair shared": {
        "kind": "encoder_decoder", "share_embedding": True, "tie_embeddings": True, "positions": "relative",
        "relative_buckets": 8, "relative_max_distance": 7, "norm": "rms", "scale": 1.0, "attention_bias": False,
    },
    "pair post": {"kind": "encoder_decoder", "norm_place": "post", "positions": "rotary", "sinks": True},
    "square": {"width": 4, "heads": 4, "kv_heads": 4, "head_dim": 4, "hidden": 4, "vocab": 4, "layers": 4},
}  # fmt: skip


def config_of(name, **more):
    return C.ModelConfig(**{**BASE, **CONFIGS[name], **more})


def batch_of(config, *, lengths=True, segments=False, seed=1):
    rng = np.random.default_rng(seed)
    rows, T, S = (3, 4, 4) if config.width == 4 else (3, 7, 5)
    shape = (rows,) if config.head == "classifier" else (rows, T)
    classes = config.classes if config.head == "classifier" else config.vocab
    batch = {"tokens": rng.integers(0, config.vocab, (rows, T)), "targets": rng.integers(0, classes, shape)}
    batch["targets"].flat[::4] = -100
    if lengths:
        batch["lengths"] = np.array([T, 3, 1])
    if segments:
        batch["segments"] = np.where(np.arange(T) < 4, 0, 1) * np.ones((rows, 1), dtype=np.int64)
        batch["segments"][1, -2:] = -1
    if config.kind == "encoder_decoder":
        batch["context"] = rng.integers(0, config.vocab, (rows, S))
        if lengths:
            batch["context_lengths"] = np.array([S, 0, 2])
    return batch


def call_of(batch):
    """The batch's fields by the names of a model's keywords."""
    names = {"lengths": "kv_lengths"}
    return {names.get(name, name): x for name, x in batch.items() if name not in ("tokens", "targets")}


def moved(params, seed=7):
    """Parameters moved so that no bias is 0 and no gain 1."""
    rng = np.random.default_rng(seed)
    return {name: (x + 0.3 * rng.standard_normal(x.shape)).astype(x.dtype) for name, x in params.items()}
