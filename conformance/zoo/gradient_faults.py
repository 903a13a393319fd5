"""Faults of gradients: the forward pass is right, the backward pass is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.special import expit, ndtr

from core_numpy import gradients as right

from .faults import Fault, Row, from_rows

Arrays = dict[str, np.ndarray]
Change = Callable[[Arrays, tuple[Any, ...], dict[str, Any]], None]
ATTENTION = ("attention_vjp", "attention_with_lse_vjp")


def _of(name: str, change: Change) -> Callable[..., Arrays]:
    """The right gradients, then changed; change(gradients, positional arguments, keywords)."""

    def vjp(*positional: Any, **rest: Any) -> Arrays:
        got = dict(getattr(right, name)(*positional, **rest))
        change(got, positional, rest)
        return got

    return vjp


def _changed(change: Change, *names: str) -> dict[str, Any]:
    return {f"gradients.{name}": _of(name, change) for name in names or ATTENTION}


def _called_with(alter: Callable[[dict[str, Any]], dict[str, Any]], *names: str) -> dict[str, Any]:
    """The right gradients of other arguments."""

    def of(name: str) -> Callable[..., Arrays]:
        def vjp(*positional: Any, **rest: Any) -> Arrays:
            own = dict(getattr(right, name)(*positional, **rest))
            other = getattr(right, name)(*positional, **alter(dict(rest)))
            return {key: other.get(key, value) for key, value in own.items()}

        return vjp

    return {f"gradients.{name}": of(name) for name in names or ATTENTION}


def _unscaled(got: Arrays, positional: Any, rest: Any) -> None:
    got["q"] = got["q"] * got["q"].dtype.type(np.sqrt(got["q"].shape[-1]))


def _uncapped(got: Arrays, positional: Any, rest: Any) -> None:
    if rest.get("softcap") is not None:
        got["q"], got["k"] = (got[n] * got[n].dtype.type(1.1) for n in ("q", "k"))


def _one_head(got: Arrays, positional: Any, rest: Any) -> None:
    q, k = got["q"], got["k"]
    if q.ndim > 2 and q.shape[-3] != k.shape[-3]:
        got["k"], got["v"] = (got[n] / got[n].dtype.type(q.shape[-3] // k.shape[-3]) for n in ("k", "v"))


def _unsummed(got: Arrays, positional: Any, rest: Any) -> None:
    if "bias" in got and got["bias"].ndim == 4 and got["bias"].shape[0] == 1:
        got["bias"] = got["bias"] / max(got["q"].shape[0], 1)


def _zero(name: str) -> Change:
    def change(got: Arrays, positional: Any, rest: Any) -> None:
        if name in got:
            got[name] = np.zeros_like(got[name])

    return change


def _sink_sign(got: Arrays, positional: Any, rest: Any) -> None:
    if "sinks" in got:
        got["sinks"] = -got["sinks"]


def _dead_row_nan(got: Arrays, positional: Any, rest: Any) -> None:
    """One dead row makes everything that rows share NaN."""
    mask = rest.get("mask")
    if mask is not None and not mask.any(axis=-1).all():
        got["k"], got["v"] = (np.full_like(got[n], np.nan) for n in ("k", "v"))


def _undropped(got: Arrays, positional: Any, rest: Any) -> None:
    if rest.get("dropout_rate"):
        plain = {n: x for n, x in rest.items() if not n.startswith("dropout")}
        name = ATTENTION[len(positional) - 4]
        got["v"] = dict(getattr(right, name)(*positional, **plain))["v"]


def _lse_stopped(*positional: Any, **rest: Any) -> Arrays:
    grad_out, grad_lse, *arrays = positional
    return dict(right.attention_with_lse_vjp(grad_out, np.zeros_like(grad_lse), *arrays, **rest))


def _without(*names: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    off = {"causal": False}
    return lambda rest: {n: off.get(n) if n in names else x for n, x in rest.items()}


def _softmax_diagonal(grad: np.ndarray, x: np.ndarray, *, axis: int = -1) -> Arrays:
    """y (1 - y) dy: the Jacobian's diagonal alone."""
    e = np.exp(x.astype(np.float64) - x.max(axis=axis, keepdims=True).astype(np.float64))
    y = e / e.sum(axis=axis, keepdims=True)
    return {"x": (y * (1.0 - y) * grad.astype(np.float64)).astype(x.dtype)}


def _norm_constant(name: str) -> dict[str, Any]:
    """The statistics are taken for constants."""

    def vjp(grad: np.ndarray, x: np.ndarray, weight: Any, *rest: Any, eps: float, unit_offset: bool = False) -> Arrays:
        given: dict[str, Any] = {"eps": eps} | ({"unit_offset": True} if unit_offset else {})
        got = dict(getattr(right, name)(grad, x, weight, *rest, **given))
        wide = x.astype(np.float64)
        spread = wide.var(axis=-1, keepdims=True) if rest else np.mean(wide**2, axis=-1, keepdims=True)
        gain = 1.0 if weight is None else weight.astype(np.float64) + float(unit_offset)
        got["x"] = (grad.astype(np.float64) * gain / np.sqrt(spread + eps)).astype(x.dtype)
        return got

    return {f"gradients.{name}": vjp}


def _weight_mean(got: Arrays, positional: Any, rest: Any) -> None:
    rows = max(positional[1].size // positional[1].shape[-1], 1)
    if "weight" in got:
        got["weight"] = (got["weight"].astype(np.float64) / rows).astype(got["weight"].dtype)


def _gelu_other(grad: np.ndarray, x: np.ndarray, *, approximate: str = "none") -> Arrays:
    return right.gelu_vjp(grad, x, approximate="none" if approximate == "tanh" else "tanh")


def _gelu_no_density(grad: np.ndarray, x: np.ndarray, *, approximate: str = "none") -> Arrays:
    if approximate == "tanh":
        return right.gelu_vjp(grad, x, approximate=approximate)
    return {"x": (grad.astype(np.float64) * ndtr(x.astype(np.float64))).astype(x.dtype)}


def _silu_sigmoid(grad: np.ndarray, x: np.ndarray) -> Arrays:
    return {"x": (grad.astype(np.float64) * expit(x.astype(np.float64))).astype(x.dtype)}


def _relu_at_zero(grad: np.ndarray, x: np.ndarray) -> Arrays:
    return {"x": np.where(x >= 0, grad, np.zeros((), grad.dtype))}


def _dropout_unscaled(grad: np.ndarray, x: np.ndarray, rate: float, key: Any) -> Arrays:
    got = right.dropout_vjp(grad, x, rate, key)["x"]
    return {"x": (got.astype(np.float64) * (1.0 - rate)).astype(x.dtype)}


def _dropout_none(grad: np.ndarray, x: np.ndarray, rate: float, key: Any) -> Arrays:
    return {"x": grad.copy()}


def _loss_not_divided(got: Arrays, positional: Any, rest: Any) -> None:
    counted = int(np.count_nonzero(positional[2] != rest.get("ignore_index", -100)))
    got["logits"] = (got["logits"].astype(np.float64) * float(max(counted, 1))).astype(got["logits"].dtype)


_ROWS: list[Row] = [
    ("gradient-scale", "the scale is applied forward and not backward",
     "blatant", _changed(_unscaled),
     "the gradient of q lacks the scale; the contract is scale dS k"),
    ("gradient-cap", "the soft-cap's own derivative is left out",
     "subtle", _changed(_uncapped),
     "the gradients of q and k are off by a factor where there is a soft cap; the contract is 1 - tanh^2"),
    ("gradient-group-mean", "key gradients averaged over a group, not summed",
     "blatant", _changed(_one_head),
     "gradients of k and v are a mean over their group of query heads; the contract is the sum"),
    ("gradient-bias-broadcast", "a broadcast bias' gradient is a mean, not a sum [jax 30593]",
     "subtle", _changed(_unsummed),
     "a broadcast bias' gradient is a mean over the batch; the contract is the sum over broadcast axes"),
    ("gradient-bias-missing", "no gradient for a bias [jax 27184]",
     "blatant", _changed(_zero("bias")),
     "the bias has no gradient; the contract gives it that of the scores"),
    ("gradient-sink-sign", "the sink's gradient has the wrong sign",
     "subtle", _changed(_sink_sign),
     "the sinks' gradient has the wrong sign"),
    ("gradient-sink-missing", "the sink is a constant",
     "subtle", _changed(_zero("sinks")),
     "the sinks have no gradient; the contract gives them one"),
    ("gradient-dead-row", "one row without a key poisons gradients that all rows share [pytorch 41508]",
     "rare", _changed(_dead_row_nan),
     "a query that may attend to no key makes the gradients of k and v NaN; the contract is no effect"),
    ("gradient-dropout", "backward ignores the dropout mask",
     "blatant", _changed(_undropped),
     "the gradient of v ignores dropout; the contract uses the forward pass's mask"),
    ("gradient-lse-stopped", "the log-sum-exp has no gradient",
     "blatant", {"gradients.attention_with_lse_vjp": _lse_stopped},
     "the log-sum-exp has no gradient; the contract gives it one"),
    ("gradient-causal-lost", "backward recomputes without causality",
     "blatant", _called_with(_without("causal")),
     "the backward pass ignores causal; the contract masks as the forward pass does"),
    ("gradient-window-lost", "backward recomputes without the window",
     "subtle", _called_with(_without("window")),
     "the backward pass ignores the window; the contract masks as the forward pass does"),
    ("gradient-lengths-lost", "backward recomputes without the lengths",
     "subtle", _called_with(_without("kv_lengths")),
     "the backward pass ignores kv_lengths; the contract masks as the forward pass does"),
    ("gradient-bias-lost", "backward recomputes scores without the bias",
     "subtle", _called_with(_without("bias")),
     "the backward pass recomputes its scores without the bias; the contract is the forward pass's scores"),
    ("gradient-sink-lost", "backward normalises without the sink",
     "subtle", _called_with(_without("sinks")),
     "the backward pass normalises without the sinks; the contract is the forward pass's weights"),
    ("gradient-offset-lost", "backward recomputes without the offset",
     "subtle", _called_with(lambda rest: {**rest, "q_offset": 0 * rest["q_offset"]} if "q_offset" in rest else rest),
     "the backward pass ignores q_offset; the contract masks as the forward pass does"),
    ("gradient-softmax-diagonal", "the softmax's Jacobian without its off-diagonal part",
     "blatant", {"gradients.softmax_vjp": _softmax_diagonal},
     "softmax's gradient has the diagonal alone; the contract is y (dy - sum y dy)"),
    ("gradient-layer-norm-constant", "mean and variance taken for constants",
     "blatant", _norm_constant("layer_norm_vjp"),
     "layer_norm's gradient takes mean and variance for constants; the contract differentiates them"),
    ("gradient-rms-norm-constant", "the mean square taken for a constant",
     "blatant", _norm_constant("rms_norm_vjp"),
     "rms_norm's gradient takes the mean square for a constant; the contract differentiates it"),
    ("gradient-norm-weight-mean", "the weight's gradient averaged over rows",
     "blatant", _changed(_weight_mean, "layer_norm_vjp", "rms_norm_vjp"),
     "a norm's weight has a mean over rows for its gradient; the contract is the sum"),
    ("gradient-gelu-other", "the other form's derivative [jax 4428]",
     "subtle", {"gradients.gelu_vjp": _gelu_other},
     "gelu's gradient is the other form's; the contract differentiates the form that is asked for"),
    ("gradient-gelu-density", "Phi(x) alone, without x phi(x)",
     "blatant", {"gradients.gelu_vjp": _gelu_no_density},
     "gelu's gradient lacks x phi(x); the contract is Phi(x) + x phi(x)"),
    ("gradient-silu", "the sigmoid alone",
     "blatant", {"gradients.silu_vjp": _silu_sigmoid},
     "silu's gradient is the sigmoid alone; the contract is s (1 + x (1 - s))"),
    ("gradient-relu-zero", "a derivative of 1 at 0",
     "rare", {"gradients.relu_vjp": _relu_at_zero},
     "relu's derivative at 0 is 1; the contract is 0"),
    ("gradient-dropout-layer", "the mask without its factor",
     "blatant", {"gradients.dropout_vjp": _dropout_unscaled},
     "dropout's gradient lacks 1 / (1 - rate); the contract has it"),
    ("gradient-dropout-straight", "the gradient passes straight through",
     "blatant", {"gradients.dropout_vjp": _dropout_none},
     "dropout's gradient ignores the mask; the contract is that of the forward pass"),
    ("gradient-loss-sum", "the loss is a mean, its gradient a sum's",
     "blatant", _changed(_loss_not_divided, "cross_entropy_vjp"),
     "the loss's gradient is not divided by the counted targets; the contract is that of the mean"),
    ("gradient-smoothing", "backward without smoothing",
     "subtle", _called_with(lambda rest: {**rest, "label_smoothing": 0.0}, "cross_entropy_vjp"),
     "the loss's gradient ignores label_smoothing; the contract differentiates it"),
    ("gradient-z-loss", "backward without the z-loss",
     "subtle", _called_with(lambda rest: {**rest, "z_loss": 0.0}, "cross_entropy_vjp"),
     "the loss's gradient ignores z_loss; the contract is p (1 + 2 z_loss lse)"),
]  # fmt: skip


def faults() -> list[Fault]:
    return from_rows(_ROWS)
