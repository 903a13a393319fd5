"""Canonical parameter names, shapes and initial values: one table per configuration.

A name is the attribute path in every backend (`blocks.0.attention.query.weight`), so no table of names
can be wrong. A linear weight is (in, out). An initial value is drawn from bits alone:

    value = bound * (2 u - 1),   u = uniform(fold_in(key(seed), crc32(name)), shape)

u and 2 u - 1 are exact in float32 and the product is rounded once, so every framework and device gets the
same bits; a normal distribution would need a logarithm, and libraries round those differently.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

from .config import BlockConfig, ModelConfig


@dataclass(frozen=True)
class Parameter:
    """shape: canonical. bound: half-width of the uniform initial value, or None for the constant `value`."""

    shape: tuple[int, ...]
    bound: float | None = None
    value: float = 0.0


def name_hash(name: str) -> int:
    """The 32-bit number folded into the seed's key for parameter `name` (CRC-32 of its UTF-8 bytes)."""
    return zlib.crc32(name.encode())


def _uniform(shape: tuple[int, ...], std: float) -> Parameter:
    # A uniform distribution on (-b, b) has standard deviation b / sqrt(3).
    return Parameter(shape, bound=math.sqrt(3.0) * std)


def _linear(name: str, size: tuple[int, int], bias: bool, gain: float = 1.0) -> dict[str, Parameter]:
    # Variance 1 / fan-in keeps the scale of activations (LeCun et al. 1998, "Efficient BackProp").
    table = {f"{name}.weight": _uniform(size, gain / math.sqrt(size[0]))}
    if bias:
        table[f"{name}.bias"] = Parameter((size[1],))
    return table


def _norm(name: str, config: BlockConfig) -> dict[str, Parameter]:
    table = {f"{name}.weight": Parameter((config.width,), value=0.0 if config.unit_offset else 1.0)}
    if config.has_norm_bias:
        table[f"{name}.bias"] = Parameter((config.width,))
    return table


def attention_parameters(config: BlockConfig, *, gain: float = 1.0, sinks: bool | None = None) -> dict[str, Parameter]:
    """Of `MultiHeadAttention(config)`: query, key, value, output, and the optional norms and sinks."""
    heads, groups = config.heads, config.groups
    table = {
        **_linear("query", (config.width, heads * config.key_size), config.attention_bias),
        **_linear("key", (config.width, groups * config.key_size), config.attention_bias),
        **_linear("value", (config.width, groups * config.value_size), config.attention_bias),
        **_linear("output", (heads * config.value_size, config.width), config.has_output_bias, gain),
    }
    if config.qk_norm:
        for name in ("query_norm", "key_norm"):
            table[f"{name}.weight"] = Parameter((config.key_size,), value=0.0 if config.unit_offset else 1.0)
    if config.sinks if sinks is None else sinks:
        table["sinks"] = Parameter((heads,))
    return table


def feed_forward_parameters(config: BlockConfig, *, gain: float = 1.0) -> dict[str, Parameter]:
    """Of `FeedForward(config)`: up, the gate of a gated activation, down."""
    table = _linear("up", (config.width, config.hidden_size), config.ffn_bias)
    if config.gated:
        table |= _linear("gate", (config.width, config.hidden_size), config.ffn_bias)
    return table | _linear("down", (config.hidden_size, config.width), config.ffn_bias, gain)


def block_parameters(config: BlockConfig, *, gain: float = 1.0) -> dict[str, Parameter]:
    """Of `Block(config)`. `gain` shrinks the two projections that write into the residual stream."""
    table = {f"attention.{name}": p for name, p in attention_parameters(config, gain=gain).items()}
    if config.cross_attention:
        # A sink is a property of self-attention; cross-attention has none (no published model gives it one).
        table |= {f"cross.{name}": p for name, p in attention_parameters(config, gain=gain, sinks=False).items()}
    table |= {f"ffn.{name}": p for name, p in feed_forward_parameters(config, gain=gain).items()}
    table |= _norm("norm1", config)
    if not config.shared_norm:
        table |= _norm("norm2", config)
    if config.cross_attention:
        table |= _norm("norm3", config)
    if config.norm_place == "sandwich":
        table |= _norm("norm1_post", config) | _norm("norm2_post", config)
    return table


def model_parameters(config: ModelConfig) -> dict[str, Parameter]:
    """Of `Transformer(config)`, in the order in which every backend lists them."""
    if config.kind == "encoder_decoder":
        encoder = model_parameters(config.stack("encoder"))
        decoder = _stack_parameters(config.stack("decoder"), cross_attention=True)
        if config.share_embedding:
            del encoder["embedding.weight"]
        return {f"encoder.{name}": p for name, p in encoder.items()} | {
            f"decoder.{name}": p for name, p in decoder.items()
        }
    return _stack_parameters(config, cross_attention=False)


def _stack_parameters(config: ModelConfig, *, cross_attention: bool) -> dict[str, Parameter]:
    # 0.02 and the residual gain 1 / sqrt(2 layers) are GPT-2's (Radford et al. 2019): the first loss is near
    # log(vocab) and the residual stream's variance does not grow with depth.
    gain = 1.0 / math.sqrt(2.0 * max(config.layers, 1))
    table = {"embedding.weight": _uniform((config.vocab, config.width), 0.02)}
    if config.positions == "learned":
        table["positions.weight"] = _uniform((config.max_length, config.width), 0.02)
    if config.positions == "relative":
        table["relative.weight"] = _uniform((config.relative_buckets, config.heads), 0.02)
    if config.embedding_norm:
        table |= _norm("embedding_norm", config)
    for i in range(config.layers):
        block = config.block(i, cross_attention=cross_attention)
        table |= {f"blocks.{i}.{name}": p for name, p in block_parameters(block, gain=gain).items()}
    if config.final_norm:
        table |= _norm("norm", config)
    if config.head == "lm":
        if not config.tie_embeddings:
            table["head.weight"] = _uniform((config.width, config.vocab), 0.02)
        if config.has_head_bias:
            table["head.bias"] = Parameter((config.vocab,))
    if config.head == "classifier":
        table["head.weight"] = _uniform((config.width, config.classes or 0), 0.02)
        if config.has_head_bias:
            table["head.bias"] = Parameter((config.classes or 0,))
    return table
