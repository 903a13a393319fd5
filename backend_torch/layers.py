"""Softmax, norms, activations, dropout and cross-entropy on tensors. Rules: core_numpy.layers.

Native: `torch.nn.functional` wherever it means the same. Statistics and sums are float32 at least (float64 for
float64 inputs), and the result is rounded to x's dtype once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from core_numpy.contract.checks.layers import (
    check_activation,
    check_cross_entropy,
    check_dropout_layer,
    check_gelu,
    check_layer_norm,
    check_rms_norm,
    check_softmax,
)

from .arrays import require_tensors, values
from .place import element_index
from .random import uniform, uniform_at


def softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    """exp(x - max) / sum(exp(x - max)) along `axis`; x's shape and dtype. Rules: core_numpy.layers."""
    check_softmax(x, axis)
    require_tensors(x=x)
    if x.numel() == 0:
        return x.clone()
    # torch gives NaN where every entry is -inf. Selecting before and after keeps the derivative 0 there too.
    alive = (x != -torch.inf).any(axis, keepdim=True)
    # In half precision torch rounds in between unless it is told what to compute in.
    y = torch.softmax(torch.where(alive, x, 0.0), axis, dtype=accumulation(x.dtype))
    return torch.where(alive, y, 0.0).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last axis; x (..., W). Rules: core_numpy.layers."""
    eps = check_layer_norm(x, weight, bias, eps)
    require_tensors(x=x, weight=weight, bias=bias)
    return normalise_layer(x, weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor | None, *, eps: float, unit_offset: bool = False) -> Tensor:
    """x / sqrt(mean(x²) + eps) * (weight, or 1 + weight) over the last axis; x (..., W). Rules: core_numpy.layers."""
    eps = check_rms_norm(x, weight, eps, unit_offset)
    require_tensors(x=x, weight=weight)
    return normalise_rms(x, weight, eps, bool(unit_offset))


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """x Phi(x), or its tanh form; x's shape and dtype. Rules: core_numpy.layers."""
    check_gelu(x, approximate)
    require_tensors(x=x)
    return F.gelu(x, approximate=approximate)


def silu(x: Tensor) -> Tensor:
    """x sigmoid(x); x's shape and dtype. Rules: core_numpy.layers."""
    check_activation(x)
    require_tensors(x=x)
    return F.silu(x)


def relu(x: Tensor) -> Tensor:
    """max(x, 0); x's shape and dtype. Rules: core_numpy.layers."""
    check_activation(x)
    require_tensors(x=x)
    return F.relu(x)


def dropout(x: Tensor, rate: float, key: Tensor | None) -> Tensor:
    """x / (1 - rate) where uniform(key) < 1 - rate, else 0; x's shape and dtype. Rules: core_numpy.layers."""
    rate = check_dropout_layer(x, rate, key)
    require_tensors(x=x, key=key)
    return drop(x, rate, key)


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Mean over counted targets of -log p[target] (+ z_loss lse²); logits (..., V), targets (...) -> ().

    float32 for half logits. Rules: core_numpy.layers.
    """
    check_cross_entropy(logits, targets, ignore_index, label_smoothing, z_loss, values=values)
    require_tensors(logits=logits, targets=targets)
    total = summed_cross_entropy(logits, targets, int(ignore_index), float(label_smoothing), float(z_loss))
    return total / (targets != ignore_index).sum().clamp(min=1)


def accumulation(dtype: torch.dtype) -> torch.dtype:
    """What sums are taken in: half types keep 8 or 11 bits and would lose small terms."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def normalise_layer(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, unit_offset: bool = False
) -> Tensor:
    """`layer_norm` unchecked; with `unit_offset` the weight stands for 1 + weight."""
    # torch computes half inputs in float32 and rounds once, but wants all dtypes alike.
    if not unit_offset and all(p is None or p.dtype == x.dtype for p in (weight, bias)):
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    wide = accumulation(x.dtype)
    weight, bias = (None if p is None else p.to(wide) for p in (weight, bias))
    if unit_offset and weight is not None:
        weight = 1.0 + weight
    return F.layer_norm(x.to(wide), x.shape[-1:], weight, bias, eps).to(x.dtype)


def normalise_rms(x: Tensor, weight: Tensor | None, eps: float, unit_offset: bool = False) -> Tensor:
    """`rms_norm` unchecked."""
    if weight is None or (weight.dtype == x.dtype and not unit_offset):
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    wide = accumulation(x.dtype)
    weight = 1.0 + weight.to(wide) if unit_offset else weight.to(wide)
    return F.rms_norm(x.to(wide), x.shape[-1:], weight, eps).to(x.dtype)


def drop(x: Tensor, rate: float, key: Tensor | None) -> Tensor:
    """`dropout` unchecked; no key means no dropout."""
    if rate == 0.0 or key is None:
        return x
    index = element_index(x.shape, x.device)
    u = uniform(key.to(x.device), tuple(x.shape)) if index is None else uniform_at(key.to(x.device), index)
    keep = u < 1.0 - rate
    # At rate 1 nothing is kept: dividing by 1 in place of 0 keeps the derivative 0 rather than NaN.
    return torch.where(keep, x / (1.0 - rate if rate < 1.0 else 1.0), 0.0)


def summed_cross_entropy(
    logits: Tensor, targets: Tensor, ignore_index: int | None, label_smoothing: float, z_loss: float
) -> Tensor:
    """The sum over counted targets, in float32 at least: what micro-batches and devices can add up.

    `ignore_index=None` says that every target is counted, which saves a pass over the logits.
    """
    rows = logits.reshape(-1, logits.shape[-1]).to(accumulation(logits.dtype))
    labels = targets.reshape(-1).long()
    if ignore_index is None:
        counted = None
    else:
        # Selected before the softmax: 0 times the derivative of a NaN row would still be NaN.
        counted = labels != ignore_index
        rows = torch.where(counted[:, None], rows, 0.0)
    total = F.cross_entropy(
        rows,
        labels,
        ignore_index=-100 if ignore_index is None else ignore_index,
        label_smoothing=label_smoothing,
        reduction="sum",
    )
    if z_loss:
        squares = torch.logsumexp(rows, -1).square()
        total = total + z_loss * (squares if counted is None else torch.where(counted, squares, 0.0)).sum()
    return total
