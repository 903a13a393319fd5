"""What the torch peers share: their optimiser and their step, as torch's own documentation has them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ..task import Task
from .base import Batch, Running


def copy_into(model: nn.Module, arrays: dict[str, np.ndarray]) -> None:
    """Fill every parameter from the arrays of its name, each of the parameter's own shape."""
    named = dict(model.named_parameters())
    if named.keys() != arrays.keys():
        raise ValueError(f"names differ: {sorted(named.keys() ^ arrays.keys())}")
    with torch.no_grad():
        for name, p in named.items():
            if p.shape != arrays[name].shape:
                raise ValueError(f"{name} has shape {tuple(p.shape)}; got {arrays[name].shape}")
            p.copy_(torch.from_numpy(np.ascontiguousarray(arrays[name])))


Work = Callable[[Batch], torch.Tensor]


def passes(
    model: nn.Module,
    logits: Callable[[torch.Tensor], torch.Tensor],
    task: Task,
    *,
    compiled: bool,
    parameters: Iterable[torch.Tensor],
) -> tuple[Work, Work, Callable[[], None]]:
    """(loss and gradients, loss, wait) around logits(tokens (B, T)) -> (B, T, V), in autocast where half is asked."""
    device = torch.device(task.device)
    model.to(device).train()
    trained, half = list(parameters), task.precision != "float32"

    def loss_of(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, getattr(torch, task.precision)) if half else nullcontext():
            out = logits(tokens)
        return F.cross_entropy(out.float().flatten(0, 1), targets.flatten())

    compute = torch.compile(loss_of) if compiled else loss_of

    def tensors(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(torch.from_numpy(batch[name]).to(device, torch.int64) for name in ("tokens", "targets"))  # type: ignore[return-value]

    def backward(batch: Batch) -> torch.Tensor:
        for p in trained:
            p.grad = None
        loss = compute(*tensors(batch))
        loss.backward()
        return loss.detach()

    def forward(batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            return compute(*tensors(batch))

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    return backward, forward, finish


def running(
    model: nn.Module,
    logits: Callable[[torch.Tensor], torch.Tensor],
    task: Task,
    *,
    compiled: bool,
    decode: Callable[[np.ndarray, int], Any] | None = None,
    parameters: dict[str, torch.Tensor] | None = None,
    decaying: Callable[[str, torch.Tensor], bool] = lambda name, p: p.ndim > 1,
) -> Running:
    """A training step around logits(tokens (B, T)) -> (B, T, V): autocast, clipping, fused AdamW."""
    config = task.train
    model.to(torch.device(task.device))
    named = dict(model.named_parameters()) if parameters is None else parameters
    backward, forward, finish = passes(model, logits, task, compiled=compiled, parameters=named.values())
    decayed = [p for name, p in named.items() if decaying(name, p)]
    others = [p for name, p in named.items() if not decaying(name, p)]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=config.lr, betas=config.betas, eps=config.eps, fused=True,
    )  # fmt: skip

    def step(batch: Batch) -> torch.Tensor:
        loss = backward(batch)
        if config.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(named.values(), config.clip_norm)
        optimizer.step()
        return loss

    return Running(step, finish, backward, forward, decode)
