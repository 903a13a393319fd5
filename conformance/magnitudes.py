"""The magnitudes that a formula adds up: what the rounding of its own intermediates costs, in units of u.

Perturbing the inputs (budget.perturbation_bounds) shows how a result moves with them, not what cancels inside:
gelu(-5) is a small difference of numbers near 5, whatever x does. Here stands, per function, the sum of the
absolute values of the terms of its formula; one more rounding of each costs u times that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .reference import Arrays, call, pull_back


def _softmax(a: dict[str, Any], results: Arrays, grads: Arrays) -> tuple[Arrays, Arrays]:
    y, axis = results["out"], a.get("axis", -1)
    forward = {"out": y}
    if not grads:
        return forward, {}
    dy = np.abs(grads["out"])
    return forward, {"x": y * (dy + np.sum(y * dy, axis=axis, keepdims=True))}


def _norm(a: dict[str, Any], results: Arrays, grads: Arrays, centred: bool) -> tuple[Arrays, Arrays]:
    x = a["x"]
    mean = x.mean(axis=-1, keepdims=True) if centred else 0.0
    r = 1.0 / np.sqrt(np.mean((x - mean) ** 2, axis=-1, keepdims=True) + a["eps"])
    weight = 1.0 if a.get("weight") is None else np.abs(a["weight"]) + float(a.get("unit_offset", False))
    bias = 0.0 if a.get("bias") is None else np.abs(a["bias"])
    # x - mean is rounded at the size of x: with a mean far from 0 that is most of the error.
    normal = (np.abs(x) + np.abs(mean)) * r
    forward = {"out": normal * weight + bias}
    if not grads:
        return forward, {}
    dy = np.abs(grads["out"])
    g = dy * weight
    inner = g + g.mean(axis=-1, keepdims=True) + normal * np.mean(g * normal, axis=-1, keepdims=True)
    rows = tuple(range(x.ndim - 1))
    return forward, {"x": r * inner, "weight": (dy * normal).sum(axis=rows), "bias": dy.sum(axis=rows)}


def _layer_norm(a: dict[str, Any], results: Arrays, grads: Arrays) -> tuple[Arrays, Arrays]:
    return _norm(a, results, grads, True)


def _rms_norm(a: dict[str, Any], results: Arrays, grads: Arrays) -> tuple[Arrays, Arrays]:
    return _norm(a, results, grads, False)


def _activation(a: dict[str, Any], results: Arrays, grads: Arrays) -> tuple[Arrays, Arrays]:
    x = np.abs(a["x"])
    return {"out": x}, {"x": np.abs(grads["out"]) * (1.0 + x)} if grads else {}


def _cross_entropy(a: dict[str, Any], results: Arrays, grads: Arrays) -> tuple[Arrays, Arrays]:
    logits = a["logits"]
    counted = np.asarray(a["targets"]) != a.get("ignore_index", -100)
    number = max(int(counted.sum()), 1)
    top = np.abs(logits).max(axis=-1)
    lse = np.log(np.exp(logits - logits.max(axis=-1, keepdims=True)).sum(axis=-1)) + logits.max(axis=-1)
    terms = 2.0 * top + np.abs(lse) + a.get("z_loss", 0.0) * lse**2
    forward = {"loss": np.asarray((terms * counted).sum() / number)}
    if not grads:
        return forward, {}
    p = np.exp(logits - lse[..., None])
    target = np.zeros_like(p)
    rows = np.where(counted, a["targets"], 0)
    np.put_along_axis(target, rows[..., None].astype(np.int64), 1.0, axis=-1)
    z = 1.0 + 2.0 * a.get("z_loss", 0.0) * np.abs(lse)
    size = (p * z[..., None] + target + a.get("label_smoothing", 0.0) / p.shape[-1]) * counted[..., None]
    return forward, {"logits": np.abs(grads["loss"]) * size / number}


def _sums(name: str) -> Callable[[dict[str, Any], Arrays, Arrays], tuple[Arrays, Arrays]]:
    """A table whose gradient is a sum of upstream gradients; the forward copies."""

    def of(a: dict[str, Any], results: Arrays, grads: Arrays) -> tuple[Arrays, Arrays]:
        function = "embed" if name == "embed" else "relative_bias"
        if not grads:
            return {}, {}
        upstream = {key: np.abs(x) for key, x in grads.items()}
        return {}, pull_back(function, a, ["table"], upstream)

    return of


def _rotary(a: dict[str, Any], results: Arrays, grads: Arrays) -> tuple[Arrays, Arrays]:
    cos, sin = np.abs(a["cos"]), np.abs(a["sin"])
    # |a| |cos| + |b| |sin|: a rotation of absolute values by a table whose sine enters with the sign that adds.
    layout = {"layout": a["layout"]} if "layout" in a else {}

    def size(x: np.ndarray) -> np.ndarray:
        plus = call("apply_rotary", {"x": np.abs(x), "cos": cos, "sin": sin, **layout})["out"]
        minus = call("apply_rotary", {"x": np.abs(x), "cos": cos, "sin": -sin, **layout})["out"]
        return np.maximum(plus, minus)

    return {"out": size(a["x"])}, {"x": size(grads["out"])} if grads else {}


def _angles(a: dict[str, Any], results: Arrays, grads: Arrays) -> tuple[Arrays, Arrays]:
    # A sine of an angle that was reduced to one turn: the rounding of an angle of a few radians.
    return {name: np.full(x.shape, np.pi * a.get("attention_factor", 1.0)) for name, x in results.items()}, {}


Magnitude = Callable[[dict[str, Any], Arrays, Arrays], tuple[Arrays, Arrays]]
MAGNITUDES: dict[str, Magnitude] = {
    "softmax": _softmax,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "gelu": _activation,
    "silu": _activation,
    "cross_entropy": _cross_entropy,
    "embed": _sums("embed"),
    "relative_bias": _sums("relative_bias"),
    "apply_rotary": _rotary,
    "sinusoidal_encoding": _angles,
    "rotary_tables": _angles,
}


def magnitudes(function: str, arguments: dict[str, Any], results: Arrays, cotangents: Arrays) -> tuple[Arrays, Arrays]:
    """By result and by differentiated argument; empty for functions whose terms do not cancel."""
    if function not in MAGNITUDES:
        return {}, {}
    with np.errstate(all="ignore"):
        return MAGNITUDES[function](arguments, results, cotangents)
