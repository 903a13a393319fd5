"""Layers that read the same rows, as one while a trainer trains: in its buffer their matrices lie side by side."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from . import products
from .block import FeedForward, MultiHeadAttention
from .hooks import hooked
from .optimizer import Flat


class Joint:
    """Several layers' matrices and biases as one of each, which share memory with theirs and take the gradient."""

    def __init__(self, layers: list[nn.Linear], names: list[str], flat: Flat) -> None:
        self.layers, self.sizes = layers, [layer.out_features for layer in layers]
        self.leaves = {}
        for leaf in ("weight", "bias"):
            if getattr(layers[0], leaf) is not None:
                parts = tuple(f"{name}.{leaf}" for name in names)
                self.leaves[parts] = side_by_side(flat, flat.data, parts).requires_grad_()

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        return F.linear(x, *self.leaves.values()).split(self.sizes, -1)


def side_by_side(flat: Flat, buffer: Tensor, parts: tuple[str, ...]) -> Tensor:
    """The tensors of these names in a buffer, which follow one another there, as one."""
    start, shape = flat.places[parts[0]]
    rows = sum(flat.places[name][1][0] for name in parts)
    return buffer.detach()[start : start + rows * shape[1:].numel()].view(rows, *shape[1:])


def joints(model: nn.Module, flat: Flat) -> dict[nn.Module, Joint]:
    """By module, what can be joined: plain layers of the same rows without a gap between them in the buffer."""
    found: dict[nn.Module, Joint] = {}
    for name, module in model.named_modules():
        if isinstance(module, MultiHeadAttention) and not name.endswith("cross"):
            parts = ["query", "key", "value"]
        elif isinstance(module, FeedForward) and module.gate is not None:
            parts = ["gate", "up"]
        else:
            continue
        layers = [getattr(module, part) for part in parts]
        names = [f"{name}.{part}" for part in parts]
        if _follow(layers, names, flat):
            found[module] = Joint(layers, names, flat)
    return found


def _follow(layers: list[nn.Linear], names: list[str], flat: Flat) -> bool:
    if any(type(layer) is not nn.Linear or not layer.weight.requires_grad for layer in layers):
        return False
    if layers[0].weight.device.type == "cpu" and products.FASTER and layers[0].in_features >= products.NARROWEST:
        return False  # oneDNN's products add the gradients of separate layers on the way
    kinds = ["weight"] if layers[0].bias is None else ["weight", "bias"]
    places = [[flat.places[f"{name}.{kind}"] for name in names] for kind in kinds]
    return all(start + shape.numel() == after for of in places for (start, shape), (after, _) in pairwise(of))


@contextmanager
def joined(found: dict[nn.Module, Joint]) -> Iterator[bool]:
    """Let the modules use what is joined meanwhile, and say so; not where somebody hooked into one of the layers."""
    serve = bool(found) and not any(hooked(layer) for joint in found.values() for layer in joint.layers)
    for module, joint in found.items() if serve else ():
        module.joint = joint  # type: ignore[assignment]
    try:
        yield serve
    finally:
        for module in found if serve else ():
            module.joint = None  # type: ignore[assignment]
