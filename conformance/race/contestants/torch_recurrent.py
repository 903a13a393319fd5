"""`torch.nn.LSTM` and `nn.GRU` in the place of the blocks: attention's rivals in a sweep over length."""

from __future__ import annotations

import numpy as np

from ..task import Task
from .base import Contestant, Running


def build(task: Task) -> Running:
    import torch
    from torch import nn

    from ._recurrent import weights
    from ._torch import copy_into, running

    config, lstm, given = task.model, task.architecture == "lstm", weights(task)
    # torch has two biases a layer; the one that flax lacks stays at zero.
    trained, frozen = ("bias_hh", "bias_ih") if lstm else ("bias_ih", "bias_hh")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(config.vocab, config.width)
            kind = nn.LSTM if lstm else nn.GRU
            self.layers = kind(config.width, config.width, num_layers=config.layers, batch_first=True)
            self.head = nn.Linear(config.width, config.vocab, bias=False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.layers(self.embedding(tokens))[0])

    own = {"embedding.weight": given["embedding.weight"], "head.weight": given["head.weight"].T}
    for i in range(config.layers):
        own[f"layers.weight_ih_l{i}"], own[f"layers.weight_hh_l{i}"] = given[f"{i}.input"].T, given[f"{i}.state"].T
        own[f"layers.{trained}_l{i}"] = given[f"{i}.bias"]
        own[f"layers.{frozen}_l{i}"] = np.zeros_like(given[f"{i}.bias"])
    model = Model()
    copy_into(model, own)
    named: dict[str, torch.Tensor] = {}
    for name, p in model.named_parameters():
        p.requires_grad_(frozen not in name)
        named |= {name: p} if p.requires_grad else {}
    return running(model, model, task, compiled=False, parameters=named)


CONTESTANTS = [
    Contestant("torch-lstm", build, ("torch",), "nn.LSTM, eager", "torch", architectures=("lstm",)),
    Contestant("torch-gru", build, ("torch",), "nn.GRU, eager", "torch", architectures=("gru",)),
]
