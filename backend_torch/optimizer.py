"""Optimisers, clipping and averaging on flat buffers. Rules: core_numpy.optimizer.

Native: parameters are views into one buffer, and so are gradients and every slot, so that an update is a few calls
whatever the number of parameters; AdamW is torch's own fused kernel. Buffers are changed in place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from core_numpy.contract.config import TrainConfig

# Views begin at multiples of so many elements: 64 bytes of float32, what vector instructions and BLAS like best.
ALIGN = 16
SLOTS = {"adamw": ("moment1", "moment2"), "sgd": ("moment1",), "lion": ("moment1",)}


class Flat:
    """Named tensors as views into one buffer; those of two or more axes, which decay, come first.

    Between the views are zeros up to the next multiple of `ALIGN`; no update moves them.
    """

    def __init__(self, named: dict[str, Tensor]) -> None:
        ordered = sorted(named.items(), key=lambda item: item[1].ndim < 2)
        self.places: dict[str, tuple[int, torch.Size]] = {}
        self.decayed = end = 0
        for name, x in ordered:
            self.places[name] = (end, x.shape)
            end += math.ceil(x.numel() / ALIGN) * ALIGN
            if x.ndim >= 2:
                self.decayed = end
        first = next(iter(named.values()))
        self.data = torch.zeros(end, dtype=first.dtype, device=first.device)

    def like(self) -> Tensor:
        """Another buffer of the same layout, zeros."""
        return torch.zeros_like(self.data)

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The named tensors inside a buffer of this layout."""
        return {name: buffer[start : start + shape.numel()].view(shape) for name, (start, shape) in self.places.items()}

    @classmethod
    def of(cls, named: dict[str, nn.Parameter]) -> Flat:
        """Move parameters into one buffer: they keep their values and become views of it."""
        flat = cls(dict(named))
        for name, view in flat.views(flat.data).items():
            view.copy_(named[name].detach())
            named[name].data = view
        return flat


def initial_state(config: TrainConfig, params: Flat) -> dict[str, Tensor]:
    """The optimiser's slots before the first update: zeros, and the average. Rules: core_numpy.optimizer."""
    state = {slot: params.like() for slot in SLOTS[config.optimizer]}
    if config.ema is not None:
        state["ema"] = params.data.clone()
    return state


def global_norm(grads: Tensor) -> Tensor:
    """The root of the sum of squares of a flat gradient, 0-d, not yet read. Rules: core_numpy.optimizer."""
    return torch.linalg.vector_norm(grads)


def clip(grads: Tensor, norm: float, clip_norm: float | None) -> Tensor:
    """Scale the flat gradient in place to `clip_norm` where its norm is above it. Rules: core_numpy.optimizer."""
    return grads if clip_norm is None or not norm > clip_norm else grads.mul_(clip_norm / norm)


@torch.no_grad()
def update(config: TrainConfig, params: Flat, grads: Tensor, state: dict[str, Tensor], *, t: int, lr: float) -> None:
    """Update t of parameters and state, in place. Rules: core_numpy.optimizer."""
    p, m = params.data, state["moment1"]
    b1, b2 = config.betas
    if config.weight_decay:
        # p - lr decay p, not p (1 - lr decay): that factor's rounding is the same at every step and adds up.
        decaying = p[: params.decayed]
        decaying.add_(decaying, alpha=-lr * config.weight_decay)
    if config.optimizer == "adamw":
        # One pass over memory in place of seven. The decay is done: the kernel would multiply p by 1 - lr decay.
        torch._fused_adamw_(
            [p], [grads], [m], [state["moment2"]], [], [torch.full((), float(t), device=p.device)],
            lr=lr, beta1=b1, beta2=b2, weight_decay=0.0, eps=config.eps, amsgrad=False, maximize=False,
        )  # fmt: skip
    elif config.optimizer == "lion":
        p.add_((m * b1).add_(grads, alpha=1.0 - b1).sign_(), alpha=-lr)
        m.mul_(b2).add_(grads, alpha=1.0 - b2)
    else:
        m.mul_(b1).add_(grads)
        p.add_(m, alpha=-lr)
    if config.ema is not None:
        state["ema"].mul_(config.ema).add_(p, alpha=1.0 - config.ema)


def not_finite(params: Flat, grads: Tensor) -> Iterator[str]:
    """The names of the parameters whose gradient holds NaN or infinity."""
    for name, g in params.views(grads).items():
        if not bool(torch.isfinite(g).all()):
            yield name
