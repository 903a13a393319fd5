"""BLOOM: ALiBi, a norm on the embeddings, query, key and value fused head by head."""

from __future__ import annotations

from ..config import ModelConfig
from .family import Family, Field, Given, Rule
from .operations import BY_HEAD, SAME, TURNED, entry, linear, norm
from .rules import dropout


def _width() -> Rule:
    """`n_embed` is the older name of `hidden_size`; the feed-forward has four times as many features."""

    def read(given: Given) -> dict[str, int]:
        sizes = {given.fields[name] for name in ("hidden_size", "n_embed") if name in given.fields}
        if len(sizes) != 1:
            raise ValueError(f"hidden_size (or n_embed, its older name) must be given, once; got {sorted(sizes)}")
        return {"width": sizes.pop()}

    return Rule(("hidden_size", "n_embed"), read, lambda config: {"hidden_size": config.width})


def _length() -> Rule:
    """Older files say how long the training texts were; ALiBi itself has no longest length."""

    def write(config: ModelConfig) -> dict[str, int]:
        return {"seq_length": config.max_length}

    return Rule(("seq_length",), lambda given: {"max_length": given.fields.get("seq_length", 2048)}, write)


FAMILY = Family(
    name="bloom",
    architectures={"BloomForCausalLM": ("lm", "transformer."), "BloomModel": ("none", "")},
    fields=(
        Field("vocab_size", "vocab"),
        Field("n_layer", "layers"),
        Field("n_head", "heads"),
        Field("layer_norm_epsilon", "norm_eps", 1e-5),
        Field("tie_word_embeddings", "tie_embeddings", True),
    ),
    constants={"positions": "alibi", "embedding_norm": True, "activation": "gelu_tanh"},
    rules=(_width(), _length(), dropout("attention_dropout", "hidden_dropout")),
    fixed={"apply_residual_connection_post_layernorm": (False,), "n_inner": (None,)},
    # How the same product is computed: over several devices, fused, exact or fast.
    inert=("pretraining_tp", "slow_but_exact", "attention_softmax_in_fp32", "bias_dropout_fusion",
           "masked_softmax_fusion", "offset_alibi", "skip_bias_add", "skip_bias_add_qkv"),
    tensors=(
        entry("word_embeddings.weight", "embedding.weight", SAME),
        *norm("word_embeddings_layernorm", "embedding_norm"),
        *norm("h.{i}.input_layernorm", "blocks.{i}.norm1"),
        *norm("h.{i}.post_attention_layernorm", "blocks.{i}.norm2"),
        entry("h.{i}.self_attention.query_key_value.weight", "blocks.{i}.attention.query.weight "
              "blocks.{i}.attention.key.weight blocks.{i}.attention.value.weight", BY_HEAD),
        entry("h.{i}.self_attention.query_key_value.bias", "blocks.{i}.attention.query.bias "
              "blocks.{i}.attention.key.bias blocks.{i}.attention.value.bias", BY_HEAD),
        *linear("h.{i}.self_attention.dense", "blocks.{i}.attention.output"),
        *linear("h.{i}.mlp.dense_h_to_4h", "blocks.{i}.ffn.up"),
        *linear("h.{i}.mlp.dense_4h_to_h", "blocks.{i}.ffn.down"),
        *norm("ln_f", "norm"),
        entry("lm_head.weight", "head.weight", TURNED),
    ),
    aliases={"lm_head.weight": "word_embeddings.weight"},
)  # fmt: skip
