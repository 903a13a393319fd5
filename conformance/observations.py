"""What a target gives on a case, by name, and how far apart two such observations are, in shares of the case's budget.

Diagnosis (`diagnose`) holds a target's observations against those of every known fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import budget, models, optimiser, oracle, space
from .compare import Disagreement
from .inputs import rounded, widened
from .memory import remembered
from .models import ModelCase
from .reference import reference
from .rows import Case, Pattern
from .runner import ABSENT, FAILED, Result, arguments_of, as_offered, lse_dtype, run_case
from .targets.protocol import STRIDED, NotOffered, Target

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Row:
    """A case in the dtype and kernel in which it is looked at. share: of its budget, over 1 failed, and 0 where it has
    no number. strided: the way of STRIDED in which its arrays lie, where it fails in that way alone."""

    case: Case | ModelCase
    dtype: str
    kernel: str
    share: float
    failed: bool
    strided: str = ""


def rows_of(target: Target, level: str = "quick", pattern: Pattern = None) -> list[Row]:
    """Every case that the target offers, refusals aside, judged: failing ones in the dtype where they fail first."""
    rows = [row_of(target, case, level) for case in cases_of(level, pattern)]
    return [row for row in rows if row is not None]


def cases_of(level: str = "quick", pattern: Pattern = None) -> list[Case | ModelCase]:
    """The cases that show in numbers: all but refusals."""
    cases: list[Case | ModelCase] = [case for case in space.select(level, pattern) if case.verb != "refuses"]
    return [*cases, *models.select_models(level, pattern)]


def row_of(target: Target, case: Case | ModelCase, level: str = "quick") -> Row | None:
    """The case, judged; None for one that the target does not offer."""
    worst = _worst(case, target, level)
    if worst is None:
        return None
    case = as_offered(case, target)[0] if isinstance(case, Case) else case
    # Contiguous arrays are judged first: a failure that names a way of lying in memory is of that way alone.
    strided = next((way for way in STRIDED if worst.status == FAILED and worst.detail.startswith(f"{way} ")), "")
    return Row(case, worst.dtype, worst.kernel, worst.share or 0.0, worst.status == FAILED, strided)


def look_at(target: Target, case: Case | ModelCase, level: str = "quick") -> tuple[Row, Arrays] | None:
    """The case, judged, and what the target gives on it where it fails."""
    row = row_of(target, case, level)
    return None if row is None else (row, observe(target, row) if row.failed else {})


def _worst(case: Case | ModelCase, target: Target, level: str) -> Result | None:
    """The first call that fails, or else the first that was judged."""
    first = None
    for result in _results(case, target, level):
        if result.status == FAILED:
            return result
        if first is None and result.status != ABSENT:
            first = result
    return first


def _results(case: Case | ModelCase, target: Target, level: str) -> Iterator[Result]:
    if isinstance(case, ModelCase):
        return models.run_model_case(case, target, level)
    return run_case(case, target, level)


def observe(target: Target, row: Row) -> Arrays:
    """What a target gives on a row: results and gradients by name, or the kind of its error, or what it wrote into."""
    found: Arrays = {}
    work = _observe_call if isinstance(row.case, Case) else _observe_model if row.case.train is None else _observe_run
    try:
        with target.scope(row.dtype):
            work(target, row, found)
    except NotOffered:
        pass
    except KeyboardInterrupt:
        raise
    except Disagreement as wrong:
        return {"error": np.array(str(wrong) if "wrote into" in str(wrong) else type(wrong).__name__)}
    except BaseException as error:  # whatever a target raises is an observation
        return {"error": np.array(type(error).__name__)}
    return found


def _observe_call(target: Target, row: Row, found: Arrays) -> None:
    case = row.case
    assert isinstance(case, Case)
    given = arguments_of(case, row.dtype, row.kernel)
    if row.strided:
        target.require(case.function, given)
        found |= target.call(case.function, given, strided=row.strided)
        return
    for label, arguments in _variants(case, given, row.dtype):
        target.require(case.function, arguments)
        found |= {f"{label}{name}": x for name, x in target.call(case.function, arguments).items()}
    if case.gradients:
        cotangents = _cotangents(case, given, row.dtype)
        got = target.gradients(case.function, given, list(case.gradients), cotangents)
        found |= {f"gradient of {name}": x for name, x in got.items()}


def _observe_model(target: Target, row: Row, found: Arrays) -> None:
    """Initial parameters, then output, loss and gradients from the case's own parameters."""
    case, module = row.case, target.module
    assert isinstance(case, ModelCase)
    batch, call = models.inputs_of(case)
    model = module.Transformer(models.config_of(module, case.config), seed=7, dtype=row.dtype)
    found |= {f"initial {name}": x for name, x in module.get_params(model).items()}
    module.set_params(model, models.random_params(case.id, _initial(case), row.dtype))
    if target.framework == "torch":
        model.eval()
    given = {name: target.native(x) for name, x in models.forward_arguments(batch, call).items()}
    found["output"] = target.numpy(model(target.native(batch["tokens"]), **given))
    if "targets" not in batch or call:
        return
    key = {} if case.dropout is None else {"dropout_key": module.key(case.dropout)}
    native = {name: target.native(x) for name, x in batch.items()}
    loss, grads = module.loss_and_gradients(model, native, **case.loss, **key)
    found["loss"] = np.asarray(loss, dtype=np.float64)
    found |= {f"gradient of {name}": np.asarray(x) for name, x in grads.items()}


def _observe_run(target: Target, row: Row, found: Arrays) -> None:
    """The records and the last parameters of a training run."""
    case = row.case
    assert isinstance(case, ModelCase)
    if case.stream is not None:
        found |= optimiser.by_name(target.optimise(*optimiser.recorded(case, row.dtype)))
        return
    found |= models.training_answers(case, target, _initial(case, row.dtype), row.dtype)


def _initial(case: ModelCase, dtype: str = "float64") -> Arrays:
    core = reference()
    return dict(core.get_params(core.Transformer(models.config_of(core, case.config), seed=7, dtype=dtype)))


def _variants(case: Case, given: dict[str, Any], dtype: str) -> list[tuple[str, dict[str, Any]]]:
    calls = [("", given)]
    if case.unchanged is not None:
        name, place = case.unchanged["input"], case.unchanged["at"]
        for value in case.unchanged["values"]:
            moved = given[name].copy()
            moved[tuple(slice(*pair) for pair in place)] = rounded(
                np.float64({"nan": np.nan, "inf": np.inf}.get(value, value)) * np.ones(()), dtype
            )
            calls.append((f"{name} at {value}: ", {**given, name: moved}))
    return calls


def _expected(case: Case, given: dict[str, Any], dtype: str) -> oracle.Expected:
    exact = {name: widened(x) for name, x in given.items() if name != "kernel"}
    return oracle.expected(case.id, case.function, exact, list(case.gradients), dtype)


def _cotangents(case: Case, given: dict[str, Any], dtype: str) -> Arrays:
    found = _expected(case, given, dtype).cotangents
    return {name: rounded(x, lse_dtype(dtype) if name == "lse" else dtype) for name, x in found.items()}


def bounds_of(row: Row) -> Arrays:
    """The row's budgets under the names of its observations; what has none must be equal."""

    def make() -> Arrays:
        if isinstance(row.case, ModelCase):
            return models.bounds_by_name(row.case, row.dtype)
        want = _expected(row.case, arguments_of(row.case, row.dtype), row.dtype)
        return want.bounds | {f"gradient of {name}": x for name, x in want.gradient_bounds.items()}

    return remembered(("bounds", row.case.id, row.case.function, row.dtype), make)


def distance(got: Arrays, other: Arrays, bounds: Arrays, dtype: str) -> float:
    """The largest difference in shares of the budget; infinite where shapes, dtypes, NaN or exact values differ.

    What only `other` has is passed over: a target may have no gradients.
    """
    if not got or not set(got) <= set(other):
        return np.inf
    return max((_apart(name, x, other[name], bounds, dtype) for name, x in got.items()), default=0.0)


def _apart(name: str, x: np.ndarray, y: np.ndarray, bounds: Arrays, dtype: str) -> float:
    if x.shape != y.shape or x.dtype != y.dtype or x.dtype.kind == "U":
        return 0.0 if x.shape == y.shape and x.dtype.kind == y.dtype.kind == "U" and bool((x == y).all()) else np.inf
    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if same.all():
        return 0.0
    bound = bounds.get(name.rsplit(": ", 1)[-1])
    error = np.abs(np.subtract(a, b, out=np.zeros(a.shape), where=~same))
    if bound is None or not bound.size or not np.isfinite(error).all():
        return np.inf
    if bound.shape != a.shape:  # a result of a wrong shape, on both sides: no element has a bound of its own
        bound = np.full(a.shape, bound.max())
    # A fault's own result may be larger than the right one, and stand where the right one is exactly 0.
    size = np.where(np.isfinite(b), np.abs(b), 0.0)
    allowed = bound + np.mean(bound) + budget.OUTPUT * budget.UNIT[dtype] * size
    return float(np.max(np.divide(error, allowed, out=np.full(a.shape, np.inf), where=allowed > 0)[~same]))
