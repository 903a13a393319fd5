"""Every field of a configuration is read: a backend that ignores one, in all it does or in its gradients alone, fails.

The target is the reference with one field changed behind the caller's back. Cases are judged as they are for the target
that is asked least: one dtype each, and no forward pass of its own where loss and gradients are compared.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import core_numpy as core
from conformance.memory import remembering
from conformance.models import config_of, judge_model_case, load_model_cases, model_dtypes
from conformance.runner import FAILED
from conformance.targets.protocol import Target
from core_numpy.contract import config as contract

CASES = [case for case in load_model_cases() if case.train is None and case.stream is None and case.level == "quick"]
CHOICES = {
    "activation": contract.ACTIVATIONS, "norm": contract.NORMS, "norm_place": contract.NORM_PLACES,
    "positions": contract.POSITIONS, "rotary_layout": contract.ROTARY_LAYOUTS, "head": contract.HEADS,
    "pool": contract.POOLS, "kind": contract.KINDS,
}  # fmt: skip
# What has no default is ignored by taking another number.
REQUIRED = {
    "width": lambda config: config.width + config.heads, "heads": lambda config: 1,
    "vocab": lambda config: config.vocab + 1, "layers": lambda config: config.layers + 1,
    "classes": lambda config: config.classes and config.classes + 1,
}  # fmt: skip
# What cannot stay where the first field changes.
BESIDE: dict[str, dict[str, Any]] = {
    "heads": {"kv_heads": None}, "layers": {"layer_windows": None}, "norm_place": {"shared_norm": False},
    "head": {"classes": None, "tie_embeddings": False, "head_bias": None},
    "kind": {"share_embedding": False, "causal": None},
}  # fmt: skip
# A model's blocks get it from its kind; a model's own must be False.
ELSEWHERE = {"cross_attention"}
DEFAULTS = {
    each.name: each.default for each in dataclasses.fields(core.ModelConfig) if each.default is not dataclasses.MISSING
}
FIELDS = [each.name for each in dataclasses.fields(core.ModelConfig) if each.name not in ELSEWHERE]


class Ignoring:
    """The reference, whose Transformer has `field` read as `value`: in everything, or for its gradients alone."""

    FRAMEWORK = "numpy"

    def __init__(self, changed: Any, *, gradient: bool) -> None:
        self.changed, self.gradient = changed, gradient

    def __getattr__(self, name: str) -> Any:
        return getattr(core, name)

    def Transformer(self, config: Any, **given: Any) -> Any:
        return core.Transformer(config if self.gradient else self.changed, **given)

    def loss_and_gradients(self, model: Any, batch: Any, **options: Any) -> Any:
        loss, grads = core.loss_and_gradients(model, batch, **options)
        if self.gradient:
            other = core.Transformer(self.changed, seed=7, dtype=model.dtype)
            own, draw = core.get_params(model), np.random.default_rng(0)
            params = {
                name: own[name] if fits(own, name, x) else (x + 0.1 * draw.standard_normal(x.shape)).astype(x.dtype)
                for name, x in core.get_params(other).items()
            }
            core.set_params(other, params)
            wrong = core.loss_and_gradients(other, batch, **options)[1]
            grads = {name: wrong[name] if fits(wrong, name, x) else np.zeros_like(x) for name, x in grads.items()}
        return loss, grads


def fits(arrays: dict[str, np.ndarray], name: str, x: np.ndarray) -> bool:
    return name in arrays and arrays[name].shape == x.shape


class Least(Target):
    """A target of which each case asks as little as of any: what a compiled one is asked at the quick level."""

    compiles = True


def changes(field: str, config: Any) -> Iterator[Any]:
    """The configuration with the field ignored: at its default, or at each other value where there are few."""
    value = getattr(config, field)
    others: list[Any]
    if field in REQUIRED:
        others = [REQUIRED[field](config)]
    elif field in CHOICES:
        others = list(CHOICES[field])
    elif isinstance(DEFAULTS[field], bool):
        others = [not value]
    else:
        others = [DEFAULTS[field]]
    for other in others:
        if other == value or (other is None and value is None):
            continue
        try:
            yield config.replace(**{field: other}, **BESIDE.get(field, {}))
        except ValueError:
            continue


def caught(case: Any, changed: Any, *, gradient: bool) -> bool | None:
    """Whether the case fails on its numbers; None where the changed model cannot be called so at all."""
    target = Least(Ignoring(changed, gradient=gradient), "ignoring")
    (dtype,) = model_dtypes(case, target, "quick")
    result = judge_model_case(case, target, dtype, "quick")
    return None if re.match(r"\w+(Error|Exception): ", result.detail) else result.status == FAILED


def differentiated(case: Any) -> bool:
    return "targets" in case.batch and not case.call


@pytest.fixture(scope="module", autouse=True)
def memory():
    """What the reference says of a case is computed once for all faults."""
    with remembering():
        yield


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_that_is_ignored_fails_a_case(field):
    verify(field, gradient=False)


# A model with another head has no loss of the same targets.
@pytest.mark.parametrize("field", [field for field in FIELDS if field != "head"])
def test_a_field_that_the_gradients_alone_ignore_fails_a_case(field):
    verify(field, gradient=True)


def verify(field: str, *, gradient: bool) -> None:
    """Some case fails for each value that the field has in the cases, whatever is taken in its place."""
    seen: dict[Any, bool] = {}
    for case in CASES:
        config = config_of(core, case.config)
        for changed in changes(field, config):
            if gradient and not differentiated(case):
                continue
            few = field in CHOICES or isinstance(DEFAULTS.get(field), bool)
            pair = (getattr(config, field), getattr(changed, field)) if few else field
            if not seen.get(pair, False) and (found := caught(case, changed, gradient=gradient)) is not None:
                seen[pair] = found
    assert seen, f"no case has {field} at another value than its default"
    assert all(seen.values()), f"no case fails: {[pair for pair, found in seen.items() if not found]}"


@pytest.mark.parametrize("field", CHOICES)
def test_every_choice_is_in_a_case_and_its_gradients_in_one(field):
    values = {getattr(config_of(core, case.config), field) for case in CASES}
    assert values == set(CHOICES[field])
    values = {getattr(config_of(core, case.config), field) for case in CASES if differentiated(case)}
    # Without a head there is no loss.
    assert values == set(CHOICES[field]) - ({"none"} if field == "head" else set())
