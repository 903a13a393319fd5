"""The functions that cases may name: their positional arrays, their results, and what can be differentiated.

One table, so that a case is data only and the oracle, the targets and the budget read the same names.
"""

from __future__ import annotations

from dataclasses import dataclass

# The functions whose budget is written out; the others are measured (budget.py).
ATTENTION = ("attention", "attention_weights", "attention_with_lse")


@dataclass(frozen=True)
class Function:
    """positional: argument names in order. results: names of what comes back. differentiable: array arguments
    that have a gradient. exact: the result is a table of integers or booleans, compared with equality."""

    positional: tuple[str, ...]
    results: tuple[str, ...] = ("out",)
    differentiable: tuple[str, ...] = ()
    exact: bool = False


FUNCTIONS: dict[str, Function] = {
    # attention
    "attention": Function(("q", "k", "v"), ("out",), ("q", "k", "v", "bias", "sinks")),
    "attention_weights": Function(("q", "k"), ("weights",), ("q", "k", "bias", "sinks")),
    "attention_with_lse": Function(("q", "k", "v"), ("out", "lse"), ("q", "k", "v", "bias", "sinks")),
    "merge_attention": Function(("outs", "lses"), ("out", "lse")),
    # masks
    "causal_mask": Function(("T", "S"), ("mask",), exact=True),
    "sliding_window_mask": Function(("T", "S"), ("mask",), exact=True),
    "padding_mask": Function(("lengths", "S"), ("mask",), exact=True),
    "padding_mask_from_tokens": Function(("tokens", "pad_id"), ("mask",), exact=True),
    "segment_mask": Function(("q_segments", "kv_segments"), ("mask",), exact=True),
    "prefix_mask": Function(("T", "S", "prefix_lengths"), ("mask",), exact=True),
    "combine_masks": Function(("first", "second"), ("mask",), exact=True),
    "from_blocked": Function(("mask",), ("mask",), exact=True),
    "mask_to_bias": Function(("mask", "dtype"), ("bias",), exact=True),
    "positions_from_mask": Function(("padding",), ("positions",), exact=True),
    # encodings
    "embed": Function(("table", "ids"), ("out",), ("table",)),
    "sinusoidal_encoding": Function(("positions", "width")),
    "rotary_frequencies": Function(("dim",), ("frequencies", "attention_factor")),
    "rotary_tables": Function(("positions", "frequencies"), ("cos", "sin")),
    "apply_rotary": Function(("x", "cos", "sin"), ("out",), ("x",)),
    "permute_rotary": Function(("weight", "heads"), ("weight",), exact=True),
    "alibi_slopes": Function(("heads",), ("slopes",)),
    "alibi_bias": Function(("heads", "T", "S"), ("bias",)),
    "relative_buckets": Function(("T", "S"), ("buckets",), exact=True),
    "relative_bias": Function(("table", "T", "S"), ("bias",), ("table",)),
    # layers
    "softmax": Function(("x",), ("out",), ("x",)),
    "layer_norm": Function(("x", "weight", "bias"), ("out",), ("x", "weight", "bias")),
    "rms_norm": Function(("x", "weight"), ("out",), ("x", "weight")),
    "gelu": Function(("x",), ("out",), ("x",)),
    "silu": Function(("x",), ("out",), ("x",)),
    "relu": Function(("x",), ("out",), ("x",)),
    "dropout": Function(("x", "rate", "key"), ("out",), ("x",)),
    "cross_entropy": Function(("logits", "targets"), ("loss",), ("logits",)),
    # random
    "split": Function(("key", "n"), ("keys",), exact=True),
    "fold_in": Function(("key", "data"), ("key",), exact=True),
    "random_bits": Function(("key", "shape"), ("bits",), exact=True),
    "uniform": Function(("key", "shape"), ("out",), exact=True),
    "normal": Function(("key", "shape"), ("out",)),
    "bernoulli": Function(("key", "p", "shape"), ("out",), exact=True),
}
