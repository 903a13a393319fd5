"""Which cases catch a fault, and by how much."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .. import models, space
from ..memory import remembering
from ..runner import FAILED, Result, run_case
from ..targets.protocol import Target
from .faults import Fault, Faulty

# A fault that raises has not been judged: what it computes is wrong, not how it is written.
_RAISED = re.compile(r"\w+(Error|Exception): ")
# Where the faults of a name show: the verdict on a model needs more than the name itself.
_SEEN_BY = {"loss_and_gradients": "Transformer"}


@dataclass(frozen=True)
class Caught:
    """A fault, the ids of the cases that failed on it, and the largest share of a budget that it took; share is 0
    where no case failed by its budget (a wrong shape, a value that must be exact)."""

    fault: Fault
    cases: tuple[str, ...]
    share: float


def touched(fault: Fault) -> set[str]:
    """The functions whose cases can see the fault."""
    names = {name.removeprefix("gradients.").removesuffix("_vjp") for name in fault.functions()}
    return {_SEEN_BY.get(name, name) for name in names} | ({"random_bits", "uniform"} if "key" in names else set())


def cases_for(fault: Fault, level: str) -> list[Any]:
    names = touched(fault)
    chosen: list[Any] = [
        case for case in space.select(level) if case.function in names and (case.verb == "refuses") <= fault.refusals
    ]
    return chosen + [case for case in models.select_models(level) if case.function in names]


def results(case: Any, target: Target) -> Iterator[Result]:
    run: Any = models.run_model_case if isinstance(case, models.ModelCase) else run_case
    yield from run(case, target)


def catch(fault: Fault, level: str = "quick", *, first: bool = False) -> Caught:
    """Run the cases of the functions that the fault touches; `first` stops at the first catch."""
    target = Target(Faulty(fault), fault.id)
    caught: list[str] = []
    share = 0.0
    with remembering():
        for case in cases_for(fault, level):
            failed = False
            for result in results(case, target):
                if result.status != FAILED or _RAISED.match(result.detail):
                    continue
                failed = True
                share = max(share, result.share or 0.0)
                if first:
                    return Caught(fault, (case.id,), share)
            if failed:
                caught.append(case.id)
    return Caught(fault, tuple(caught), share)
