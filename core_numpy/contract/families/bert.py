"""BERT: an encoder with the norm last, read up to its hidden states, which no head of ours stands behind."""

from __future__ import annotations

from .family import Family, Field, Rule
from .operations import FOLDED_ROW, SAME, entry, linear, norm
from .rules import PLAIN, dropout

# The pooler and the heads of pre-training stand behind the hidden states, which do not depend on them.
_BEHIND = (r"pooler\..*", r"cls\..*")

FAMILY = Family(
    name="bert",
    architectures={
        "BertModel": ("none", ""),
        "BertForMaskedLM": ("none", "bert."),
        "BertForPreTraining": ("none", "bert."),
    },
    fields=(
        Field("vocab_size", "vocab"),
        Field("hidden_size", "width"),
        Field("intermediate_size", "hidden"),
        Field("num_hidden_layers", "layers"),
        Field("num_attention_heads", "heads"),
        Field("max_position_embeddings", "max_length", 512),
        Field("hidden_act", "activation", "gelu", PLAIN),
        Field("layer_norm_eps", "norm_eps", 1e-12),
    ),
    constants={"kind": "encoder", "norm_place": "post", "embedding_norm": True, "final_norm": False},
    rules=(
        dropout("attention_probs_dropout_prob", "hidden_dropout_prob", default=0.1),
        # Segment 0, the only one our models have; its row goes into the positions.
        Rule(("type_vocab_size",), lambda given: {}, lambda config: {"type_vocab_size": 2}),
    ),
    fixed={"position_embedding_type": ("absolute",)},
    inert=("classifier_dropout", "directionality", "tie_word_embeddings", "pooler_fc_size", "pooler_type",
           "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head"),
    tensors=(
        entry("embeddings.word_embeddings.weight", "embedding.weight", SAME),
        entry("embeddings.position_embeddings.weight embeddings.token_type_embeddings.weight", "positions.weight",
              FOLDED_ROW),
        *norm("embeddings.LayerNorm", "embedding_norm"),
        *linear("encoder.layer.{i}.attention.self.query", "blocks.{i}.attention.query"),
        *linear("encoder.layer.{i}.attention.self.key", "blocks.{i}.attention.key"),
        *linear("encoder.layer.{i}.attention.self.value", "blocks.{i}.attention.value"),
        *linear("encoder.layer.{i}.attention.output.dense", "blocks.{i}.attention.output"),
        *norm("encoder.layer.{i}.attention.output.LayerNorm", "blocks.{i}.norm1"),
        *linear("encoder.layer.{i}.intermediate.dense", "blocks.{i}.ffn.up"),
        *linear("encoder.layer.{i}.output.dense", "blocks.{i}.ffn.down"),
        *norm("encoder.layer.{i}.output.LayerNorm", "blocks.{i}.norm2"),
    ),
    ignored=(r"embeddings\.(position_ids|token_type_ids)", *_BEHIND),
    # The first files call a norm's weight gamma and its bias beta.
    renamed=((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")),
)  # fmt: skip
