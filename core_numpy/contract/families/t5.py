"""T5, plain (1.0) and gated (1.1): an encoder-decoder with relative positions and scores that are not scaled."""

from __future__ import annotations

from typing import Any

from ..config import ModelConfig
from .family import Family, Field, Given, Rule
from .operations import SAME, TURNED, Entry, entry
from .rules import GATED, PLAIN, dropout


def _head() -> Rule:
    """1.0 ties its head to the embeddings and scales the states before it; 1.1 does neither.

    The older files say both with `tie_word_embeddings`; the newer ones have `scale_decoder_outputs` and tie where
    the file has no head.
    """

    def read(given: Given) -> dict[str, Any]:
        tied = given.fields.get("tie_word_embeddings", True) is not False
        scaled = given.fields.get("scale_decoder_outputs", tied)
        scale = given.fields["d_model"] ** -0.5 if scaled else None
        return {"tie_embeddings": (tied and scaled) or "lm_head.weight" not in given.tensors, "logit_scale": scale}

    def write(config: ModelConfig) -> dict[str, Any]:
        scaled = config.logit_scale is not None
        return {"tie_word_embeddings": scaled, "scale_decoder_outputs": scaled}

    return Rule(("tie_word_embeddings", "scale_decoder_outputs"), read, write)


def _feed_forward() -> Rule:
    """`feed_forward_proj`: the activation, "gated-" before it where there are two projections up."""

    def read(given: Given) -> dict[str, Any]:
        said = given.fields.get("feed_forward_proj", "relu")
        gated, name = said.startswith("gated-"), said.removeprefix("gated-")
        # Published 1.1 files say "gated-gelu" and mean the tanh form.
        name = "gelu_new" if said == "gated-gelu" else name
        names = GATED if gated else PLAIN
        if name not in names:
            raise ValueError(f"feed_forward_proj must be {'gated-' if gated else ''}{'|'.join(names)}; got {said!r}")
        for field, value in (("is_gated_act", gated), ("dense_act_fn", name)):
            if given.fields.get(field, value) != value:
                raise ValueError(f"{field} must agree with feed_forward_proj={said!r}; got {given.fields[field]!r}")
        return {"activation": names[name]}

    def write(config: ModelConfig) -> dict[str, Any]:
        if config.activation == "geglu_tanh":
            return {"feed_forward_proj": "gated-gelu", "is_gated_act": True, "dense_act_fn": "gelu_new"}
        if config.activation == "geglu":
            raise ValueError("t5 cannot say activation='geglu': its 'gated-gelu' is the tanh form")
        names = GATED if config.gated else PLAIN
        name = next(theirs for theirs, ours in names.items() if ours == config.activation)
        said = f"gated-{name}" if config.gated else name
        return {"feed_forward_proj": said, "is_gated_act": config.gated, "dense_act_fn": name}

    return Rule(("feed_forward_proj", "is_gated_act", "dense_act_fn"), read, write)


def _layers() -> Rule:
    """Both sides have as many blocks: our configuration has one number for them."""

    def read(given: Given) -> dict[str, Any]:
        layers, decoder = given.fields["num_layers"], given.fields.get("num_decoder_layers")
        if decoder not in (None, layers):
            raise ValueError(f"num_decoder_layers must be num_layers ({layers}): one number serves both; got {decoder}")
        return {"layers": layers}

    def write(config: ModelConfig) -> dict[str, Any]:
        return {"num_layers": config.layers, "num_decoder_layers": config.layers}

    return Rule(("num_layers", "num_decoder_layers"), read, write)


def _attention(stored: str, ours: str) -> tuple[Entry, ...]:
    names = {"q": "query", "k": "key", "v": "value", "o": "output"}
    return tuple(entry(f"{stored}.{a}.weight", f"{ours}.{b}.weight", TURNED) for a, b in names.items())


def _side(side: str, last: int) -> tuple[Entry, ...]:
    """One stack; its feed-forward is sub-layer `last`."""
    layer, block = f"{side}.block.{{i}}.layer", f"{side}.blocks.{{i}}"
    inner = f"{layer}.{last}.DenseReluDense"
    return (
        *_attention(f"{layer}.0.SelfAttention", f"{block}.attention"),
        entry(f"{layer}.0.layer_norm.weight", f"{block}.norm1.weight", SAME),
        entry(f"{inner}.wi.weight", f"{block}.ffn.up.weight", TURNED, when=("gated", False)),
        entry(f"{inner}.wi_0.weight", f"{block}.ffn.gate.weight", TURNED, when=("gated", True)),
        entry(f"{inner}.wi_1.weight", f"{block}.ffn.up.weight", TURNED, when=("gated", True)),
        entry(f"{inner}.wo.weight", f"{block}.ffn.down.weight", TURNED),
        entry(f"{layer}.{last}.layer_norm.weight", f"{block}.norm2.weight", SAME),
        entry(f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight", f"{side}.relative.weight", SAME),
        entry(f"{side}.final_layer_norm.weight", f"{side}.norm.weight", SAME),
    )


FAMILY = Family(
    name="t5",
    architectures={"T5ForConditionalGeneration": ("lm", ""), "T5WithLMHeadModel": ("lm", ""), "T5Model": ("none", "")},
    fields=(
        Field("vocab_size", "vocab"),
        Field("d_model", "width"),
        Field("d_kv", "head_dim"),
        Field("d_ff", "hidden"),
        Field("num_heads", "heads"),
        Field("relative_attention_num_buckets", "relative_buckets", 32),
        Field("relative_attention_max_distance", "relative_max_distance", 128),
        Field("layer_norm_epsilon", "norm_eps", 1e-6),
        Field("n_positions", "max_length", 512),
    ),
    constants={"kind": "encoder_decoder", "positions": "relative", "norm": "rms", "scale": 1.0, "attention_bias": False,
               "ffn_bias": False, "share_embedding": True},
    rules=(_layers(), _head(), _feed_forward(), dropout("dropout_rate", default=0.1)),
    fixed={"is_encoder_decoder": (True,)},
    inert=("initializer_factor", "classifier_dropout"),
    tensors=(
        entry("shared.weight", "decoder.embedding.weight", SAME),
        *_side("encoder", 1),
        *_side("decoder", 2),
        *_attention("decoder.block.{i}.layer.1.EncDecAttention", "decoder.blocks.{i}.cross"),
        entry("decoder.block.{i}.layer.1.layer_norm.weight", "decoder.blocks.{i}.norm3.weight", SAME),
        entry("lm_head.weight", "decoder.head.weight", TURNED),
    ),
    aliases={"encoder.embed_tokens.weight": "shared.weight", "decoder.embed_tokens.weight": "shared.weight",
             "lm_head.weight": "shared.weight"},
    # A table that early files have and that nothing reads.
    ignored=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
)  # fmt: skip
