"""x-transformers' `Decoder` between plain embeddings: its own wrapper scales positions, which would train otherwise."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..task import Task
from .base import Contestant, Running


def _build(compiled: bool) -> Callable[[Task], Running]:
    def build(task: Task) -> Running:
        import torch
        from torch import nn
        from x_transformers import Decoder

        from ._torch import copy_into, running

        config = task.model

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embedding = nn.Embedding(config.vocab, config.width)
                self.positions = nn.Embedding(config.max_length, config.width)
                self.blocks = Decoder(
                    dim=config.width, depth=config.layers, heads=config.heads, attn_dim_head=config.key_size,
                    ff_mult=config.hidden_size // config.width, attn_flash=True, norm_add_unit_offset=False,
                )  # fmt: skip
                self.head = nn.Linear(config.width, config.vocab, bias=False)

            def forward(self, tokens: torch.Tensor) -> torch.Tensor:
                x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
                return self.head(self.blocks(x))

        model = Model()
        copy_into(model, _weights(task))
        return running(model, model, task, compiled=compiled)

    return build


def _weights(task: Task) -> dict[str, np.ndarray]:
    """The task's, under x-transformers' names: attention and feed-forward are layers 2 i and 2 i + 1."""
    given = task.params()
    own = {"embedding.weight": given["embedding.weight"], "positions.weight": given["positions.weight"],
           "head.weight": given["head.weight"].T, "blocks.final_norm.gamma": given["norm.weight"]}  # fmt: skip
    for i in range(task.model.layers):
        ours, first, second = f"blocks.{i}.", f"blocks.layers.{2 * i}.", f"blocks.layers.{2 * i + 1}."
        own[f"{first}0.0.gamma"], own[f"{second}0.0.gamma"] = given[f"{ours}norm1.weight"], given[f"{ours}norm2.weight"]
        for theirs, name in (("to_q", "query"), ("to_k", "key"), ("to_v", "value"), ("to_out", "output")):
            own[f"{first}1.{theirs}.weight"] = given[f"{ours}attention.{name}.weight"].T
        for part in ("weight", "bias"):
            own[f"{second}1.ff.0.0.{part}"] = given[f"{ours}ffn.up.{part}"].T
            own[f"{second}1.ff.2.{part}"] = given[f"{ours}ffn.down.{part}"].T
    return own


NEEDS, OFFERS = ("torch", "x_transformers"), frozenset({"bfloat16"})
CONTESTANTS = [
    Contestant("x-transformers", _build(False), NEEDS, "x-transformers Decoder, flash, eager", "torch", False, False,
               ("gpt-unbiased",), OFFERS),
    Contestant("x-transformers-compiled", _build(True), NEEDS, "x-transformers Decoder, flash, torch.compile", "torch",
               True, False, ("gpt-unbiased",), OFFERS),
]  # fmt: skip
