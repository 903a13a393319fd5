"""What a family is: tables, and the two directions in which its configuration is read from them.

Every field of a `config.json` is read by a `Field` or a `Rule`, or must have one of the values in `fixed`, or is known
not to touch a number (`inert`). Any other is refused: a field that is read by nobody is a model that is not theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..config import ModelConfig
from .operations import Entry

REQUIRED = object()
# Fields of every `config.json` that no number of a forward pass depends on: bookkeeping, ids of special tokens,
# initial values, labels, defaults of generation and of training tools.
INERT = frozenset((
    "_attn_implementation_autoset", "_name_or_path", "_commit_hash", "architectures", "attn_implementation",
    "bad_words_ids", "begin_suppress_tokens", "bos_token_id", "chunk_size_feed_forward", "decoder_start_token_id",
    "diversity_penalty", "do_sample", "dtype", "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id",
    "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id",
    "gradient_checkpointing", "id2label", "initializer_range", "label2id", "length_penalty", "max_length",
    "max_new_tokens", "min_length", "model_type", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
    "num_labels", "num_return_sequences", "output_attentions", "output_hidden_states", "output_past", "output_scores",
    "pad_token_id", "prefix", "problem_type", "remove_invalid_values", "repetition_penalty", "return_dict",
    "return_dict_in_generate", "sep_token_id", "suppress_tokens", "task_specific_params", "temperature",
    "tf_legacy_loss", "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript", "transformers_version",
    "typical_p", "unk_token_id", "use_bfloat16", "use_cache",
))  # fmt: skip
# And those of every `config.json` that only have one value we can say.
FIXED: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "is_decoder": (False,),
    "pruned_heads": ({}, None),
    "tie_encoder_decoder": (False,),
}


@dataclass(frozen=True)
class Given:
    """What a folder holds: the fields of its `config.json`, the names of its tensors, the head they are for."""

    fields: Mapping[str, Any]
    tensors: frozenset[str]
    head: str


@dataclass(frozen=True)
class Field:
    """One field of theirs for one of ours; `values` translates (theirs -> ours, the first of several is written)."""

    stored: str
    ours: str
    default: Any = REQUIRED
    values: Mapping[Any, Any] | None = None


@dataclass(frozen=True)
class Rule:
    """Fields that only mean something together. read: what is given -> our fields; write: our config -> theirs."""

    stored: tuple[str, ...]
    read: Callable[[Given], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]


@dataclass(frozen=True)
class Family:
    """`architectures` maps their class to our head, and to the prefix its tensors have before the base model's names.

    `constants` are our fields that all of the family have. `aliases` are second names of a tied tensor, `ignored`
    regular expressions of tensors that are no parameters of ours, `renamed` pairs (old name's expression, new text).
    """

    name: str
    architectures: Mapping[str, tuple[str, str]]
    fields: tuple[Field, ...]
    tensors: tuple[Entry, ...]
    rules: tuple[Rule, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    inert: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()


def read_config(family: Family, given: Given) -> ModelConfig:
    """Our configuration of what a folder holds; every field of theirs is read or refused by name."""
    stored = given.fields
    ours: dict[str, Any] = {"head": given.head, **family.constants}
    known = set(INERT) | set(family.inert)
    fixed = {**FIXED, **family.fixed}
    for line in family.fields:
        ours[line.ours] = _translated(family, line, stored)
        known.add(line.stored)
    for rule in family.rules:
        ours |= rule.read(given)
        known.update(rule.stored)
    for name, values in fixed.items():
        if name in stored and name not in known and stored[name] not in values:
            raise ValueError(
                f"{name} must be {' or '.join(map(repr, values))} for {family.name}: no field of ours says "
                f"anything else; got {stored[name]!r}"
            )
    unknown = sorted(set(stored) - known - set(fixed))
    if unknown:
        raise ValueError(
            f"{family.name} has no use for {', '.join(f'{name} = {stored[name]!r}' for name in unknown)}: "
            "whether the numbers depend on it is not known"
        )
    if given.head != "lm":
        ours |= {"tie_embeddings": False, "head_bias": None, "logit_scale": None, "logit_softcap": None}
    return ModelConfig(**ours)


def _translated(family: Family, line: Field, stored: Mapping[str, Any]) -> Any:
    value = stored.get(line.stored, line.default)
    if value is REQUIRED:
        raise ValueError(f"{line.stored} is missing, which {family.name} cannot do without")
    if line.values is None:
        return value
    if value not in line.values:
        raise ValueError(f"{line.stored} must be one of {', '.join(map(repr, line.values))}; got {value!r}")
    return line.values[value]


def write_config(family: Family, config: ModelConfig, architecture: str, tensors: frozenset[str]) -> dict[str, Any]:
    """Their fields for a configuration of ours, or a ValueError naming what the family has no words for."""
    resolved = resolve(config)
    stored: dict[str, Any] = {"model_type": family.name, "architectures": [architecture]}
    for name, values in family.fixed.items():
        stored[name] = values[0]
    for line in family.fields:
        value = resolved[line.ours]
        if line.values is not None:
            back = [theirs for theirs, mine in line.values.items() if mine == value]
            if not back:
                raise ValueError(f"{family.name} cannot say {line.ours}={value!r}")
            value = back[0]
        stored[line.stored] = value
    for rule in family.rules:
        stored |= rule.write(config)
    again = resolve(read_config(family, Given(stored, tensors, config.head)))
    differing = [f"{name}={resolved[name]!r}" for name in resolved if again[name] != resolved[name]]
    if differing:
        raise ValueError(f"{family.name} cannot say {', '.join(differing)}")
    return stored


def resolve(config: ModelConfig) -> dict[str, Any]:
    """The fields with every default spelled out and those that are not read left out: equal where the models are."""
    fields = {name: getattr(config, name) for name in config.__dataclass_fields__}
    fields |= {
        "kv_heads": config.groups, "head_dim": config.key_size, "value_dim": config.value_size,
        "hidden": config.hidden_size, "output_bias": config.has_output_bias, "norm_bias": config.has_norm_bias,
        "head_bias": config.head == "lm" and config.has_head_bias, "causal": config.is_causal,
        "scale": config.key_size**-0.5 if config.scale is None else float(config.scale), "window": None,
        "layer_windows": tuple(_window(config, i) for i in range(config.layers)),
    }  # fmt: skip
    if config.positions == "rotary":
        fields["rotary_dim"], fields["rotary_base"] = config.rotary_size, float(config.rotary_base)
    else:
        for name in ("rotary_base", "rotary_dim", "rotary_layout", "rotary_scaling"):
            fields[name] = None
    if config.positions != "relative":
        fields["relative_buckets"] = fields["relative_max_distance"] = None
    if config.head != "lm":
        fields |= {"logit_scale": None, "logit_softcap": None}
    fields["pool"] = None  # a classifier's, which no family has
    return fields


def _window(config: ModelConfig, layer: int) -> tuple[int | None, int | None] | None:
    window = config.block(layer).window
    if window is None:
        return None
    # Causal attention looks at nothing to the right whatever the window says.
    pair = (window[0], 0 if config.is_causal else window[1])
    return None if pair[0] is None and (config.is_causal or pair[1] is None) else pair
