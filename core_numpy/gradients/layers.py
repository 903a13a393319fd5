"""The vector-Jacobian products of the layer functions.

Each takes the gradient of the output and the function's own arguments, computes in float64 and gives a dict: one
gradient for each array argument, of its shape and dtype.
"""

from __future__ import annotations

import math

import numpy as np

from ..contract.checks.layers import (
    check_activation,
    check_cross_entropy,
    check_dropout_layer,
    check_gelu,
    check_layer_norm,
    check_rms_norm,
    check_softmax,
)
from ..layers import TANH_CUBIC, TANH_SCALE, drop, log_sum_exp, softmax
from ..rounding import rounded
from ..special import expit, ndtr

Gradients = dict[str, np.ndarray]


def softmax_vjp(grad_out: np.ndarray, x: np.ndarray, *, axis: int = -1) -> Gradients:
    """dx = y (dy - sum_j y_j dy_j), y = softmax(x)."""
    check_softmax(x, axis)
    y = softmax(_wide(x), axis=axis)
    grad = _wide(grad_out)
    return {"x": rounded(y * (grad - np.sum(y * grad, axis=axis, keepdims=True)), x.dtype)}


def layer_norm_vjp(
    grad_out: np.ndarray, x: np.ndarray, weight: np.ndarray | None, bias: np.ndarray | None, *, eps: float
) -> Gradients:
    """With n = (x - mean) r, r = 1 / sqrt(var + eps), g = dy weight:

    dx = r (g - mean(g) - n mean(g n)),   dweight = sum dy n,   dbias = sum dy
    """
    eps = check_layer_norm(x, weight, bias, eps)
    wide, grad = _wide(x), _wide(grad_out)
    centred = wide - np.mean(wide, axis=-1, keepdims=True)
    r = 1.0 / np.sqrt(np.mean(centred * centred, axis=-1, keepdims=True) + eps)
    normal = centred * r
    g = grad if weight is None else grad * _wide(weight)
    dx = r * (g - np.mean(g, axis=-1, keepdims=True) - normal * np.mean(g * normal, axis=-1, keepdims=True))
    grads = {"x": rounded(dx, x.dtype)}
    if weight is not None:
        grads["weight"] = rounded(_over_rows(grad * normal), weight.dtype)
    if bias is not None:
        grads["bias"] = rounded(_over_rows(grad), bias.dtype)
    return grads


def rms_norm_vjp(
    grad_out: np.ndarray, x: np.ndarray, weight: np.ndarray | None, *, eps: float, unit_offset: bool = False
) -> Gradients:
    """With n = x r, r = 1 / sqrt(mean(x^2) + eps), g = dy weight (dy (1 + weight) with unit_offset):

    dx = r (g - n mean(g n)),   dweight = sum dy n
    """
    eps = check_rms_norm(x, weight, eps, unit_offset)
    wide, grad = _wide(x), _wide(grad_out)
    r = 1.0 / np.sqrt(np.mean(wide * wide, axis=-1, keepdims=True) + eps)
    normal = wide * r
    g = grad if weight is None else grad * (_wide(weight) + (1.0 if unit_offset else 0.0))
    grads = {"x": rounded(r * (g - normal * np.mean(g * normal, axis=-1, keepdims=True)), x.dtype)}
    if weight is not None:
        grads["weight"] = rounded(_over_rows(grad * normal), weight.dtype)
    return grads


def gelu_vjp(grad_out: np.ndarray, x: np.ndarray, *, approximate: str = "none") -> Gradients:
    """ "none": dx = dy (Phi(x) + x phi(x)). "tanh", with t = tanh(u), u = sqrt(2 / pi) (x + 0.044715 x^3):

    dx = dy ((1 + t) / 2 + x (1 - t^2) u' / 2)
    """
    check_gelu(x, approximate)
    wide = _wide(x)
    if approximate == "none":
        density = np.exp(-0.5 * wide * wide) / math.sqrt(2.0 * math.pi)
        return {"x": rounded(_wide(grad_out) * (ndtr(wide) + wide * density), x.dtype)}
    square = wide * wide
    t = np.tanh(TANH_SCALE * wide * (1.0 + TANH_CUBIC * square))
    slope = TANH_SCALE * (1.0 + 3.0 * TANH_CUBIC * square)
    return {"x": rounded(_wide(grad_out) * 0.5 * (1.0 + t + wide * (1.0 - t * t) * slope), x.dtype)}


def silu_vjp(grad_out: np.ndarray, x: np.ndarray) -> Gradients:
    """dx = dy s (1 + x (1 - s)), s = 1 / (1 + exp(-x))."""
    check_activation(x)
    wide = _wide(x)
    s = expit(wide)
    return {"x": rounded(_wide(grad_out) * s * (1.0 + wide * (1.0 - s)), x.dtype)}


def relu_vjp(grad_out: np.ndarray, x: np.ndarray) -> Gradients:
    """dx = dy where x > 0, else 0."""
    check_activation(x)
    return {"x": rounded(np.where(_wide(x) > 0.0, _wide(grad_out), 0.0), x.dtype)}


def dropout_vjp(grad_out: np.ndarray, x: np.ndarray, rate: float, key: np.ndarray | None) -> Gradients:
    """dx = dy / (1 - rate) where kept, else 0: the mask is drawn again from the key."""
    rate = check_dropout_layer(x, rate, key)
    grad = _wide(grad_out)
    return {"x": rounded(grad if rate == 0.0 or key is None else drop(grad, rate, key), x.dtype)}


def cross_entropy_vjp(
    grad_out: np.ndarray | float,
    logits: np.ndarray,
    targets: np.ndarray,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Gradients:
    """For counted rows, p = softmax(z), s = label_smoothing; 0 for the others:

    dz = dloss / counted * (p (1 + 2 z_loss lse) - (1 - s) onehot(target) - s / V)
    """
    check_cross_entropy(logits, targets, ignore_index, label_smoothing, z_loss, values=np.asarray)
    counted = max(int(np.count_nonzero(targets != ignore_index)), 1)
    grad = loss_sum_gradient(logits, targets, ignore_index, label_smoothing, z_loss)
    return {"logits": rounded(grad * (float(grad_out) / counted), logits.dtype)}


def loss_sum_gradient(
    logits: np.ndarray, targets: np.ndarray, ignore_index: int, label_smoothing: float, z_loss: float
) -> np.ndarray:
    """The gradient of `layers.loss_sum`'s sum, float64."""
    counted = np.asarray(targets) != ignore_index
    z = _wide(logits[counted])
    lse = log_sum_exp(z)[:, None]
    rows = np.exp(z - lse) * (1.0 + 2.0 * z_loss * lse) - label_smoothing / z.shape[-1]
    rows[np.arange(len(rows)), targets[counted]] -= 1.0 - label_smoothing
    grad = np.zeros(logits.shape, dtype=np.float64)
    grad[counted] = rows
    return grad


def linear_vjp(grad_out: np.ndarray, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> Gradients:
    """Of y = x weight + bias with x (..., in): dx = dy weight^T, dweight = x^T dy, dbias = sum dy, all float64."""
    rows = grad_out.reshape(-1, grad_out.shape[-1])
    grads = {
        "x": (rows @ weight.T).reshape(x.shape),
        "weight": x.reshape(-1, x.shape[-1]).T @ rows,
    }
    if bias is not None:
        grads["bias"] = np.sum(rows, axis=0)
    return grads


def _wide(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, dtype=np.float64)


def _over_rows(x: np.ndarray) -> np.ndarray:
    return np.sum(x.reshape(-1, x.shape[-1]), axis=0)
