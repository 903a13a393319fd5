"""What is raced: one model, its weights, its data and its optimiser, the same for every contestant."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from core_numpy.contract.config import ModelConfig, TrainConfig
from core_numpy.contract.cost import step_cost
from core_numpy.contract.data import batches, byte_tokens, default_text

SEED = 0


@dataclass(frozen=True)
class Size:
    width: int
    heads: int
    layers: int
    length: int
    batch: int


SIZES = {
    "tiny": Size(width=64, heads=4, layers=2, length=64, batch=16),
    "small": Size(width=256, heads=8, layers=4, length=256, batch=8),
    "long": Size(width=128, heads=4, layers=1, length=2048, batch=1),
}


class Task:
    """A decoder that every library can build: learned positions, layer norm before, exact GELU, biases, own head."""

    def __init__(self, size: str) -> None:
        if size not in SIZES:
            raise ValueError(f"size must be one of {', '.join(SIZES)}; got {size!r}")
        self.size, shape = size, SIZES[size]
        self.batch, self.length = shape.batch, shape.length
        self.model = ModelConfig(
            vocab=256, width=shape.width, heads=shape.heads, layers=shape.layers, max_length=shape.length
        )
        # A constant rate without warm-up, so that every update counts from the first.
        self.train = TrainConfig(batch=shape.batch, lr=1e-3, seed=SEED)

    def params(self) -> dict[str, np.ndarray]:
        """The reference's initial weights."""
        import core_numpy

        return core_numpy.get_params(core_numpy.Transformer(self.model, seed=SEED))

    def batches(self) -> Iterator[dict[str, np.ndarray]]:
        """Endless, the same for everybody."""
        return batches(byte_tokens(default_text()), batch=self.batch, length=self.length, seed=SEED)

    @property
    def tokens(self) -> int:
        """Tokens of one update."""
        return self.batch * self.length

    @property
    def flops(self) -> int:
        """Model FLOPs of one update, forward and backward."""
        return step_cost(self.model, self.batch, self.length).total.flops

    def to_dict(self) -> dict[str, Any]:
        return {
            "size": self.size,
            "batch": self.batch,
            "length": self.length,
            "tokens": self.tokens,
            "flops": self.flops,
            "model": self.model.to_dict(),
            "train": self.train.to_dict(),
        }
