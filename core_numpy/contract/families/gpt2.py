"""GPT-2: learned positions, norm first, query, key and value fused in columns, weights stored (in, out)."""

from __future__ import annotations

from .family import Family, Field
from .operations import COLUMNS, SAME, TURNED, entry, norm
from .rules import PLAIN, dropout

FAMILY = Family(
    name="gpt2",
    architectures={"GPT2LMHeadModel": ("lm", "transformer."), "GPT2Model": ("none", "")},
    fields=(
        Field("vocab_size", "vocab"),
        Field("n_positions", "max_length", 1024),
        Field("n_embd", "width"),
        Field("n_layer", "layers"),
        Field("n_head", "heads"),
        Field("n_inner", "hidden", None),
        Field("activation_function", "activation", "gelu_new", PLAIN),
        Field("layer_norm_epsilon", "norm_eps", 1e-5),
        Field("tie_word_embeddings", "tie_embeddings", True),
    ),
    rules=(dropout("attn_pdrop", "resid_pdrop", "embd_pdrop", default=0.1),),
    fixed={"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,)},
    # The order in which the same product is computed; the heads for multiple choice; n_ctx is n_positions again.
    inert=("reorder_and_upcast_attn", "n_ctx", "summary_type", "summary_use_proj", "summary_activation",
           "summary_proj_to_labels", "summary_first_dropout"),
    tensors=(
        entry("wte.weight", "embedding.weight", SAME),
        entry("wpe.weight", "positions.weight", SAME),
        *norm("h.{i}.ln_1", "blocks.{i}.norm1"),
        entry("h.{i}.attn.c_attn.weight", "blocks.{i}.attention.query.weight blocks.{i}.attention.key.weight "
              "blocks.{i}.attention.value.weight", COLUMNS),
        entry("h.{i}.attn.c_attn.bias", "blocks.{i}.attention.query.bias blocks.{i}.attention.key.bias "
              "blocks.{i}.attention.value.bias", COLUMNS),
        entry("h.{i}.attn.c_proj.weight", "blocks.{i}.attention.output.weight", SAME),
        entry("h.{i}.attn.c_proj.bias", "blocks.{i}.attention.output.bias", SAME),
        *norm("h.{i}.ln_2", "blocks.{i}.norm2"),
        entry("h.{i}.mlp.c_fc.weight", "blocks.{i}.ffn.up.weight", SAME),
        entry("h.{i}.mlp.c_fc.bias", "blocks.{i}.ffn.up.bias", SAME),
        entry("h.{i}.mlp.c_proj.weight", "blocks.{i}.ffn.down.weight", SAME),
        entry("h.{i}.mlp.c_proj.bias", "blocks.{i}.ffn.down.bias", SAME),
        *norm("ln_f", "norm"),
        entry("lm_head.weight", "head.weight", TURNED),
    ),
    aliases={"lm_head.weight": "wte.weight"},
    # The causal triangle and its fill value, which older files carry.
    ignored=(r"h\.\d+\.attn\.(bias|masked_bias)",),
)  # fmt: skip
