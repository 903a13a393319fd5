"""The suite on our own packages, and the suite's own parts: a check that cannot fail is no check."""

from __future__ import annotations

import json
import types

import numpy as np
import pytest

from conformance import inputs, models, oracle, rows, space, summary
from conformance.compare import Disagreement, Tally, check_exact, check_within
from conformance.runner import ABSENT, FAILED, PASSED, judge, judged, run_case
from conformance.targets import load
from conformance.targets.protocol import Target

FRAMEWORK = {"core_numpy": "numpy", "backend_torch": "torch", "backend_jax": "jax"}


def test_the_suite_passes_on_numpy_and_torch_function_by_function():
    names = ["core_numpy"]
    try:
        import torch
    except ImportError:
        pass
    else:
        torch.set_num_threads(1)
        names.append("backend_torch")
    for name in names:
        target = load(name)
        results = [r for case in rows.select(rows.load_cases(), "quick") for r in run_case(case, target, "quick")]
        assert not [(r.case, r.dtype, r.kernel, r.detail) for r in results if r.status == FAILED]
        assert sum(r.comparisons for r in results) > 1000


@pytest.mark.parametrize("name", ["core_numpy", "backend_torch"])
def test_the_suite_passes_on_models_and_training(name):
    pytest.importorskip(FRAMEWORK[name])
    target = load(name)
    results = [r for case in models.select_models("quick") for r in models.run_model_case(case, target, "quick")]
    assert not [(r.case, r.dtype, r.detail) for r in results if r.status == FAILED]
    assert sum(r.comparisons for r in results) > 1000


@pytest.mark.parametrize("name", FRAMEWORK)
def test_a_spread_of_cases_passes_in_every_framework(name):
    pytest.importorskip(FRAMEWORK[name])
    target = load(name)
    chosen = [case for case in rows.select(rows.load_cases(), "quick") if case.verb == "agrees"][::9]
    results = [r for case in chosen for r in run_case(case, target, "quick")]
    assert not [(r.case, r.dtype, r.kernel, r.detail) for r in results if r.status == FAILED]
    assert {r.status for r in results} >= {PASSED}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FRAMEWORK)
def test_the_suite_passes_at_full_level(name):
    pytest.importorskip(FRAMEWORK[name])
    target = load(name)
    results = [r for case in space.select("full") for r in run_case(case, target, "full")]
    results += [r for case in models.select_models("full") for r in models.run_model_case(case, target, "full")]
    assert not [(r.case, r.dtype, r.kernel, r.detail) for r in results if r.status == FAILED]


def case(**changes):
    table = {
        "id": "one",
        "rules": ("softmax",),
        "why": "a test",
        "function": "softmax",
        "inputs": {"x": {"shape": [2, 3]}},
    }
    return rows.Case(**{**table, **changes})


def test_a_case_that_compares_nothing_fails():
    result = judged(case(), load("core_numpy"), "float32", "auto", lambda tally: None)
    assert (result.status, result.detail) == (FAILED, "the case compared nothing")


def test_a_share_above_one_fails_and_nan_is_no_pass():
    target = load("core_numpy")
    assert judged(case(), target, "float32", "auto", lambda t: t.add("x", 1.01)).status == FAILED
    assert judged(case(), target, "float32", "auto", lambda t: t.add("x", 0.99)).status == PASSED


def test_what_a_target_lacks_is_not_offered_and_never_passed():
    empty = Target(types.SimpleNamespace(), "empty")
    assert judge(case(), empty, "float32").status == ABSENT
    narrow = Target(types.SimpleNamespace(softmax=lambda x: x), "narrow")
    assert judge(case(arguments={"axis": 0}), narrow, "float32").status == ABSENT


def test_a_target_that_raises_or_returns_the_wrong_thing_fails_the_case():
    for wrong in (
        lambda x: 1 / 0,
        lambda x: x[:1],
        lambda x: x.astype(np.float64),
        lambda x: x * np.nan,
        lambda x: (x, x),
    ):
        target = Target(types.SimpleNamespace(softmax=wrong), "wrong")
        result = judge(case(), target, "float32")
        assert result.status == FAILED
        assert result.detail


def test_the_budget_of_weights_does_not_know_of_dropout():
    """Weights are given before dropout, and so are their gradients: the dropped ones have a budget too."""
    draw = np.random.Generator(np.random.Philox(1))
    q, k = draw.standard_normal((2, 2, 9, 4)), draw.standard_normal((2, 2, 9, 4))
    dropped = {"q": q, "k": k, "dropout_rate": 0.9, "dropout_key": inputs.Key(3)}
    for dtype in ("float32", "bfloat16"):
        with_it, without = (
            oracle.expected("one", "attention_weights", given, ["q", "k"], dtype)
            for given in (dropped, {"q": q, "k": k})
        )
        for name, bound in without.gradient_bounds.items():
            np.testing.assert_array_equal(with_it.gradient_bounds[name], bound)
        assert all((bound > 0).all() for bound in with_it.gradient_bounds.values())


def test_values_below_the_smallest_normal_number_may_be_lost_in_float64_too():
    draw = np.random.Generator(np.random.Philox(2))
    q, k, v = (draw.standard_normal((5, 4)) * scale for scale in (1.0, 1.0, 2.0**-1024))
    bound = oracle.expected("one", "attention", {"q": q, "k": k, "v": v}, [], "float64").bounds["out"]
    assert (bound > 2.0**-1022).all() and (bound < 2.0**-1018).all()


def test_a_weight_below_the_smallest_normal_number_may_be_lost_from_its_gradients():
    # Two keys, the second with a weight of 1e-39 and a value of 1e4: its gradient of 1e-35 is gone with the weight.
    q, k = np.array([[89.8]]), np.array([[0.0], [-1.0]])
    v = np.array([[0.0, 1.0], [1e4, 1.0]])
    want = oracle.expected("x", "attention", {"q": q, "k": k, "v": v, "scale": 1.0}, ["k"], "float32")
    gradient, bound = want.gradients["k"][1, 0], want.gradient_bounds["k"][1, 0]
    weight = np.exp(-89.8)
    assert weight < 2.0**-126 and abs(gradient) > 100 * weight
    assert abs(gradient) <= bound <= 3 * abs(gradient) + 1e-34


def test_one_wrong_element_in_a_million_is_seen():
    want = np.ones(10**6)
    got = want.copy()
    got[654321] += 1e-3
    tally = Tally()
    check_within(tally, "x", got, want, np.full_like(want, 1e-6))
    assert tally.share == pytest.approx(1000.0)
    assert tally.where == "x[654321]"


def test_a_bound_of_zero_asks_for_equality():
    with pytest.raises(Disagreement, match="exactly"):
        check_within(Tally(), "x", np.array([1e-30]), np.array([0.0]), np.array([0.0]))


def test_nan_and_infinity_must_stand_where_the_oracle_has_them():
    for got, want in ((np.nan, 1.0), (1.0, np.nan), (np.inf, 1.0), (-np.inf, np.inf)):
        with pytest.raises(Disagreement):
            check_within(Tally(), "x", np.array([got]), np.array([want]), np.array([1e9]))
    check_within(Tally(), "x", np.array([-np.inf]), np.array([-np.inf]), np.array([1.0]))


def test_shapes_are_never_broadcast_in_a_comparison():
    with pytest.raises(Disagreement, match="shape"):
        check_exact(Tally(), "x", np.ones((1, 3)), np.ones((2, 3)))


def test_a_misspelt_field_of_a_row_is_an_error():
    table = {"id": "x", "rules": [], "why": "", "function": "softmax", "inputs": {}, "gradient": ["x"]}
    with pytest.raises(ValueError, match="gradient"):
        rows._case("file.toml", table)


@pytest.mark.parametrize("refuses", ["ValueError", {"type": "ValueError"}, {"type": "ValueError", "text": "x"}])
def test_a_refusal_without_its_type_and_phrase_is_told_what_they_look_like(refuses):
    table = {"id": "x", "rules": [], "why": "", "function": "softmax", "inputs": {}, "refuses": refuses}
    with pytest.raises(ValueError, match=r'case \'x\' must have refuses = \{ type = "ValueError", phrase'):
        rows._case("file.toml", table)


def test_the_rounding_of_float32_uses_at_most_a_third_of_the_budget_in_the_reference():
    target = load("core_numpy")
    shares = [
        result.share
        for one in rows.select(rows.load_cases(), "quick")
        if one.verb == "agrees" and not one.tolerance
        for result in run_case(one, target, "quick")
    ]
    assert 0.1 < max(shares) < 0.34


def test_the_same_run_gives_the_same_document():
    target = load("core_numpy")
    chosen = rows.select(rows.load_cases(), "quick", "softmax")
    texts = []
    for _ in range(2):
        results = [r for one in chosen for r in run_case(one, target, "quick")]
        document = summary.document(results, {target.name: target.describe()}, "quick")
        for judged_call in document["targets"]["core_numpy"]["cases"]:
            del judged_call["seconds"]
        texts.append(json.dumps(document, sort_keys=True))
    assert texts[0] == texts[1]


def test_a_literal_answer_must_have_its_dtype_too():
    import core_numpy

    [row] = rows.select(rows.load_cases(), "quick", "mask-to-bias-bfloat16")
    assert judge(row, load("core_numpy"), "float32").status == PASSED
    wide = types.SimpleNamespace(mask_to_bias=lambda mask, dtype: core_numpy.mask_to_bias(mask, "float32"))
    result = judge(row, Target(wide, "wide"), "float32")
    assert result.status == FAILED and "must have dtype bfloat16; got float32" in result.detail
