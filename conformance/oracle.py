"""What a function row should give: the float64 reference on exactly the inputs that the target got, with bounds.

The oracle is `core_numpy` in float64. Rows with a literal answer do not pass through here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from . import budget
from .functions import ATTENTION, FUNCTIONS
from .inputs import generator, rounded, widened
from .magnitudes import magnitudes
from .memory import remembered
from .reference import Arrays, call, native, pull_back, reference


@dataclass(frozen=True)
class Expected:
    """results and gradients with a bound for each; cotangents are what the target must pull back."""

    results: Arrays
    bounds: Arrays
    gradients: Arrays
    gradient_bounds: Arrays
    cotangents: Arrays


def expected(case_id: str, function: str, arguments: dict[str, Any], wrt: list[str], dtype: str) -> Expected:
    """`arguments`: widened to float64. `wrt`: names to differentiate by; cotangents are drawn in the run's dtype."""
    key = ("expected", case_id, function, tuple(wrt), dtype)
    return remembered(key, lambda: _expected(case_id, function, arguments, wrt, dtype))


def _expected(case_id: str, function: str, arguments: dict[str, Any], wrt: list[str], dtype: str) -> Expected:
    results = call(function, arguments)
    return bounded(function, arguments, results, wrt, drawn(case_id, results, dtype) if wrt else {}, dtype)


def drawn(case_id: str, results: Arrays, dtype: str) -> Arrays:
    """Cotangents for the results, rounded to the run's dtype and widened again."""
    cotangents = {
        name: widened(rounded(generator(case_id, f"grad {name}").standard_normal(value.shape), dtype))
        for name, value in results.items()
    }
    if "lse" in cotangents:  # a dead query has lse -inf and no gradient
        cotangents["lse"] = np.where(np.isfinite(results["lse"]), cotangents["lse"], 0.0)
    return cotangents


def bounded(
    function: str, arguments: dict[str, Any], results: Arrays, wrt: list[str], cotangents: Arrays, dtype: str
) -> Expected:
    """The results with their bounds, and the gradients that belong to these cotangents."""
    if FUNCTIONS[function].exact:
        return Expected(results, {}, {}, {}, {})
    if function in ATTENTION:
        return _attention(function, arguments, results, wrt, cotangents, dtype)
    return _general(function, arguments, results, wrt, cotangents, dtype)


def _floats(arguments: dict[str, Any]) -> Arrays:
    """The float arrays among the arguments, those inside lists by name and place."""
    found: Arrays = {}
    for name, x in arguments.items():
        items = {f"{name}.{i}": item for i, item in enumerate(x)} if isinstance(x, list) else {name: x}
        found |= {n: item for n, item in items.items() if isinstance(item, np.ndarray) and item.dtype == np.float64}
    return found


def _with(arguments: dict[str, Any], moved: Arrays) -> dict[str, Any]:
    """The arguments with the arrays of `_floats` replaced."""
    return {
        name: [moved.get(f"{name}.{i}", item) for i, item in enumerate(x)]
        if isinstance(x, list)
        else moved.get(name, x)
        for name, x in arguments.items()
    }


def _general(
    function: str, arguments: dict[str, Any], results: Arrays, wrt: list[str], cotangents: Arrays, dtype: str
) -> Expected:
    floats = _floats(arguments)

    def forward(moved: Arrays) -> Arrays:
        return call(function, _with(arguments, moved))

    sizes, gradient_sizes = magnitudes(function, arguments, results, cotangents)
    bounds = budget.with_magnitudes(budget.perturbation_bounds(forward, floats, results, dtype), sizes, dtype)
    if not wrt:
        return Expected(results, bounds, {}, {}, {})

    def backward(moved: Arrays) -> Arrays:
        inner = {name: x for name, x in moved.items() if name in floats}
        outer = {name: moved.get(f"grad {name}", x) for name, x in cotangents.items()}
        return pull_back(function, _with(arguments, inner), wrt, outer)

    gradients = backward({})
    everything = floats | {f"grad {name}": x for name, x in cotangents.items()}
    moved = budget.perturbation_bounds(backward, everything, gradients, dtype)
    gradient_bounds = budget.with_magnitudes(moved, gradient_sizes, dtype, stored=True)
    return Expected(results, bounds, gradients, gradient_bounds, cotangents)


def _attention(
    function: str, arguments: dict[str, Any], results: Arrays, wrt: list[str], cotangents: Arrays, dtype: str
) -> Expected:
    core = reference()
    q, k = arguments["q"], arguments["k"]
    v = arguments.get("v")
    shared = {name: x for name, x in arguments.items() if name not in ("q", "k", "v")}
    p = call("attention_weights", {"q": q, "k": k, **{n: x for n, x in shared.items() if not n.startswith("dropout")}})
    weights = p["weights"]
    heads = q.shape[-3] if q.ndim > 2 else 1

    def repeat(x: np.ndarray) -> np.ndarray:
        return np.repeat(x, heads // x.shape[-3], axis=-3) if x.ndim > 2 else x

    k_all, v_all = repeat(k), None if v is None else repeat(v)
    scale = shared.get("scale")
    scale = 1.0 / np.sqrt(q.shape[-1]) if scale is None else scale
    finite_q, finite_k = np.nan_to_num(q, posinf=0.0, neginf=0.0), np.nan_to_num(k_all, posinf=0.0, neginf=0.0)
    bias = shared.get("bias")
    unit = budget.UNIT[budget.accumulation(dtype)]
    delta, slope = budget.score_errors(finite_q, finite_k, scale, shared.get("softcap"), bias, unit)
    kept = np.ones_like(weights)
    # Weights are given before dropout.
    rate = 0.0 if function == "attention_weights" else shared.get("dropout_rate", 0.0)
    if rate > 0:
        key = native({"key": shared["dropout_key"]})["key"]
        kept = core.bernoulli(key, 1.0 - rate, weights.shape) / (1.0 - rate) if rate < 1 else np.zeros_like(weights)
    terms = budget.Terms(p=weights, kept=kept, delta=delta, slope=slope)
    bounds = budget.attention_bounds(terms, v_all, results, dtype)
    if not wrt:
        return Expected(results, bounds, {}, {}, {})
    gradients = pull_back(function, arguments, wrt, cotangents)
    if function == "attention_weights":
        # The weights are attention over an identity: v = I gives the same formulas.
        v_all, grad, out = np.eye(k.shape[-2]), cotangents["weights"], results["weights"]
        v_all = np.broadcast_to(v_all, (*weights.shape[:-2], *v_all.shape))
    else:
        assert v_all is not None
        grad, out = cotangents["out"], results["out"]
    raw = budget.attention_gradient_bounds(
        terms, finite_q, finite_k, v_all, out, np.nan_to_num(grad), cotangents.get("lse"), scale, dtype
    )
    gradient_bounds = {}
    for name in wrt:
        value = gradients[name]
        if name in ("k", "v"):
            summed = _sum_groups(raw[name], value.shape)
        elif name == "q":
            summed = raw[name]
        elif name == "bias":
            summed = _sum_broadcast(
                raw["scores"] / np.maximum(slope, unit) if shared.get("softcap") else raw["scores"], value.shape
            )
        else:
            summed = _sink_bound(weights, grad, out, raw["scores"], cotangents.get("lse"), value.shape, dtype)
        gradient_bounds[name] = budget.rounded_output(summed, np.nan_to_num(np.abs(value)), dtype)
    return Expected(results, bounds, gradients, gradient_bounds, cotangents)


def _sum_groups(bound: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if bound.ndim < 3 or bound.shape[-3] == shape[-3]:
        return bound
    groups = shape[-3]
    return bound.reshape(*bound.shape[:-3], groups, bound.shape[-3] // groups, *bound.shape[-2:]).sum(axis=-3)


def _sum_broadcast(bound: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    padded = (1,) * (bound.ndim - len(shape)) + shape
    axes = tuple(i for i, (have, want) in enumerate(zip(bound.shape, padded, strict=True)) if want == 1 and have != 1)
    return bound.sum(axis=axes, keepdims=True).reshape(shape) if bound.size else np.zeros(shape)


def _sink_bound(
    weights: np.ndarray,
    grad: np.ndarray,
    out: np.ndarray,
    scores: np.ndarray,
    grad_lse: np.ndarray | None,
    shape: tuple[int, ...],
    dtype: str,
) -> np.ndarray:
    """d sink = sum_t p_sink (dlse - dO . O): its errors are bounded by those of dS, summed, and of the row sums."""
    unit = budget.UNIT[budget.accumulation(dtype)]
    stored = budget.STORED * budget.UNIT[dtype] if dtype in ("float16", "bfloat16") else 0.0
    sink = np.clip(1.0 - weights.sum(axis=-1), 0.0, 1.0)
    size = np.abs(grad * out).sum(axis=-1) + (0.0 if grad_lse is None else np.abs(grad_lse))
    error = scores.sum(axis=-1) + (8.0 * unit * np.sqrt(grad.shape[-1] + 2.0) + stored) * sink * size
    if dtype == "float64":
        error = error + budget.MEANING * size
    axes = tuple(i for i in range(error.ndim) if not (len(shape) and i == error.ndim - 2))
    return error.sum(axis=axes).reshape(shape)
