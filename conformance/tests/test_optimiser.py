"""The optimiser alone on a recorded stream of gradients: who is right passes, each fault of it shows."""

import types

import numpy as np
import pytest

from conformance.models import bounds_by_name, judge_model_case, load_model_cases
from conformance.observations import Row, observe
from conformance.optimiser import expected, recorded
from conformance.runner import ABSENT, FAILED, PASSED
from conformance.targets import load
from conformance.targets.protocol import Target
from conformance.zoo import all_faults
from conformance.zoo.faults import Faulty
from conformance.zoo.plain_trainer import PlainTrainer, optimise

CASES = {case.id: case for case in load_model_cases() if case.stream is not None}
ADAMW = CASES["optimizer-adamw-stream"]
# Faults of the optimiser, each with the stream that must show it in both dtypes.
FAULTS = {
    "adam-eps-inside": "adamw", "adam-eps-before": "adamw", "adam-no-correction": "adamw",
    "adam-betas-default": "adamw", "decay-coupled": "adamw", "decay-after-step": "sgd", "clip-per-tensor": "sgd",
    "schedule-late": "lion", "sgd-nesterov": "sgd", "lion-order": "lion",
}  # fmt: skip


def target_with(function):
    return Target(types.SimpleNamespace(optimise=function), "theirs")


@pytest.mark.parametrize("name", ["core_numpy", "backend_torch", "backend_jax"])
def test_our_optimisers_stay_within_the_bound_of_every_element_after_every_update(name):
    pytest.importorskip({"backend_torch": "torch", "backend_jax": "jax"}.get(name, "numpy"))
    target = load(name)
    chosen = [ADAMW] if name == "backend_jax" else CASES.values()
    for case in chosen:
        for dtype in ("float64", "float32"):
            result = judge_model_case(case, target, dtype)
            assert (result.status, result.detail) == (PASSED, "")
            arrays = len(case.stream) * (2 if "ema" in case.train else 1)
            assert result.share <= 1.0 / 3.0 and result.comparisons == case.train["steps"] * arrays


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_optimiser_shows_in_both_dtypes(name):
    fault = next(fault for fault in all_faults() if fault.id == name)
    case = CASES[f"optimizer-{FAULTS[name]}-stream"]
    for dtype in ("float64", "float32"):
        assert judge_model_case(case, Target(Faulty(fault), name), dtype).status == FAILED


def test_a_correction_computed_in_float32_shows():
    class Narrow(PlainTrainer):
        def quotient(self, m, v, first, second):
            b1, b2 = (np.float32(b) for b in self.config.betas)
            one = np.float32(1.0)
            return super().quotient(m, v, one - b1 ** np.float32(self.t), one - b2 ** np.float32(self.t))

    result = judge_model_case(ADAMW, target_with(optimise(Narrow)), "float32")
    assert result.status == FAILED and result.share > 1.5


def test_the_bound_grows_slowly_and_holds_where_the_gradients_are_nudged():
    """One unit in the last place of each gradient moves the parameters by less than the bound."""
    config, params, stream = recorded(ADAMW, "float32")
    want, limits = expected(config, params, stream, "float32")
    draw = np.random.Generator(np.random.Philox(5))
    moved = [{n: np.nextafter(g, g * draw.choice([0.5, 2.0], g.shape)) for n, g in grads.items()} for grads in stream]
    other, _ = expected(config, params, moved, "float32")
    for t in (0, 9, 29):
        for name in params:
            assert np.all(np.abs(other[t][name] - want[t][name]) <= limits[t][name]), (t, name)
    assert np.all(limits[29]["matrix"] < 1e-4) and np.any(limits[0]["matrix"] > 0)


def test_a_target_has_it_as_a_function_of_numpy_arrays_or_does_not_offer_it():
    assert judge_model_case(ADAMW, target_with(optimise(PlainTrainer)), "float32").status == PASSED
    nothing = Target(types.SimpleNamespace(attention=lambda q, k, v: v), "theirs")
    result = judge_model_case(ADAMW, nothing, "float32")
    assert (result.status, result.detail) == (ABSENT, "no function optimise")


def test_what_comes_back_wrong_is_said_plainly():
    right = optimise(PlainTrainer)
    for wrong, said in (
        (lambda *a: right(*a)[:-1], "after each of 30 updates; got 29"),
        (lambda *a: [dict(list(now.items())[:2]) for now in right(*a)], "parameters must be named"),
        (
            lambda *a: [{n: p.astype(np.float64) for n, p in now.items()} for now in right(*a)],
            "must have dtype float32",
        ),
    ):
        result = judge_model_case(ADAMW, target_with(wrong), "float32")
        assert result.status == FAILED and said in result.detail


def test_the_diagnosis_sees_the_same_names_as_the_bounds():
    target = load("core_numpy")
    seen = observe(target, Row(ADAMW, "float32", "auto", 0.0, False))
    assert list(seen) == list(bounds_by_name(ADAMW, "float32"))
    assert len(seen) == 30 * 2 * len(ADAMW.stream)
