"""Layer functions: softmax, norms, activations, dropout, cross-entropy.

Each computes in float64 whatever comes in and rounds once, to the dtype of its first argument.

layers-1: softmax subtracts the largest entry first, so a constant added to every entry changes nothing.
layers-2: a softmax over entries that are all -inf, or over none, gives 0, not NaN.
layers-3: the variance of a layer norm is the mean of the squared deviations from the mean (two passes), over N and
not N - 1.
layers-4: eps is added to the variance or mean square, inside the root.
layers-5: weight and bias are applied before the one rounding.
layers-6: with `unit_offset` the stored weight w stands for 1 + w, so that w = 0 is no weight at all.
layers-7: gelu without an approximation is x times the normal distribution function; "tanh" is another function.
layers-8: relu has the derivative 0 at 0.
layers-9: dropout keeps element n (row-major) where uniform(key, x.shape)[n] < 1 - rate, in float32, and divides by
1 - rate; what is dropped is 0 even where it was NaN; at rate 1 everything is, at rate 0 nothing, and no key is needed.
layers-10: cross-entropy is the mean over counted targets; a target of `ignore_index` is not counted, and its logits,
NaN included, have no effect; with none counted the loss is 0.
layers-11: label smoothing mixes the target with the uniform distribution over all classes, the target's own included.
layers-12: z-loss adds z_loss times the squared logarithm of the softmax's denominator to each counted loss.
"""

from __future__ import annotations

import math

import numpy as np

from .contract.checks.layers import (
    check_activation,
    check_cross_entropy,
    check_dropout_layer,
    check_gelu,
    check_layer_norm,
    check_rms_norm,
    check_softmax,
)
from .pieces import by_element, by_row
from .random import uniform
from .rounding import rounded
from .special import expit, ndtr

# sqrt(2 / pi) and the cubic's factor of Hendrycks and Gimpel's approximation.
TANH_SCALE = math.sqrt(2.0 / math.pi)
TANH_CUBIC = 0.044715


def softmax(x: np.ndarray, *, axis: int = -1) -> np.ndarray:
    """Non-negative weights that add up to 1 along an axis.

        y_i = exp(x_i - m) / sum_j exp(x_j - m),   m = max_j x_j

    x: any shape, any floating dtype; y likewise. Refused: an axis that x does not have.
    Rules: layers-1, layers-2.
    """
    check_softmax(x, axis)
    wide = np.asarray(x, dtype=np.float64)
    top = np.max(wide, axis=axis, keepdims=True, initial=-np.inf)
    with np.errstate(invalid="ignore"):
        e = np.exp(wide - np.where(top == -np.inf, 0.0, top))
    total = np.sum(e, axis=axis, keepdims=True)
    return rounded(e / np.where(total == 0.0, 1.0, total), x.dtype)


def layer_norm(x: np.ndarray, weight: np.ndarray | None, bias: np.ndarray | None, *, eps: float) -> np.ndarray:
    """Each row of features with mean 0 and variance 1, then scaled and shifted.

        y = (x - mean) / sqrt(var + eps) * weight + bias,   var = mean((x - mean)^2)

    x (..., W); weight, bias (W,) or None, of any floating dtype; y has x's shape and dtype. Refused: other shapes,
    eps that is not above 0. Rules: layers-3, layers-4, layers-5. Source: Ba, Kiros, Hinton 2016.
    """
    eps = check_layer_norm(x, weight, bias, eps)
    w, b = (None if p is None else np.asarray(p, dtype=np.float64) for p in (weight, bias))

    def normal(x: np.ndarray) -> np.ndarray:
        centred = x - mean(x)
        y = centred / np.sqrt(mean(centred * centred) + eps)
        y = y if w is None else y * w
        return y if b is None else y + b

    return rounded(by_row(normal, np.asarray(x, dtype=np.float64)), x.dtype)


def rms_norm(x: np.ndarray, weight: np.ndarray | None, *, eps: float, unit_offset: bool = False) -> np.ndarray:
    """Each row of features with mean square 1, then scaled.

        y = x / sqrt(mean(x^2) + eps) * weight,   or * (1 + weight) with unit_offset

    x (..., W); weight (W,) or None, of any floating dtype; y has x's shape and dtype. Refused: other shapes, eps that
    is not above 0. Rules: layers-4, layers-5, layers-6. Source: Zhang and Sennrich 2019.
    """
    eps = check_rms_norm(x, weight, eps, unit_offset)
    gain = 1.0 if weight is None else np.asarray(weight, dtype=np.float64) + (1.0 if unit_offset else 0.0)

    def normal(x: np.ndarray) -> np.ndarray:
        return x / np.sqrt(mean(x * x) + eps) * gain

    return rounded(by_row(normal, np.asarray(x, dtype=np.float64)), x.dtype)


def mean(x: np.ndarray) -> np.ndarray:
    """Over the last axis, which stays with size 1."""
    return x.sum(axis=-1, keepdims=True) / x.shape[-1]


def gelu(x: np.ndarray, *, approximate: str = "none") -> np.ndarray:
    """Gaussian error linear unit.

        "none"   y = x Phi(x),   Phi the normal distribution function
        "tanh"   y = x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2

    x: any shape and floating dtype; y likewise. Rules: layers-7. Source: Hendrycks and Gimpel 2016.
    """
    check_gelu(x, approximate)
    share = normal_share if approximate == "none" else tanh_share
    return rounded(by_element(lambda x: x * share(x), np.asarray(x, dtype=np.float64)), x.dtype)


def normal_share(x: np.ndarray) -> np.ndarray:
    """The share of x that gelu lets through: Phi(x)."""
    return ndtr(x)


def tanh_share(x: np.ndarray) -> np.ndarray:
    """Its approximation: (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2."""
    with np.errstate(over="ignore"):
        inner = TANH_SCALE * (x + TANH_CUBIC * (x * x * x))
    return 0.5 * (1.0 + np.tanh(inner))


def silu(x: np.ndarray) -> np.ndarray:
    """Sigmoid linear unit, y = x / (1 + exp(-x)).

    x: any shape and floating dtype; y likewise. Source: Hendrycks and Gimpel 2016.
    """
    check_activation(x)
    return rounded(by_element(lambda x: x * expit(x), np.asarray(x, dtype=np.float64)), x.dtype)


def relu(x: np.ndarray) -> np.ndarray:
    """Rectified linear unit, y = max(x, 0); NaN stays NaN.

    x: any shape and floating dtype; y likewise. Rules: layers-8.
    """
    check_activation(x)
    return np.maximum(x, np.zeros((), x.dtype))


def dropout(x: np.ndarray, rate: float, key: np.ndarray | None) -> np.ndarray:
    """Elements zeroed at random, the others divided by what is kept on average.

        y_n = x_n / (1 - rate) where kept, else 0

    x: any shape and floating dtype; y likewise; key: a key, or None at rate 0. Refused: a rate outside 0 to 1, a
    rate above 0 without a key. Rules: layers-9. Source: Srivastava et al. 2014.
    """
    rate = check_dropout_layer(x, rate, key)
    if rate == 0.0 or key is None:
        return x.copy()
    return rounded(drop(np.asarray(x, dtype=np.float64), rate, key), x.dtype)


def drop(x: np.ndarray, rate: float, key: np.ndarray) -> np.ndarray:
    """`dropout` of float64 with a rate above 0, unchecked; its own derivative in x."""
    if rate == 1.0:
        return np.zeros_like(x)
    return np.where(uniform(key, x.shape) < np.float32(1.0 - rate), x / (1.0 - rate), 0.0)


def cross_entropy(
    logits: np.ndarray,
    targets: np.ndarray,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> np.ndarray:
    """The mean over counted targets of how unlikely the logits call them.

        loss_i = lse_i - (1 - s) z_target - s mean(z) + z_loss lse_i^2,   lse_i = log sum exp z,   s = label_smoothing
        loss   = sum_i loss_i / counted

    logits (..., V) floating; targets (...) integers; the loss is 0-d, float32, or float64 for float64 logits.
    Refused: targets that are no class and not `ignore_index`. Rules: layers-10, layers-11, layers-12.
    Source: label smoothing, Szegedy et al. 2016; z-loss, de Brebisson and Vincent 2016.
    """
    check_cross_entropy(logits, targets, ignore_index, label_smoothing, z_loss, values=np.asarray)
    loss, counted = loss_sum(logits, targets, ignore_index, label_smoothing, z_loss)
    return rounded(loss / max(counted, 1), np.float64 if logits.dtype == np.float64 else np.float32)


def loss_sum(
    logits: np.ndarray, targets: np.ndarray, ignore_index: int, label_smoothing: float, z_loss: float
) -> tuple[float, int]:
    """The sum of the counted losses, and how many there are: what accumulation adds up."""
    z, target = counted_rows(logits, targets, ignore_index)

    def losses(z: np.ndarray, target: np.ndarray) -> np.ndarray:
        return row_losses(z, target, log_sum_exp(z), label_smoothing, z_loss)

    return float(np.sum(by_row(losses, z, target))), len(z)


def row_losses(z: np.ndarray, target: np.ndarray, lse: np.ndarray, label_smoothing: float, z_loss: float) -> np.ndarray:
    """lse - (1 - s) z_target - s mean(z) + z_loss lse^2 of rows z (n, V), a column."""
    loss = lse - (1.0 - label_smoothing) * np.take_along_axis(z, target, axis=-1)
    if label_smoothing:
        loss = loss - label_smoothing * mean(z)
    return loss + z_loss * lse * lse


def counted_rows(logits: np.ndarray, targets: np.ndarray, ignore_index: int) -> tuple[np.ndarray, np.ndarray]:
    """The logits (n, V), float64, and the targets (n, 1) that are counted."""
    counted = np.asarray(targets) != ignore_index
    z, target = logits.reshape(-1, logits.shape[-1]), np.asarray(targets).reshape(-1, 1)
    if not counted.all():
        z, target = z[counted.reshape(-1)], target[counted.reshape(-1)]
    return np.asarray(z, dtype=np.float64), target


def log_sum_exp(z: np.ndarray) -> np.ndarray:
    """log sum exp over the last axis, which stays with size 1, of float64 with a finite largest entry."""
    top = np.max(z, axis=-1, keepdims=True)
    return np.log(np.sum(np.exp(z - top), axis=-1, keepdims=True)) + top
