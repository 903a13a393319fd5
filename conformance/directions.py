"""The oracle's gradients held against its own results: differences along random directions, and the adjoint identity.

    <u, f(x + h d) - f(x - h d)> / 2h  =  <u, J d>  =  <J^T u, d>

On the left are results alone, on the right the hand-derived gradient that targets are judged by. d is x with random
signs, for one argument at a time. What a difference leaves out falls with h, what it rounds away grows: a right
gradient agrees at one h at least, a wrong one at none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import oracle
from .inputs import generator, widened
from .models import ModelCase, config_of, inputs_of, random_params
from .reference import Arrays, call, pull_back, reference
from .rows import Case
from .runner import arguments_of

STEPS = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7)
# Of the products that are summed, in the root mean square: what a difference at its best step is right to.
CLOSE = 1e-5
# Units in the last place of what is subtracted, and the least that a difference can be told from nothing by.
ROUNDED, LEAST = 64.0 * 2.0**-53, 1e-280


@dataclass(frozen=True)
class Along:
    """One argument's gradient along a direction. apart: the least distance of <J^T u, d> from a difference, over the
    steps, in shares of what that may be off by: over 1 they disagree. size: of the products that are summed."""

    argument: str
    apart: float
    size: float


def directions(case: Case, gradients: Any = None) -> Iterator[Along]:
    """Each argument by which a case asks to differentiate, in float64. gradients: another's in the place of the
    reference's, by `function(function, arguments, wrt, cotangents)`."""
    exact = {name: widened(x) for name, x in arguments_of(case, "float64").items()}
    results = call(case.function, exact)
    outer = oracle.drawn(case.id, results, "float64")
    found = (gradients or pull_back)(case.function, exact, list(case.gradients), outer)
    for name in case.gradients:
        x = exact[name]
        signs = np.sign(generator(case.id, f"direction {name}").standard_normal(x.shape))
        d = np.where(np.isfinite(x), x, 0.0) * signs
        yield _along(case.function, exact, outer, name, d, np.asarray(found[name]))


def _along(
    function: str, exact: dict[str, Any], outer: Arrays, name: str, d: np.ndarray, gradient: np.ndarray
) -> Along:
    products = np.where(d == 0, 0.0, gradient * d)
    product, size = float(products.sum()), float(np.sqrt((products**2).sum()))
    least = np.inf
    for h in STEPS:
        up, down = (call(function, {**exact, name: exact[name] + side * h * d}) for side in (1.0, -1.0))
        difference, rounded = 0.0, 0.0
        for key, u in outer.items():
            some = np.isfinite(up[key]) & np.isfinite(down[key])
            difference += float((np.where(some, up[key] - down[key], 0.0) * u)[some].sum()) / (2.0 * h)
            terms = np.where(some, np.abs(up[key]) * np.abs(u), 0.0)
            rounded += ROUNDED * float(np.sqrt((terms**2).sum())) / h
        least = min(least, abs(difference - product) / (CLOSE * size + rounded + LEAST))
    return Along(name, least, size)


def model_directions(case: ModelCase, module: Any = None, *, each: bool = False) -> Iterator[Along]:
    """A model case's loss along random directions: one through all parameters, or one for each. module: another's
    Transformer and loss_and_gradients in the place of the reference's."""
    module = module or reference()
    batch, _ = inputs_of(case)
    model = module.Transformer(config_of(module, case.config), seed=7, dtype="float64")
    params = random_params(case.id, dict(module.get_params(model)), "float64")
    key = {} if case.dropout is None else {"dropout_key": module.key(case.dropout)}

    def at(moved: Arrays) -> tuple[float, Arrays]:
        module.set_params(model, moved)
        loss, gradients = module.loss_and_gradients(model, batch, **case.loss, **key)
        return float(loss), gradients

    _, found = at(params)
    signs = {n: np.sign(generator(case.id, f"direction {n}").standard_normal(x.shape)) for n, x in params.items()}
    for names in [[name] for name in params] if each else [list(params)]:
        d = {name: params[name] * signs[name] for name in names}
        products = np.concatenate([np.ravel(found[name] * d[name]) for name in names])
        product, size = float(products.sum()), float(np.sqrt((products**2).sum()))
        least = np.inf
        for h in STEPS[1:4]:
            up, down = (at(params | {n: params[n] + side * h * d[n] for n in names})[0] for side in (1.0, -1.0))
            rounded = ROUNDED * max(abs(up), 1.0) / h
            least = min(least, abs((up - down) / (2.0 * h) - product) / (CLOSE * size + rounded))
        yield Along(", ".join(names), least, size)
