"""Initial values, bit for bit those of every backend. Rules: core_numpy.contract.parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from core_numpy.contract.parameters import Parameter, name_hash

from .arrays import find_device
from .random import fold_in, key, uniform

Either = TypeVar("Either", Tensor, np.ndarray)


def initialise(module: nn.Module, table: Mapping[str, Parameter], seed: int, device: Any) -> None:
    """Give a module that was made on the meta device its memory on `device`, and each parameter its value by name.

    Without a device the current default one, as in torch's own modules. On the meta device nothing is drawn.
    """
    module.names = tuple(table)  # type: ignore[assignment]
    device = find_device(device)
    if device.type == "meta":
        return
    materialise(module, device)
    root = key(seed).to(device)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            spec = table[name]
            if spec.bound is None:
                parameter.fill_(spec.value)
            else:
                drawn = uniform(fold_in(root, name_hash(name)), spec.shape)
                parameter.copy_(turn(module, name, spec.bound * (2.0 * drawn - 1.0)))


def materialise(module: nn.Module, device: Any) -> None:
    """`module.to_empty(device=device)` without what that imports: of a meta tensor `torch.empty_like` needs SymPy."""
    for owner in module.modules():
        for name, p in list(owner.named_parameters(recurse=False)):
            setattr(owner, name, nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device=device), p.requires_grad))


def turn(module: nn.Module, name: str, x: Either) -> Either:
    """Canonical to torch's orientation and back, here alone: `nn.Linear` stores (out, in), canonical is (in, out)."""
    owner, _, leaf = name.rpartition(".")
    is_linear = leaf == "weight" and isinstance(module.get_submodule(owner), nn.Linear)
    return x.T if is_linear else x


class _Undrawn(nn.Linear):
    """A linear layer while it is made: torch's own would draw values that `initialise` draws again."""

    def reset_parameters(self) -> None:
        """Draw nothing."""


def linear(inputs: int, outputs: int, *, bias: bool, factory: dict[str, Any]) -> nn.Linear:
    """An `nn.Linear`, of that very class, without values."""
    layer: nn.Linear = _Undrawn(inputs, outputs, bias=bias, **factory)
    layer.__class__ = nn.Linear
    return layer
