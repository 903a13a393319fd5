"""What a model costs: FLOPs, bytes moved and activation memory, layer by layer.

Counted are matrix products, 2 FLOPs for each multiply-add. Norms, softmax and activations are left out, as is usual
for model-FLOPs utilisation (Chowdhery et al. 2022, "PaLM", appendix B), and so is work that a mask makes needless: a
causal or windowed layer counts only the (query, key) pairs that may attend. The backward pass is twice the forward
pass, for each product has two gradients. Recomputed work (remat, blockwise kernels) is not counted again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .checks.common import came, require_int
from .config import BlockConfig, ModelConfig
from .parameters import (
    Parameter,
    attention_parameters,
    block_parameters,
    feed_forward_parameters,
    model_parameters,
)


@dataclass(frozen=True)
class Cost:
    """Of one layer, or of several added.

    parameters: how many numbers. forward, backward: FLOPs. bytes_moved: what the products read and write, once in the
    forward and twice more in the backward pass, the scores staying on the chip; for the update, what AdamW reads and
    writes. activations: bytes that the forward pass keeps for the backward pass.
    """

    name: str
    parameters: int = 0
    forward: int = 0
    backward: int = 0
    bytes_moved: int = 0
    activations: int = 0

    @property
    def flops(self) -> int:
        """Forward and backward."""
        return self.forward + self.backward

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "flops": self.flops}


@dataclass(frozen=True)
class ModelCost:
    """The layers in the order of the model, and their sum."""

    layers: tuple[Cost, ...]
    total: Cost

    def to_dict(self) -> dict[str, Any]:
        return {"layers": [layer.to_dict() for layer in self.layers], "total": self.total.to_dict()}


def visible_pairs(config: BlockConfig, length: int) -> int:
    """How many (query, key) pairs of one head may attend in self-attention: causality and window counted."""
    causal = config.is_causal if isinstance(config, ModelConfig) else config.causal
    left, right = config.window or (None, None)
    if causal:
        right = 0 if right is None else min(right, 0)
    left, right = length if left is None else left, length if right is None else right
    return sum(max(min(length - 1, i + right) - max(0, i - left) + 1, 0) for i in range(length))


def attention_cost(
    config: BlockConfig,
    batch: int,
    length: int,
    *,
    context: int | None = None,
    itemsize: int = 4,
    stored_weights: bool = False,
    name: str = "attention",
) -> Cost:
    """One attention layer on (batch, length): four projections, the scores, the weighted sum.

        projections             2 B W (T H D + S G D + S G Dv + T H Dv)
        scores, weighted sum    2 B H P (D + Dv),   P = visible pairs of one head

    `context` makes it cross-attention to that many keys, all visible. Kept for the backward pass: the inputs, q, k, v,
    the heads' outputs and their log-sum-exp (float32); with `stored_weights` also B H T S weights.
    """
    _require_config(config)
    B, T = require_int("batch", batch, 1), require_int("length", length, 1)
    S = T if context is None else require_int("context", context, 1)
    require_int("itemsize", itemsize, 1)
    W, H, G, D, Dv = config.width, config.heads, config.groups, config.key_size, config.value_size
    x, source = B * T * W, B * S * W
    q, k, v, out = B * T * H * D, B * S * G * D, B * S * G * Dv, B * T * H * Dv
    pairs = visible_pairs(config, T) if context is None else T * S
    forward = 2 * W * (q + k + v + out) + 2 * B * H * pairs * (D + Dv)
    count = _count(attention_parameters(config, sinks=None if context is None else False))
    # The projections read their inputs and write q, k, v; attention reads those and writes out; the last reads it.
    moved = count + (x + 2 * source) + 2 * (q + k + v + out) + x
    kept = x + (0 if context is None else source) + q + k + v + out + (B * H * T * S if stored_weights else 0)
    return Cost(name, count, forward, 2 * forward, 3 * moved * itemsize, kept * itemsize + 4 * B * H * T)


def feed_forward_cost(config: BlockConfig, batch: int, length: int, *, itemsize: int = 4, name: str = "ffn") -> Cost:
    """One feed-forward layer: 2 B T W F for each of up, down and the gate, if there is one (F the hidden size)."""
    _require_config(config)
    rows = require_int("batch", batch, 1) * require_int("length", length, 1)
    W, F, ups = config.width, config.hidden_size, 2 if config.gated else 1
    forward = 2 * rows * W * F * (ups + 1)
    count = _count(feed_forward_parameters(config))
    moved = count + ups * rows * (W + F) + rows * (F + W)
    # Kept: the input, what comes out of up (and gate), and what goes into down.
    return Cost(name, count, forward, 2 * forward, 3 * moved * itemsize, rows * (W + (ups + 1) * F) * itemsize)


def step_cost(config: ModelConfig, batch: int, length: int, *, itemsize: int = 4) -> ModelCost:
    """One training step of a whole model on (batch, length); an encoder-decoder gets `length` on both sides.

    Layers: the embedding (no products), each block's attention, cross-attention, ffn and norms, the head with its
    logits, and the update (AdamW: reads p, gradient and two moments, writes p and the moments, 7 float32 numbers each).
    """
    if not isinstance(config, ModelConfig):
        raise TypeError(f"config must be a ModelConfig; got {came(config)}")
    B, T = require_int("batch", batch, 1), require_int("length", length, 1)
    if config.kind == "encoder_decoder":
        encoder, decoder = config.stack("encoder"), config.stack("decoder")
        layers = [
            *_stack(encoder, B, T, itemsize, "encoder.", shared=config.share_embedding),
            *_stack(decoder, B, T, itemsize, "decoder.", context=T),
        ]
    else:
        layers = _stack(config, B, T, itemsize, "")
    count = _count(model_parameters(config))
    layers.append(Cost("update", bytes_moved=7 * 4 * count))
    return ModelCost(tuple(layers), _sum("total", layers))


def _stack(
    config: ModelConfig, B: int, T: int, itemsize: int, prefix: str, *, context: int | None = None, shared: bool = False
) -> list[Cost]:
    rows, W = B * T, config.width
    table = model_parameters(config)
    parts = ("embedding.", "positions.", "relative.", "embedding_norm.")
    count = sum(_count({name: p}) for name, p in table.items() if name.startswith(parts))
    count -= _count({"": table["embedding.weight"]}) if shared else 0
    layers = [Cost(f"{prefix}embedding", count, bytes_moved=3 * rows * W * itemsize)]
    for i in range(config.layers):
        block, at = config.block(i, cross_attention=context is not None), f"{prefix}blocks.{i}."
        layers.append(attention_cost(block, B, T, itemsize=itemsize, name=f"{at}attention"))
        if context is not None:
            layers.append(attention_cost(block, B, T, context=context, itemsize=itemsize, name=f"{at}cross"))
        layers.append(feed_forward_cost(block, B, T, itemsize=itemsize, name=f"{at}ffn"))
        norms = {name: p for name, p in block_parameters(block).items() if name.startswith("norm")}
        inputs = sum(name.endswith("weight") for name in norms)  # each norm keeps its input
        layers.append(Cost(f"{at}norms", _count(norms), activations=inputs * rows * W * itemsize))
    layers.append(_head_cost(config, B, T, itemsize, f"{prefix}head"))
    return layers


def _head_cost(config: ModelConfig, B: int, T: int, itemsize: int, name: str) -> Cost:
    """The final norm and the head; a classifier's head works on one pooled row of each sequence."""
    table = {key: p for key, p in model_parameters(config).items() if key.startswith(("norm.", "head."))}
    norm = B * T * config.width if config.final_norm else 0
    if config.head == "none":
        return Cost(name, _count(table), activations=norm * itemsize)
    rows, out = (B * T, config.vocab) if config.head == "lm" else (B, config.classes or 0)
    forward = 2 * rows * config.width * out
    moved = config.width * out + rows * (config.width + out)
    kept = norm + rows * (config.width + out)
    return Cost(name, _count(table), forward, 2 * forward, 3 * moved * itemsize, kept * itemsize)


def _require_config(config: Any) -> None:
    if not isinstance(config, BlockConfig):
        raise TypeError(f"config must be a BlockConfig or ModelConfig; got {came(config)}")


def _count(table: dict[str, Parameter]) -> int:
    total = 0
    for parameter in table.values():
        size = 1
        for axis in parameter.shape:
            size *= axis
        total += size
    return total


def _sum(name: str, costs: Iterable[Cost]) -> Cost:
    rows = [(c.parameters, c.forward, c.backward, c.bytes_moved, c.activations) for c in costs]
    return Cost(name, *(sum(column) for column in zip(*rows, strict=True)))
