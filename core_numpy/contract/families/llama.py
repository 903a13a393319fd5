"""Llama 1 to 3 and the families that share its names: Mistral, Qwen2, Qwen3, Gemma, Gemma-2."""

from __future__ import annotations

from ..config import ModelConfig
from .family import Family, Field, Given, Rule
from .operations import SAME, TURNED, Entry, entry, linear, norm
from .rules import GATED, dropout, rotary, window_by_layer, window_everywhere

_COMMON = (
    Field("vocab_size", "vocab"),
    Field("hidden_size", "width"),
    Field("intermediate_size", "hidden"),
    Field("num_hidden_layers", "layers"),
    Field("num_attention_heads", "heads"),
    Field("max_position_embeddings", "max_length", 2048),
    Field("rms_norm_eps", "norm_eps", 1e-6),
)  # fmt: skip
_SILU = Field("hidden_act", "activation", "silu", GATED)
_NO_BIAS = {"attention_bias": False, "ffn_bias": False}
_ATTENTION = (
    *linear("layers.{i}.self_attn.q_proj", "blocks.{i}.attention.query"),
    *linear("layers.{i}.self_attn.k_proj", "blocks.{i}.attention.key"),
    *linear("layers.{i}.self_attn.v_proj", "blocks.{i}.attention.value"),
    *linear("layers.{i}.self_attn.o_proj", "blocks.{i}.attention.output"),
    entry("layers.{i}.self_attn.q_norm.weight", "blocks.{i}.attention.query_norm.weight", SAME),
    entry("layers.{i}.self_attn.k_norm.weight", "blocks.{i}.attention.key_norm.weight", SAME),
)
_FEED_FORWARD = (
    *linear("layers.{i}.mlp.gate_proj", "blocks.{i}.ffn.gate"),
    *linear("layers.{i}.mlp.up_proj", "blocks.{i}.ffn.up"),
    *linear("layers.{i}.mlp.down_proj", "blocks.{i}.ffn.down"),
)
_ENDS = (
    entry("embed_tokens.weight", "embedding.weight", SAME),
    entry("norm.weight", "norm.weight", SAME),
    entry("lm_head.weight", "head.weight", TURNED),
)
_TENSORS: tuple[Entry, ...] = (
    *_ENDS,
    *_ATTENTION,
    *_FEED_FORWARD,
    *norm("layers.{i}.input_layernorm", "blocks.{i}.norm1"),
    *norm("layers.{i}.post_attention_layernorm", "blocks.{i}.norm2"),
)


def _family(name: str, stem: str, **tables: object) -> Family:
    """What all of them have: names, RMS norm first, rotary positions by halves."""
    constants = {"norm": "rms", "rotary_layout": "half", **tables.pop("constants", {})}  # type: ignore[dict-item]
    return Family(
        name=name,
        architectures={f"{stem}ForCausalLM": ("lm", "model."), f"{stem}Model": ("none", "")},
        constants=constants,
        aliases={"lm_head.weight": "embed_tokens.weight"},
        ignored=(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",),
        **{"tensors": _TENSORS, **tables},  # type: ignore[arg-type]
    )


def _scale_of_width() -> Rule:
    """Gemma multiplies its token embeddings by the root of the width; no field says so."""
    return Rule((), lambda given: {"embedding_scale": given.fields["hidden_size"] ** 0.5}, lambda config: {})


def _gemma_activation() -> Rule:
    """Gemma's first files say "gelu" and mean the tanh form, as the library that reads them does."""

    def read(given: Given) -> dict[str, str]:
        name = given.fields.get("hidden_activation") or given.fields.get("hidden_act") or "gelu_pytorch_tanh"
        name = "gelu_pytorch_tanh" if name == "gelu" else name
        if name not in GATED:
            raise ValueError(f"hidden_act must be one of {', '.join(map(repr, GATED))}; got {name!r}")
        return {"activation": GATED[name]}

    def write(config: ModelConfig) -> dict[str, str]:
        name = {"geglu_tanh": "gelu_pytorch_tanh", "swiglu": "silu"}.get(config.activation)
        if name is None:
            raise ValueError(f"gemma cannot say activation={config.activation!r}")
        return {"hidden_act": name, "hidden_activation": name}

    return Rule(("hidden_act", "hidden_activation"), read, write)


def _query_scalar() -> Rule:
    """Gemma-2 divides the scores by the root of a number of its own."""

    def write(config: ModelConfig) -> dict[str, int]:
        scale = config.key_size**-0.5 if config.scale is None else config.scale
        return {"query_pre_attn_scalar": round(scale**-2) if scale > 0.0 else 0}

    def read(given: Given) -> dict[str, float]:
        scalar = given.fields.get("query_pre_attn_scalar", 256)
        if not isinstance(scalar, int | float) or not scalar > 0:
            raise ValueError(f"query_pre_attn_scalar must be a positive number; got {scalar!r}")
        return {"scale": scalar**-0.5}

    return Rule(("query_pre_attn_scalar",), read, write)


LLAMA = _family(
    "llama", "Llama",
    fields=(
        *_COMMON,
        _SILU,
        Field("num_key_value_heads", "kv_heads", None),
        Field("head_dim", "head_dim", None),
        Field("attention_bias", "attention_bias", False),
        Field("mlp_bias", "ffn_bias", False),
        Field("tie_word_embeddings", "tie_embeddings", False),
    ),
    rules=(rotary(), dropout("attention_dropout", others=(0.0,))),
    # How training was spread over devices; the product is the same.
    inert=("pretraining_tp",),
)  # fmt: skip
MISTRAL = _family(
    "mistral", "Mistral",
    fields=(
        *_COMMON,
        _SILU,
        Field("num_key_value_heads", "kv_heads", 8),
        Field("head_dim", "head_dim", None),
        Field("tie_word_embeddings", "tie_embeddings", False),
    ),
    constants=_NO_BIAS,
    rules=(rotary(), dropout("attention_dropout", others=(0.0,)), window_everywhere(4096)),
)  # fmt: skip
QWEN2 = _family(
    "qwen2", "Qwen2",
    fields=(
        *_COMMON,
        _SILU,
        Field("num_key_value_heads", "kv_heads", 32),
        Field("head_dim", "head_dim", None),
        Field("tie_word_embeddings", "tie_embeddings", False),
    ),
    constants={"attention_bias": True, "output_bias": False, "ffn_bias": False},
    rules=(rotary(), dropout("attention_dropout", others=(0.0,)),
           window_by_layer(default=4096, switch=True, alternating=False)),
)  # fmt: skip
QWEN3 = _family(
    "qwen3", "Qwen3",
    fields=(
        *_COMMON,
        _SILU,
        Field("num_key_value_heads", "kv_heads", 32),
        Field("head_dim", "head_dim", 128),
        Field("attention_bias", "attention_bias", False),
        Field("tie_word_embeddings", "tie_embeddings", False),
    ),
    constants={"ffn_bias": False, "qk_norm": True},
    rules=(rotary(), dropout("attention_dropout", others=(0.0,)),
           window_by_layer(default=4096, switch=True, alternating=False)),
)  # fmt: skip
GEMMA = _family(
    "gemma", "Gemma",
    fields=(
        *_COMMON,
        Field("num_key_value_heads", "kv_heads", 16),
        Field("head_dim", "head_dim", 256),
        Field("attention_bias", "attention_bias", False),
        Field("tie_word_embeddings", "tie_embeddings", True),
    ),
    constants={"ffn_bias": False, "unit_offset": True},
    rules=(_gemma_activation(), _scale_of_width(), rotary(), dropout("attention_dropout", others=(0.0,))),
    fixed={"use_bidirectional_attention": (None, False)},
)  # fmt: skip
GEMMA2 = _family(
    "gemma2", "Gemma2",
    fields=(
        *_COMMON,
        Field("num_key_value_heads", "kv_heads", 4),
        Field("head_dim", "head_dim", 256),
        Field("attention_bias", "attention_bias", False),
        Field("final_logit_softcapping", "logit_softcap", 30.0),
        Field("attn_logit_softcapping", "softcap", 50.0),
        Field("tie_word_embeddings", "tie_embeddings", True),
    ),
    constants={"ffn_bias": False, "unit_offset": True, "norm_place": "sandwich"},
    rules=(_gemma_activation(), _scale_of_width(), _query_scalar(), rotary(),
           dropout("attention_dropout", others=(0.0,)),
           window_by_layer(default=4096, switch=False, alternating=True)),
    fixed={"use_bidirectional_attention": (None, False)},
    # Which cache a generating program should take.
    inert=("cache_implementation",),
    tensors=(
        *_ENDS,
        *_ATTENTION,
        *_FEED_FORWARD,
        *norm("layers.{i}.input_layernorm", "blocks.{i}.norm1"),
        *norm("layers.{i}.post_attention_layernorm", "blocks.{i}.norm1_post"),
        *norm("layers.{i}.pre_feedforward_layernorm", "blocks.{i}.norm2"),
        *norm("layers.{i}.post_feedforward_layernorm", "blocks.{i}.norm2_post"),
    ),
)  # fmt: skip
