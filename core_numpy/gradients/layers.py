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
from ..layers import TANH_CUBIC, TANH_SCALE, counted_rows, drop, mean, normal_share, row_losses, softmax, tanh_share
from ..pieces import by_element, by_row
from ..rounding import rounded
from ..special import expit

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
    w, dy = 1.0 if weight is None else _wide(weight), _wide(grad_out)

    def backward(x: np.ndarray, dy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        centred = x - mean(x)
        r = 1.0 / np.sqrt(mean(centred * centred) + eps)
        n, g = centred * r, dy * w
        return r * (g - mean(g) - n * mean(g * n)), n

    dx, n = by_row(backward, _wide(x), dy)
    grads = {"x": rounded(dx, x.dtype)}
    if weight is not None:
        grads["weight"] = rounded(_over_rows(dy, n), weight.dtype)
    if bias is not None:
        grads["bias"] = rounded(_over_rows(dy), bias.dtype)
    return grads


def rms_norm_vjp(
    grad_out: np.ndarray, x: np.ndarray, weight: np.ndarray | None, *, eps: float, unit_offset: bool = False
) -> Gradients:
    """With n = x r, r = 1 / sqrt(mean(x^2) + eps), g = dy weight (dy (1 + weight) with unit_offset):

    dx = r (g - n mean(g n)),   dweight = sum dy n
    """
    eps = check_rms_norm(x, weight, eps, unit_offset)
    w = 1.0 if weight is None else _wide(weight) + (1.0 if unit_offset else 0.0)
    dy = _wide(grad_out)

    def backward(x: np.ndarray, dy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        r = 1.0 / np.sqrt(mean(x * x) + eps)
        n, g = x * r, dy * w
        return r * (g - n * mean(g * n)), n

    dx, n = by_row(backward, _wide(x), dy)
    grads = {"x": rounded(dx, x.dtype)}
    if weight is not None:
        grads["weight"] = rounded(_over_rows(dy, n), weight.dtype)
    return grads


def gelu_vjp(grad_out: np.ndarray, x: np.ndarray, *, approximate: str = "none") -> Gradients:
    """dx = dy (s + x s'), where y = x s: `normal_slope`, `tanh_slope`."""
    check_gelu(x, approximate)
    share, slope = (normal_share, normal_slope) if approximate == "none" else (tanh_share, tanh_slope)
    dx = by_element(lambda x, dy: dy * slope(x, share(x)), _wide(x), _wide(grad_out))
    return {"x": rounded(dx, x.dtype)}


def silu_vjp(grad_out: np.ndarray, x: np.ndarray) -> Gradients:
    """dx = dy (s + x s'), where y = x s: `silu_slope`."""
    check_activation(x)
    dx = by_element(lambda x, dy: dy * silu_slope(x, expit(x)), _wide(x), _wide(grad_out))
    return {"x": rounded(dx, x.dtype)}


def relu_vjp(grad_out: np.ndarray, x: np.ndarray) -> Gradients:
    """dx = dy where x > 0, else 0."""
    check_activation(x)
    return {"x": rounded(np.where(_wide(x) > 0.0, _wide(grad_out), 0.0), x.dtype)}


def normal_slope(x: np.ndarray, s: np.ndarray) -> np.ndarray:
    """s + x phi(x), the derivative of x s for s = Phi(x); phi(x) = exp(-x^2 / 2) / sqrt(2 pi)."""
    return s + x * (np.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi))


def tanh_slope(x: np.ndarray, s: np.ndarray) -> np.ndarray:
    """s + x 2 s (1 - s) u', that for s = (1 + tanh(u)) / 2, u = sqrt(2 / pi) (x + 0.044715 x^3)."""
    return s + 2.0 * x * s * (1.0 - s) * (TANH_SCALE * (1.0 + 3.0 * TANH_CUBIC * (x * x)))


def silu_slope(x: np.ndarray, s: np.ndarray) -> np.ndarray:
    """s + x s (1 - s), that for s = 1 / (1 + exp(-x))."""
    return s * (1.0 + x * (1.0 - s))


def dropout_vjp(grad_out: np.ndarray, x: np.ndarray, rate: float, key: np.ndarray | None) -> Gradients:
    """dx = dy / (1 - rate) where kept, else 0: the mask is drawn again from the key."""
    rate = check_dropout_layer(x, rate, key)
    grad = _wide(grad_out)
    return {"x": rounded(grad.copy() if rate == 0.0 or key is None else drop(grad, rate, key), x.dtype)}


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
    _, _, grad = loss_sum_and_gradient(logits, targets, ignore_index, label_smoothing, z_loss)
    return {"logits": rounded(grad * (float(grad_out) / counted), logits.dtype)}


def loss_sum_and_gradient(
    logits: np.ndarray, targets: np.ndarray, ignore_index: int, label_smoothing: float, z_loss: float
) -> tuple[float, int, np.ndarray]:
    """What `layers.loss_sum` gives, and the gradient of its sum, float64: both read the same exponentials."""
    z, target = counted_rows(logits, targets, ignore_index)

    def both(z: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        top = np.max(z, axis=-1, keepdims=True)
        e = np.exp(z - top)
        total = np.sum(e, axis=-1, keepdims=True)
        lse = np.log(total) + top
        dz = e / total * (1.0 + 2.0 * z_loss * lse) - label_smoothing / z.shape[-1]
        dz[np.arange(len(dz)), target[:, 0]] -= 1.0 - label_smoothing
        return row_losses(z, target, lse, label_smoothing, z_loss), dz

    loss, dz = by_row(both, z, target)
    if len(z) == targets.size:
        return float(np.sum(loss)), len(z), dz.reshape(logits.shape)
    grad = np.zeros(logits.shape, dtype=np.float64)
    grad[np.asarray(targets) != ignore_index] = dz
    return float(np.sum(loss)), len(z), grad


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


def _over_rows(x: np.ndarray, y: np.ndarray | None = None) -> np.ndarray:
    """The sum over all axes but the last, of x or of x y."""
    rows = x.reshape(-1, x.shape[-1])
    return np.sum(rows, axis=0) if y is None else np.einsum("rw,rw->w", rows, y.reshape(rows.shape))
