"""Phi 1 to 2: a parallel block with one norm for both branches, partial rotary positions, a head with a bias."""

from __future__ import annotations

from .family import Family, Field
from .operations import SAME, TURNED, entry, linear, norm
from .rules import PLAIN, dropout, rotary

FAMILY = Family(
    name="phi",
    architectures={"PhiForCausalLM": ("lm", "model."), "PhiModel": ("none", "")},
    fields=(
        Field("vocab_size", "vocab"),
        Field("hidden_size", "width"),
        Field("intermediate_size", "hidden"),
        Field("num_hidden_layers", "layers"),
        Field("num_attention_heads", "heads"),
        Field("num_key_value_heads", "kv_heads", None),
        Field("max_position_embeddings", "max_length", 2048),
        Field("hidden_act", "activation", "gelu_new", PLAIN),
        Field("layer_norm_eps", "norm_eps", 1e-5),
        Field("tie_word_embeddings", "tie_embeddings", False),
    ),
    constants={"norm_place": "parallel", "shared_norm": True, "head_bias": True, "rotary_layout": "half"},
    rules=(rotary(default_part=0.5, sized=False), dropout("attention_dropout", "resid_pdrop", "embd_pdrop")),
    # Its norm of queries and keys is a layer norm with a bias, which ours is not.
    fixed={"qk_layernorm": (False,)},
    tensors=(
        entry("embed_tokens.weight", "embedding.weight", SAME),
        *linear("layers.{i}.self_attn.q_proj", "blocks.{i}.attention.query"),
        *linear("layers.{i}.self_attn.k_proj", "blocks.{i}.attention.key"),
        *linear("layers.{i}.self_attn.v_proj", "blocks.{i}.attention.value"),
        *linear("layers.{i}.self_attn.dense", "blocks.{i}.attention.output"),
        *linear("layers.{i}.mlp.fc1", "blocks.{i}.ffn.up"),
        *linear("layers.{i}.mlp.fc2", "blocks.{i}.ffn.down"),
        *norm("layers.{i}.input_layernorm", "blocks.{i}.norm1"),
        *norm("final_layernorm", "norm"),
        entry("lm_head.weight", "head.weight", TURNED),
        entry("lm_head.bias", "head.bias", SAME),
    ),
    aliases={"lm_head.weight": "embed_tokens.weight"},
    ignored=(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",),
)
