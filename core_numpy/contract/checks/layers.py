"""The checks of the layer functions: softmax, norms, activations, dropout, cross-entropy."""

from __future__ import annotations

from typing import Any

import numpy as np

from .attention import check_dropout
from .common import (
    Values,
    came,
    dtype_name,
    require_axis,
    require_choice,
    require_float,
    require_int,
    require_integer,
    require_number,
    require_shape,
)


def check_softmax(x: Any, axis: Any) -> None:
    """A floating array and an axis that it has."""
    require_float("x", x)
    require_axis("x", x, axis)


def check_activation(x: Any) -> None:
    """A floating array."""
    require_float("x", x)


def check_gelu(x: Any, approximate: Any) -> None:
    """A floating array, and which of the two functions called GELU."""
    require_float("x", x)
    require_choice("approximate", approximate, ("none", "tanh"))


def check_layer_norm(x: Any, weight: Any, bias: Any, eps: Any) -> float:
    """x (..., W); weight and bias (W,) or None, of any floating dtype. Returns eps."""
    width = _width(x)
    for name, p in (("weight", weight), ("bias", bias)):
        if p is not None:
            require_float(name, p)
            require_shape(name, p, (width,), "(the last axis of x)")
    return _eps(eps)


def check_rms_norm(x: Any, weight: Any, eps: Any, unit_offset: Any) -> float:
    """x (..., W); weight (W,) or None, of any floating dtype. Returns eps."""
    if not isinstance(unit_offset, bool | np.bool_):
        raise TypeError(f"unit_offset must be True or False; got {came(unit_offset)}")
    return check_layer_norm(x, weight, None, eps)


def check_dropout_layer(x: Any, rate: Any, key: Any) -> float:
    """A floating array, a rate from 0 to 1, and a key where the rate is above 0. Returns the rate."""
    require_float("x", x)
    return check_dropout(rate, key, rate_name="rate", key_name="key")


def check_cross_entropy(
    logits: Any, targets: Any, ignore_index: Any, label_smoothing: Any, z_loss: Any, *, values: Values
) -> None:
    """logits (..., V) floating; targets (...) integers from 0 to V - 1 or `ignore_index`."""
    require_float("logits", logits)
    if len(logits.shape) < 1 or logits.shape[-1] == 0:
        raise ValueError(f"logits must have a last axis of at least one class; got shape {tuple(logits.shape)}")
    require_integer("targets", targets)
    require_shape("targets", targets, tuple(logits.shape[:-1]), "(that of logits without the classes)")
    require_int("ignore_index", ignore_index)
    check_loss_options(label_smoothing, z_loss)
    check_targets(targets, int(logits.shape[-1]), int(ignore_index), values)


def check_loss_options(label_smoothing: Any, z_loss: Any) -> None:
    """Label smoothing at least 0 and below 1; z-loss at least 0."""
    smoothing = require_number("label_smoothing", label_smoothing, "a number at least 0 and below 1")
    if not 0.0 <= smoothing < 1.0:
        raise ValueError(f"label_smoothing must be a number at least 0 and below 1; got {label_smoothing!r}")
    if require_number("z_loss", z_loss, "a number of at least 0") < 0.0:
        raise ValueError(f"z_loss must be a number of at least 0; got {z_loss!r}")


def check_targets(targets: Any, classes: int, ignore_index: int, values: Values) -> None:
    """Every target names a class or is `ignore_index`."""
    read = values(targets)
    if read is None or read.size == 0:
        return
    counted = read[read != ignore_index]
    if counted.size and (counted.min() < 0 or counted.max() >= classes):
        wrong = int(counted.min()) if counted.min() < 0 else int(counted.max())
        raise ValueError(f"targets must be from 0 to {classes - 1}, or {ignore_index} for not counted; got {wrong}")


def _width(x: Any) -> int:
    require_float("x", x)
    if len(x.shape) < 1 or x.shape[-1] == 0:
        raise ValueError(f"x must have a last axis of at least one feature; got {dtype_name(x)} {tuple(x.shape)}")
    return int(x.shape[-1])


def _eps(eps: Any) -> float:
    value = require_number("eps", eps, "a finite number above 0")
    if value <= 0.0:
        raise ValueError(f"eps must be a finite number above 0; got {eps!r}")
    return value
