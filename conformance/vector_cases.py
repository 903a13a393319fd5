"""What a test vector holds: a case's call, its arrays, and the reference's answer with its bounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import exchange, models, oracle
from .inputs import rounded, widened
from .reference import reference
from .rows import Case
from .runner import arguments_of, overflowed, result_dtypes, without_floats

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Vector:
    """One call with its answer. request: the JSON beside the inputs. expected: results and gradients in float64, and
    for each that rounding may move a `bound.<name>`."""

    id: str
    rules: tuple[str, ...]
    function: str
    request: dict[str, Any]
    inputs: Arrays
    expected: Arrays


def vectors_of(case: Case) -> Iterator[Vector]:
    """Of a row: one vector per dtype; of an `unchanged` row one for each value that must make no difference too."""
    if case.verb == "refuses":  # a refusal is a sentence, not an array
        return
    dtypes = case.dtypes[: None if case.verb == "agrees" else 2]
    for dtype in ("float32",) if without_floats(case) else dtypes:
        given = arguments_of(case, dtype)
        yield _vector(case, dtype, case.id, given)
        if case.unchanged is None or case.unchanged.get("shields") == "pairs":
            continue
        for number, value in enumerate(case.unchanged["values"], start=1):
            moved = dict(given)
            name = case.unchanged["input"]
            moved[name] = given[name].copy()
            place = tuple(slice(*pair) for pair in case.unchanged["at"])
            moved[name][place] = rounded(np.array(float(value)), dtype)
            yield _vector(case, dtype, f"{case.id}-moved-{number}", moved)


def model_vectors_of(case: models.ModelCase) -> Iterator[Vector]:
    """Of a model row one vector per dtype; training runs are no vectors: too long for files, and judged in steps."""
    if case.train is not None:
        return
    core = reference()
    batch, call = models.inputs_of(case)
    mine = core.Transformer(models.config_of(core, case.config), seed=7, dtype="float64")
    initial = core.get_params(mine)
    for dtype in case.dtypes:
        params = models.random_params(case.id, initial, dtype)
        exact = {name: widened(x) for name, x in params.items()}
        given = models.forward_arguments(batch, call)
        want, bounds = models.forward_expected(mine, exact, batch, given, dtype)
        learns = "targets" in batch and not call
        inputs = {f"params.{name}": x for name, x in params.items()} | {"tokens": batch["tokens"], **given}
        arguments: dict[str, Any] = {"config": mine.config.to_dict()}
        if learns:
            more, more_bounds = models.gradients_expected(case, mine, exact, batch, dtype)
            want = want | {n if n == "loss" else f"gradient.{n}": x for n, x in more.items()}
            bounds = bounds | {n if n == "loss" else f"gradient.{n}": x for n, x in more_bounds.items()}
            inputs["targets"] = batch["targets"]
            arguments |= case.loss
            if case.dropout is not None:
                inputs["dropout_key"] = core.key(case.dropout)
        vector = f"{case.id}.{dtype}"
        asked = {
            "schema": exchange.SCHEMA, "function": "Transformer", "dtype": dtype, "positional": ["tokens"],
            "inputs": list(inputs), "arguments": arguments, "results": ["output", *(["loss"] if learns else [])],
            "gradients": list(initial) if learns else [], "id": vector, "case": case.id, "rules": list(case.rules),
            "why": case.why, "dtypes": {"output": dtype},
        }  # fmt: skip
        expected: Arrays = {}
        for name, value in want.items():
            expected |= _with_bound(name, value, bounds[name], None, 0.0)
        yield Vector(vector, case.rules, case.function, asked, inputs, expected)


def _vector(case: Case, dtype: str, case_id: str, given: dict[str, Any]) -> Vector:
    exact = {name: widened(x) for name, x in given.items()}
    want = oracle.expected(case.id, case.function, exact, list(case.gradients), dtype)
    cotangents = {name: rounded(x, _kind(name, dtype)) for name, x in want.cotangents.items()}
    asked, inputs = exchange.request(case.function, given, list(case.gradients), cotangents)
    dtypes = {
        name: kind for name, kind in result_dtypes(case.function, case.arguments, dtype).items() if name in want.results
    }
    vector = f"{case_id}.{dtype}"
    asked |= {
        "id": vector,
        "case": case.id,
        "rules": list(case.rules),
        "why": case.why,
        "dtype": dtype,
        "dtypes": dtypes,
    }
    expected: Arrays = {}
    for name, value in want.results.items():
        expected |= _with_bound(name, value, want.bounds.get(name), dtypes.get(name), case.tolerance)
    for name, value in want.gradients.items():
        expected |= _with_bound(f"gradient.{name}", value, want.gradient_bounds[name], None, case.tolerance)
    return Vector(vector, case.rules, case.function, asked, inputs, expected)


def _kind(name: str, dtype: str) -> str:
    return "float32" if name == "lse" and dtype != "float64" else dtype


def _with_bound(name: str, value: np.ndarray, bound: np.ndarray | None, dtype: str | None, tolerance: float) -> Arrays:
    if bound is None:
        return {name: np.asarray(value)}
    bound = np.broadcast_to(bound, value.shape) + (tolerance * np.abs(value) if tolerance else 0.0)
    wide = np.asarray(value, dtype=np.float64)
    return {name: overflowed(wide, dtype) if dtype else wide, f"bound.{name}": np.asarray(bound, dtype=np.float64)}
