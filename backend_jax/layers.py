"""Softmax, normalisations, activations, dropout and the loss. Rules and formulas: core_numpy.layers.

Every function computes in float32 at least (float64 for float64) and rounds once, to the dtype of x. All of them
can be traced, batched and differentiated, forward and reverse.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from core_numpy.contract.checks import layers as checks

from . import random
from .arrays import values


def _whole(*static: str) -> Callable[[Callable], Callable]:
    """One program where a function is called as it stands, in place of one for each operation; inside others' programs
    it leaves no trace."""
    return partial(jax.jit, static_argnames=static, inline=True)


def accumulation(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype that sums and statistics of `dtype` are computed in: float32 at least."""
    return jnp.promote_types(dtype, jnp.float32)


def softmax(x: jax.Array, *, axis: int = -1) -> jax.Array:
    """Softmax along `axis`; a slice that is -inf throughout gives zeros. Rules: core_numpy.layers.

    x: floating, any shape. Returns x's shape and dtype.
    """
    checks.check_softmax(x, axis)
    return _softmax(x, axis)


@_whole("axis")
def _softmax(x: jax.Array, axis: int) -> jax.Array:
    s = x.astype(accumulation(x.dtype))
    # The shift drops out of the quotient: without stop_gradient its derivative would cost a pass to compute zero.
    shift = jax.lax.stop_gradient(jnp.max(s, axis=axis, keepdims=True, initial=-jnp.inf))
    e = jnp.exp(s - jnp.where(jnp.isneginf(shift), 0.0, shift))
    total = jnp.sum(e, axis=axis, keepdims=True)
    return (e / jnp.where(total == 0.0, 1.0, total)).astype(x.dtype)


def layer_norm(x: jax.Array, weight: jax.Array | None, bias: jax.Array | None, *, eps: float) -> jax.Array:
    """Layer norm over the last axis, with the two-pass variance of N. Rules: core_numpy.layers.

    x (..., W); weight and bias (W,) or None. Returns x's shape and dtype.
    """
    return _layer_norm(x, weight, bias, checks.check_layer_norm(x, weight, bias, eps))


@_whole("eps")
def _layer_norm(x: jax.Array, weight: jax.Array | None, bias: jax.Array | None, eps: float) -> jax.Array:
    y = _work(x)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y / jnp.sqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    if weight is not None:
        y = y * weight.astype(y.dtype)
    if bias is not None:
        y = y + bias.astype(y.dtype)
    return y.astype(x.dtype)


def rms_norm(x: jax.Array, weight: jax.Array | None, *, eps: float, unit_offset: bool = False) -> jax.Array:
    """RMS norm over the last axis; `unit_offset` multiplies by 1 + weight. Rules: core_numpy.layers.

    x (..., W); weight (W,) or None. Returns x's shape and dtype.
    """
    return _rms_norm(x, weight, checks.check_rms_norm(x, weight, eps, unit_offset), unit_offset)


@_whole("eps", "unit_offset")
def _rms_norm(x: jax.Array, weight: jax.Array | None, eps: float, unit_offset: bool) -> jax.Array:
    y = _work(x)
    y = y / jnp.sqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    if weight is not None:
        w = weight.astype(y.dtype)
        y = y * (1.0 + w if unit_offset else w)
    return y.astype(x.dtype)


def gelu(x: jax.Array, *, approximate: str = "none") -> jax.Array:
    """GELU, exact unless `approximate="tanh"` (jax.nn.gelu has it the other way round). Rules: core_numpy.layers.

    x: floating, any shape. Returns x's shape and dtype.
    """
    checks.check_gelu(x, approximate)
    return (_gelu_erf if approximate == "none" else _gelu_tanh)(_work(x)).astype(x.dtype)


def silu(x: jax.Array) -> jax.Array:
    """x * sigmoid(x). Rules: core_numpy.layers. x: floating, any shape. Returns x's shape and dtype."""
    checks.check_activation(x)
    return _silu(_work(x)).astype(x.dtype)


def relu(x: jax.Array) -> jax.Array:
    """max(x, 0), with derivative 0 at 0. Rules: core_numpy.layers. x: floating. Returns x's shape and dtype."""
    checks.check_activation(x)
    return jax.nn.relu(x)


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zero where `uniform(key, x.shape) >= 1 - rate`, the rest over 1 - rate. Rules: core_numpy.layers.

    x: floating, any shape. A rate above 0 needs a key. Returns x's shape and dtype.
    """
    rate = checks.check_dropout_layer(x, rate, key)
    if rate == 0.0 or key is None:
        return x
    return drop_where(x, rate, random.uniform(key, x.shape) >= 1.0 - rate)


@_whole("rate")
def drop_where(x: jax.Array, rate: float, dropped: jax.Array) -> jax.Array:
    """`dropout` of a choice that is made, unchecked."""
    if rate == 1.0:
        return jnp.zeros_like(x)
    return jnp.where(dropped, 0.0, _work(x) / (1.0 - rate)).astype(x.dtype)


def cross_entropy(
    logits: jax.Array,
    targets: jax.Array,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> jax.Array:
    """Mean over counted targets of the smoothed cross-entropy plus the z-loss. Rules: core_numpy.layers.

    logits (..., V) floating, targets (...) integers. Returns a scalar, float32 or float64; 0 where nothing counts.
    """
    checks.check_cross_entropy(logits, targets, ignore_index, label_smoothing, z_loss, values=values)
    total, count = cross_entropy_sum(
        logits, targets, ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss
    )
    return total / jnp.maximum(count, 1)


@_whole("ignore_index", "label_smoothing", "z_loss")
def cross_entropy_sum(
    logits: jax.Array, targets: jax.Array, *, ignore_index: int, label_smoothing: float, z_loss: float
) -> tuple[jax.Array, jax.Array]:
    """The sum of the losses and the number of counted targets: what accumulation adds up. Checks nothing."""
    counted = targets != ignore_index
    # An ignored row may hold anything, NaN too; only selecting before the logarithm keeps it out of the gradient.
    x = jnp.where(counted[..., None], _work(logits), 0.0)
    lse = jax.nn.logsumexp(x, axis=-1)
    target = jnp.where(counted, targets, 0)[..., None]
    loss = lse - (1.0 - label_smoothing) * jnp.take_along_axis(x, target, axis=-1)[..., 0]
    if label_smoothing:
        loss = loss - label_smoothing * jnp.mean(x, axis=-1)
    if z_loss:
        loss = loss + z_loss * lse * lse
    return jnp.sum(jnp.where(counted, loss, 0.0)), jnp.sum(counted)


def _work(x: jax.Array) -> jax.Array:
    return x.astype(accumulation(x.dtype))


def _with_derivative(function: Callable, derivative: Callable) -> Callable:
    """`function` with its derivative written out.

    XLA on a CPU turns the automatic derivative of erfc and tanh into several loops that no longer fuse with the
    forward pass; one formula for each keeps a feed-forward's gradient at the cost of a ReLU's.
    """
    wrapped = jax.custom_jvp(function)

    def rule(primals, tangents):
        return wrapped(primals[0]), derivative(primals[0]) * tangents[0]

    wrapped.defjvp(rule)
    return wrapped


def _cdf(x: jax.Array) -> jax.Array:
    # erfc, not 1 + erf: below -5 the sum rounds to 0 in float32.
    return 0.5 * jax.lax.erfc(x * -math.sqrt(0.5))


def _tanh_argument(x: jax.Array) -> jax.Array:
    return math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)


def _gelu_tanh_derivative(x: jax.Array) -> jax.Array:
    t = jnp.tanh(_tanh_argument(x))
    slope = math.sqrt(2.0 / math.pi) * (1.0 + 3 * 0.044715 * x * x)
    return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * slope


def _silu_derivative(x: jax.Array) -> jax.Array:
    s = jax.nn.sigmoid(x)
    return s * (1.0 + x * (1.0 - s))


_gelu_erf = _with_derivative(
    lambda x: x * _cdf(x), lambda x: _cdf(x) + x * jnp.exp(-0.5 * x * x) * (1.0 / math.sqrt(2.0 * math.pi))
)
_gelu_tanh = _with_derivative(lambda x: 0.5 * x * (1.0 + jnp.tanh(_tanh_argument(x))), _gelu_tanh_derivative)
_silu = _with_derivative(lambda x: x * jax.nn.sigmoid(x), _silu_derivative)
