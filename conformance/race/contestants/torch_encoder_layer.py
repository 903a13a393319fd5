"""`torch.nn.TransformerEncoder` with a causal mask: the decoder that torch itself has."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..task import Task
from .base import Contestant, Running


def _build(compiled: bool) -> Callable[[Task], Running]:
    def build(task: Task) -> Running:
        import torch
        from torch import nn

        from ._torch import copy_into, running

        config = task.model

        class Decoder(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embedding = nn.Embedding(config.vocab, config.width)
                self.positions = nn.Embedding(config.max_length, config.width)
                layer = nn.TransformerEncoderLayer(
                    config.width, config.heads, config.hidden_size, dropout=0.0, activation="gelu",
                    layer_norm_eps=config.norm_eps, batch_first=True, norm_first=True,
                )  # fmt: skip
                norm = nn.LayerNorm(config.width, eps=config.norm_eps)
                self.blocks = nn.TransformerEncoder(layer, config.layers, norm, enable_nested_tensor=False)
                self.head = nn.Linear(config.width, config.vocab, bias=False)
                mask = nn.Transformer.generate_square_subsequent_mask(task.length)
                self.register_buffer("mask", mask, persistent=False)

            def forward(self, tokens: torch.Tensor) -> torch.Tensor:
                x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
                return self.head(self.blocks(x, mask=self.mask, is_causal=True))

        model = Decoder()
        copy_into(model, _weights(task))
        return running(model, model, task, compiled=compiled)

    return build


def _weights(task: Task) -> dict[str, np.ndarray]:
    """The task's, under torch's names: (out, in), query, key and value stacked."""
    given = task.params()
    own = {"embedding.weight": given["embedding.weight"], "positions.weight": given["positions.weight"],
           "head.weight": given["head.weight"].T, "blocks.norm.weight": given["norm.weight"],
           "blocks.norm.bias": given["norm.bias"]}  # fmt: skip
    for i in range(task.model.layers):
        ours, theirs = f"blocks.{i}.", f"blocks.layers.{i}."
        for part in ("weight", "bias"):
            stack = [given[f"{ours}attention.{name}.{part}"].T for name in ("query", "key", "value")]
            own[f"{theirs}self_attn.in_proj_{part}"] = np.concatenate(stack)
            own[f"{theirs}self_attn.out_proj.{part}"] = given[f"{ours}attention.output.{part}"].T
            own[f"{theirs}linear1.{part}"] = given[f"{ours}ffn.up.{part}"].T
            own[f"{theirs}linear2.{part}"] = given[f"{ours}ffn.down.{part}"].T
            own[f"{theirs}norm1.{part}"] = given[f"{ours}norm1.{part}"]
            own[f"{theirs}norm2.{part}"] = given[f"{ours}norm2.{part}"]
    return own


CONTESTANTS = [
    Contestant("torch-encoder", _build(False), ("torch",), "nn.TransformerEncoderLayer, eager", "torch",
               offers=frozenset({"bfloat16"})),
    Contestant("torch-encoder-compiled", _build(True), ("torch",), "nn.TransformerEncoderLayer, torch.compile",
               "torch", True, offers=frozenset({"bfloat16"})),
]  # fmt: skip
