"""GPT-NeoX and Pythia: query, key and value fused head by head, parallel branches with a norm each."""

from __future__ import annotations

from .family import Family, Field
from .operations import BY_HEAD, SAME, TURNED, entry, linear, norm
from .rules import PLAIN, dropout, rotary

FAMILY = Family(
    name="gpt_neox",
    architectures={"GPTNeoXForCausalLM": ("lm", "gpt_neox."), "GPTNeoXModel": ("none", "")},
    fields=(
        Field("vocab_size", "vocab"),
        Field("hidden_size", "width"),
        Field("intermediate_size", "hidden"),
        Field("num_hidden_layers", "layers"),
        Field("num_attention_heads", "heads"),
        Field("max_position_embeddings", "max_length", 2048),
        Field("hidden_act", "activation", "gelu", PLAIN),
        Field("layer_norm_eps", "norm_eps", 1e-5),
        Field("attention_bias", "attention_bias", True),
        Field("use_parallel_residual", "norm_place", True, {True: "parallel", False: "pre"}),
        Field("tie_word_embeddings", "tie_embeddings", False),
    ),
    constants={"rotary_layout": "half"},
    rules=(
        rotary(base="rotary_emb_base", part="rotary_pct", default_part=0.25, sized=False),
        dropout("attention_dropout", "hidden_dropout"),
    ),
    inert=("classifier_dropout",),
    tensors=(
        entry("embed_in.weight", "embedding.weight", SAME),
        *norm("layers.{i}.input_layernorm", "blocks.{i}.norm1"),
        *norm("layers.{i}.post_attention_layernorm", "blocks.{i}.norm2"),
        entry(
            "layers.{i}.attention.query_key_value.weight",
            "blocks.{i}.attention.query.weight blocks.{i}.attention.key.weight blocks.{i}.attention.value.weight",
            BY_HEAD,
        ),
        entry(
            "layers.{i}.attention.query_key_value.bias",
            "blocks.{i}.attention.query.bias blocks.{i}.attention.key.bias blocks.{i}.attention.value.bias",
            BY_HEAD,
        ),
        *linear("layers.{i}.attention.dense", "blocks.{i}.attention.output"),
        *linear("layers.{i}.mlp.dense_h_to_4h", "blocks.{i}.ffn.up"),
        *linear("layers.{i}.mlp.dense_4h_to_h", "blocks.{i}.ffn.down"),
        *norm("final_layer_norm", "norm"),
        entry("lm_head.weight", "head.weight", TURNED),
    ),
    aliases={"lm_head.weight": "embed_in.weight"},
    # The causal triangle, its fill value and the frequencies, which older files carry.
    ignored=(r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)", r"rotary_emb\.inv_freq"),
    renamed=((r"^embed_out\.weight$", "lm_head.weight"),),
)
