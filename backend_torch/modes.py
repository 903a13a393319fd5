"""What holds during a pass and is as before after it: train or eval mode, rematerialisation, how products round."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from core_numpy.contract.config import TrainConfig

from .model import Stack, Transformer


@contextmanager
def mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Train or eval mode meanwhile; parts that were in the other mode go back to it."""
    changed = [] if model.training == training else [m for m in model.modules() if m.training != training]
    for module in changed:
        module.training = training
    try:
        yield
    finally:
        for module in changed:
            module.training = not training


@contextmanager
def remat(model: Transformer, wanted: bool) -> Iterator[None]:
    stacks = [module for module in model.modules() if isinstance(module, Stack)] if wanted else []
    for stack in stacks:
        stack.remat = True
    try:
        yield
    finally:
        for stack in stacks:
            stack.remat = False


@contextmanager
def matmul_precision(config: TrainConfig) -> Iterator[None]:
    """ "highest": float32 products are float32. "default": as the process has set it."""
    before = torch.get_float32_matmul_precision()
    if config.matmul_precision == "default" or before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
