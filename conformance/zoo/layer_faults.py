"""Faults of softmax, norms, activations, dropout and the loss."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.special import expit, ndtr

import core_numpy as core

from .faults import Fault, Row, from_rows


def _wide(x: Any) -> np.ndarray:
    return np.asarray(x, dtype=np.float64)


# --- softmax
def softmax_last(x: np.ndarray, *, axis: int = -1) -> np.ndarray:
    return core.softmax(x)


def softmax_no_maximum(x: np.ndarray, *, axis: int = -1) -> np.ndarray:
    e = np.exp(x.astype(x.dtype if x.dtype == np.float64 else np.float32))
    return (e / e.sum(axis=axis, keepdims=True)).astype(x.dtype)


def softmax_nan(x: np.ndarray, *, axis: int = -1) -> np.ndarray:
    y = core.softmax(x, axis=axis)
    return np.where(np.isneginf(_wide(x)).all(axis=axis, keepdims=True), np.nan, _wide(y)).astype(x.dtype)


def softmax_global(x: np.ndarray, *, axis: int = -1) -> np.ndarray:
    return core.softmax(x.reshape(-1)).reshape(x.shape)


# --- norms
def _norm(name: str, change: Any) -> dict[str, Any]:
    """change(x, weight, bias, eps) in float64, weight and bias filled in where they are None."""

    def layer_norm(x: np.ndarray, weight: Any, bias: Any, *, eps: float) -> np.ndarray:
        w, b = (fill if given is None else _wide(given) for given, fill in ((weight, 1.0), (bias, 0.0)))
        return change(_wide(x), w, b, eps, x.dtype).astype(x.dtype)

    def rms_norm(x: np.ndarray, weight: Any, *, eps: float, unit_offset: bool = False) -> np.ndarray:
        w = 1.0 if weight is None else _wide(weight) + float(unit_offset)
        return change(_wide(x), w, 0.0, eps, x.dtype).astype(x.dtype)

    return {name: layer_norm if name == "layer_norm" else rms_norm}


def _centred(x: np.ndarray) -> np.ndarray:
    return x - x.mean(axis=-1, keepdims=True)


def _variance(x: np.ndarray) -> np.ndarray:
    return x.var(axis=-1, keepdims=True)


def _square(x: np.ndarray) -> np.ndarray:
    return np.mean(x * x, axis=-1, keepdims=True)


def _one_pass(x: np.ndarray, w: Any, b: Any, eps: float, dtype: Any) -> np.ndarray:
    """E[x^2] - E[x]^2 in the accumulation dtype."""
    narrow: Any = x.astype(np.float64 if dtype == np.float64 else np.float32)
    variance = np.mean(narrow * narrow, axis=-1, keepdims=True) - np.mean(narrow, axis=-1, keepdims=True) ** 2
    return _centred(x) / np.sqrt(np.maximum(variance, 0.0) + eps) * w + b


def layer_norm_all_axes(x: np.ndarray, weight: Any, bias: Any, *, eps: float) -> np.ndarray:
    axes = tuple(range(1, x.ndim))
    wide = _wide(x)
    y = (wide - wide.mean(axis=axes, keepdims=True)) / np.sqrt(wide.var(axis=axes, keepdims=True) + eps)
    return (y * (1.0 if weight is None else _wide(weight)) + (0.0 if bias is None else _wide(bias))).astype(x.dtype)


def rms_offset_forgotten(x: np.ndarray, weight: Any, *, eps: float, unit_offset: bool = False) -> np.ndarray:
    return core.rms_norm(x, weight, eps=eps)


def rms_offset_twice(x: np.ndarray, weight: Any, *, eps: float, unit_offset: bool = False) -> np.ndarray:
    more = weight + np.ones((), weight.dtype) if unit_offset else weight
    return core.rms_norm(x, more, eps=eps, unit_offset=unit_offset)


# --- activations
def _activation(name: str, change: Any) -> dict[str, Any]:
    def activation(x: np.ndarray) -> np.ndarray:
        return change(_wide(x)).astype(x.dtype)

    def gelu(x: np.ndarray, *, approximate: str = "none") -> np.ndarray:
        return change(_wide(x), approximate).astype(x.dtype)

    return {name: gelu if name == "gelu" else activation}


def _tanh_form(x: np.ndarray, cubic: float = 0.044715, scale: float = np.sqrt(2.0 / np.pi)) -> np.ndarray:
    return 0.5 * x * (1.0 + np.tanh(scale * (x + cubic * x**3)))


# --- dropout
def _dropout(change: Any) -> dict[str, Any]:
    """change(x, kept, rate)"""

    def dropout(x: np.ndarray, rate: float, key: Any) -> np.ndarray:
        kept = core.uniform(key, x.shape) < np.float32(1.0 - rate)
        with np.errstate(all="ignore"):
            return change(_wide(x), kept, rate).astype(x.dtype)

    return {"dropout": dropout}


def dropout_without_key(x: np.ndarray, rate: float, key: Any) -> np.ndarray:
    return x.copy() if key is None else core.dropout(x, rate, key)


def dropout_by_column(x: np.ndarray, rate: float, key: Any) -> np.ndarray:
    """One draw for a whole column, as with broadcast dimensions."""
    kept = core.uniform(key, x.shape[-1:]) < np.float32(1.0 - rate)
    return np.where(kept, _wide(x) / (1.0 - rate) if rate < 1 else 0.0, 0.0).astype(x.dtype)


# --- cross-entropy
def _loss(change: Any) -> dict[str, Any]:
    """change(z, targets, counted, lse, s, zl) -> loss, all flat over rows."""

    def cross_entropy(
        logits: np.ndarray,
        targets: np.ndarray,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> np.ndarray:
        z, t = _wide(logits), np.asarray(targets)
        lse = np.log(np.exp(z - z.max(axis=-1, keepdims=True)).sum(axis=-1)) + z.max(axis=-1)
        loss = change(z, t, t != ignore_index, lse, label_smoothing, z_loss)
        return np.asarray(loss, dtype=np.float64 if logits.dtype == np.float64 else np.float32)

    return {"cross_entropy": cross_entropy}


def _rows(z: np.ndarray, t: np.ndarray, counted: np.ndarray, lse: np.ndarray, s: float, zl: float) -> np.ndarray:
    """The loss of each row, as it should be; 0 where not counted."""
    own = np.take_along_axis(z, np.where(counted, t, 0)[..., None], axis=-1)[..., 0]
    return np.where(counted, lse - (1.0 - s) * own - s * z.mean(axis=-1) + zl * lse**2, 0.0)


def _mean_of_means(z: Any, t: Any, counted: Any, lse: Any, s: float, zl: float) -> Any:
    rows, n = _rows(z, t, counted, lse, s, zl), counted.sum(axis=-1)
    return np.mean(rows.sum(axis=-1) / np.maximum(n, 1))


def _all_counted(z: Any, t: Any, counted: Any, lse: Any, s: float, zl: float) -> Any:
    return _rows(z, t, counted, lse, s, zl).mean()


def _mean(rows: np.ndarray, counted: np.ndarray) -> Any:
    return rows.sum() / max(int(counted.sum()), 1)


def _other_classes(z: Any, t: Any, counted: Any, lse: Any, s: float, zl: float) -> Any:
    own = np.take_along_axis(z, np.where(counted, t, 0)[..., None], axis=-1)[..., 0]
    others = (z.sum(axis=-1) - own) / (z.shape[-1] - 1)
    return _mean(np.where(counted, lse - (1.0 - s) * own - s * others + zl * lse**2, 0.0), counted)


def _ignored_as_last(z: Any, t: Any, counted: Any, lse: Any, s: float, zl: float) -> Any:
    everything = np.ones_like(counted)
    return _mean(_rows(z, np.where(counted, t, z.shape[-1] - 1), everything, lse, s, zl), everything)


_ROWS: list[Row] = [
    ("softmax-last-axis", "the axis is ignored",
     "rare", {"softmax": softmax_last},
     "softmax runs along the last axis whatever is asked; the contract is the given axis"),
    ("softmax-overflows", "exp without the maximum",
     "rare", {"softmax": softmax_no_maximum},
     "softmax overflows; the contract subtracts the largest entry first"),
    ("softmax-nan", "all -inf gives NaN [pytorch 41508]",
     "rare", {"softmax": softmax_nan},
     "a softmax over -inf alone gives NaN; the contract is 0"),
    ("softmax-global", "one sum for all rows",
     "blatant", {"softmax": softmax_global},
     "softmax normalises over all rows; the contract is along one axis"),
    ("layer-norm-n-less-one", "N - 1 for N [Flux 529]",
     "subtle", _norm("layer_norm", lambda x, w, b, e, t: _centred(x)
                     / np.sqrt(_variance(x) * x.shape[-1] / (x.shape[-1] - 1) + e) * w + b),
     "layer_norm divides the variance by N - 1; the contract is N"),
    ("layer-norm-eps-outside", "eps outside the root [gpt-neox 1345]",
     "rare", _norm("layer_norm", lambda x, w, b, e, t: _centred(x) / (np.sqrt(_variance(x)) + e) * w + b),
     "layer_norm adds eps outside the root; the contract is inside, to the variance"),
    ("layer-norm-eps-value", "another eps by default [flax 2195]",
     "rare", _norm("layer_norm", lambda x, w, b, e, t: _centred(x) / np.sqrt(_variance(x) + 1e-6) * w + b),
     "layer_norm ignores eps and uses 1e-6; the contract is the eps that is given"),
    ("layer-norm-eps-width", "the width taken for eps [flax 2195]",
     "blatant", _norm("layer_norm", lambda x, w, b, e, t: _centred(x) / np.sqrt(_variance(x) + x.shape[-1]) * w + b),
     "layer_norm takes the width for eps; the contract is the eps that is given"),
    ("layer-norm-one-pass", "a variance by difference of squares [burn 5607, flax 1491]",
     "rare", _norm("layer_norm", _one_pass),
     "layer_norm's variance is a difference of squares; the contract is two passes"),
    ("layer-norm-bias-first", "the bias before the weight",
     "blatant", _norm("layer_norm", lambda x, w, b, e, t: (_centred(x) / np.sqrt(_variance(x) + e) + b) * w),
     "layer_norm adds the bias before the weight; the contract is weight, then bias"),
    ("layer-norm-no-mean", "the mean is not subtracted",
     "blatant", _norm("layer_norm", lambda x, w, b, e, t: x / np.sqrt(_square(x) + e) * w + b),
     "layer_norm does not subtract the mean; the contract is (x - mean) / sqrt(var + eps)"),
    ("layer-norm-bias-ignored", "the bias is dropped",
     "blatant", _norm("layer_norm", lambda x, w, b, e, t: _centred(x) / np.sqrt(_variance(x) + e) * w),
     "layer_norm drops the bias; the contract adds it"),
    ("layer-norm-all-axes", "statistics over all axes but the first",
     "blatant", {"layer_norm": layer_norm_all_axes},
     "layer_norm takes its statistics over all axes but the first; the contract is the last axis"),
    ("rms-norm-centred", "a mean is subtracted",
     "blatant", _norm("rms_norm", lambda x, w, b, e, t: _centred(x) / np.sqrt(_variance(x) + e) * w),
     "rms_norm subtracts the mean; the contract is x / sqrt(mean(x^2) + eps)"),
    ("rms-norm-eps-outside", "eps outside the root [gpt-neox 1345]",
     "rare", _norm("rms_norm", lambda x, w, b, e, t: x / (np.sqrt(_square(x)) + e) * w),
     "rms_norm adds eps outside the root; the contract is inside, to the mean square"),
    ("rms-norm-eps-value", "another eps by default [flax 2195]",
     "rare", _norm("rms_norm", lambda x, w, b, e, t: x / np.sqrt(_square(x) + 1e-5) * w),
     "rms_norm ignores eps and uses 1e-5; the contract is the eps that is given"),
    ("rms-norm-sum", "the sum of squares, not their mean",
     "blatant", _norm("rms_norm", lambda x, w, b, e, t: x / np.sqrt(_square(x) * x.shape[-1] + e) * w),
     "rms_norm divides by the root of the sum of squares; the contract is their mean"),
    ("rms-norm-offset-forgotten", "the weight stands for 1 + w and is taken for w [Liger-Kernel 74]",
     "subtle", {"rms_norm": rms_offset_forgotten},
     "unit_offset is ignored; the contract multiplies by 1 + weight"),
    ("rms-norm-offset-twice", "1 is added once at import and once more [mlx-lm 1623]",
     "subtle", {"rms_norm": rms_offset_twice},
     "unit_offset adds 2; the contract multiplies by 1 + weight"),
    ("gelu-tanh-always", "the tanh form where the exact one was asked for [jax 4428]",
     "subtle", _activation("gelu", lambda x, a: _tanh_form(x)),
     "gelu is always the tanh form; the contract is x Phi(x) unless approximate='tanh'"),
    ("gelu-exact-always", "the exact form where the tanh one was asked for [jax 4428]",
     "subtle", _activation("gelu", lambda x, a: x * ndtr(x)),
     "gelu is always the exact form; the contract is the tanh form for approximate='tanh'"),
    ("gelu-swapped", "the two forms swapped [jax 4428]",
     "subtle", _activation("gelu", lambda x, a: x * ndtr(x) if a == "tanh" else _tanh_form(x)),
     "gelu's two forms are swapped; the contract is x Phi(x) unless approximate='tanh'"),
    ("gelu-quick", "x sigmoid(1.702 x)",
     "subtle", _activation("gelu", lambda x, a: x * expit(1.702 * x)),
     "gelu is x sigmoid(1.702 x); the contract is x Phi(x)"),
    ("gelu-cubic", "a digit of the cubic's factor",
     "rare", _activation("gelu", lambda x, a: _tanh_form(x, 0.044175) if a == "tanh" else x * ndtr(x)),
     "the tanh form's cubic has another factor; the contract is 0.044715"),
    ("gelu-rounded-scale", "sqrt(2 / pi) written as 0.7978",
     "rare", _activation("gelu", lambda x, a: _tanh_form(x, scale=0.7978) if a == "tanh" else x * ndtr(x)),
     "the tanh form's sqrt(2 / pi) is rounded; the contract is the full number"),
    ("silu-sigmoid", "the sigmoid without its factor",
     "blatant", _activation("silu", expit),
     "silu lacks its factor x; the contract is x sigmoid(x)"),
    ("silu-beta", "x sigmoid(1.702 x)",
     "subtle", _activation("silu", lambda x: x * expit(1.702 * x)),
     "silu is x sigmoid(1.702 x); the contract is x sigmoid(x)"),
    ("silu-hard", "a piecewise linear sigmoid",
     "subtle", _activation("silu", lambda x: x * np.clip(x / 6.0 + 0.5, 0.0, 1.0)),
     "silu is hard; the contract is x sigmoid(x)"),
    ("relu-leaky", "a small slope below 0",
     "subtle", _activation("relu", lambda x: np.where(x > 0, x, 0.01 * x)),
     "relu leaks below 0; the contract is max(x, 0)"),
    ("layer-dropout-not-rescaled", "kept elements are not divided by 1 - rate",
     "blatant", _dropout(lambda x, kept, r: np.where(kept, x, 0.0)),
     "dropout does not divide by 1 - rate; the contract does"),
    ("layer-dropout-inverted", "the kept are dropped",
     "blatant", _dropout(lambda x, kept, r: np.where(kept, 0.0, x / (1.0 - r))),
     "dropout keeps what it should drop; the contract keeps where uniform < 1 - rate"),
    ("layer-dropout-nan", "rate 1 divides by 0 [pytorch 124464]",
     "rare", _dropout(lambda x, kept, r: kept * (x / np.float64(1.0 - r))),
     "a rate of 1 gives NaN; the contract is 0"),
    ("layer-dropout-by-column", "one draw broadcast over the batch [transformers 28059]",
     "subtle", {"dropout": dropout_by_column},
     "dropout draws once per column; the contract is once per element"),
    ("layer-dropout-no-key", "no key, no dropout [transformers 28059]",
     "rare", {"dropout": dropout_without_key},
     "a missing key switches dropout off in silence; the contract is an error"),
    ("loss-mean-of-means", "a mean over rows of their means [transformers 24725]",
     "subtle", _loss(_mean_of_means),
     "the loss is a mean of each row's mean; the contract is the mean over all counted targets"),
    ("loss-ignored-counted", "ignored targets stay in the number",
     "subtle", _loss(_all_counted),
     "ignored targets stay in the divisor; the contract divides by the counted ones"),
    ("loss-ignored-as-class", "an ignored target taken for the last class",
     "subtle", _loss(_ignored_as_last),
     "ignored targets count as the last class; the contract leaves them out"),
    ("loss-sum", "a sum, not a mean",
     "blatant", _loss(lambda z, t, c, lse, s, zl: _rows(z, t, c, lse, s, zl).sum()),
     "the loss is a sum; the contract is the mean over counted targets"),
    ("loss-nan", "no target counted gives NaN",
     "rare", _loss(lambda z, t, c, lse, s, zl: _rows(z, t, c, lse, s, zl).sum() / np.float64(c.sum())),
     "a loss without counted targets is NaN; the contract is 0"),
    ("loss-smoothing-others", "smoothing over the other classes",
     "subtle", _loss(_other_classes),
     "smoothing goes to the other classes; the contract mixes with all of them, the target included"),
    ("loss-smoothing-ignored", "the smoothing is dropped",
     "subtle", _loss(lambda z, t, c, lse, s, zl: _mean(_rows(z, t, c, lse, 0.0, zl), c)),
     "label_smoothing is ignored; the contract mixes with the uniform distribution"),
    ("loss-z-sign", "the z-loss is subtracted",
     "subtle", _loss(lambda z, t, c, lse, s, zl: _mean(_rows(z, t, c, lse, s, -zl), c)),
     "the z-loss is subtracted; the contract adds z_loss lse^2"),
    ("loss-z-not-squared", "the log-sum-exp without its square",
     "subtle", _loss(lambda z, t, c, lse, s, zl: _mean(_rows(z, t, c, lse, s, 0.0) + c * zl * np.abs(lse), c)),
     "the z-loss is not squared; the contract is z_loss lse^2"),
    ("loss-z-ignored", "the z-loss is dropped",
     "subtle", _loss(lambda z, t, c, lse, s, zl: _mean(_rows(z, t, c, lse, s, 0.0), c)),
     "z_loss is ignored; the contract adds z_loss lse^2"),
    ("loss-z-over-all", "the z-loss of ignored rows counts",
     "subtle", _loss(lambda z, t, c, lse, s, zl: _mean(_rows(z, t, c, lse, s, 0.0), c) + zl * np.mean(lse**2)),
     "the z-loss runs over ignored rows too; the contract is the counted ones"),
]  # fmt: skip


def faults() -> list[Fault]:
    return from_rows(_ROWS)
