"""The gap between right implementations and planted faults: measured, and a failure where it closes."""

import json

import numpy as np
import pytest

from conformance import budget, calibrate, plainly
from conformance.calibrate import GAP, LIMIT, WEAKEST, main, measure, planted, random_cases, random_layers, summarise
from conformance.memory import remembering
from conformance.runner import PASSED, judge
from conformance.targets import load
from conformance.zoo import all_faults

RIGHT = ["core_numpy", "honest-narrow"]


def test_right_implementations_use_a_third_and_the_weakest_faults_take_ten_times():
    """The short form of `conformance calibrate`, which CI runs with torch as well."""
    with remembering():
        table = summarise(measure(RIGHT, 3, 1))
        assert {row["dtype"] for row in table} == {"float64", "float32", "bfloat16", "float16"}
        assert max(row["worst"] for row in table) <= LIMIT
        shares = planted(WEAKEST[:2])
    assert set(shares) == set(WEAKEST[:2]) and min(shares.values()) >= GAP


def test_the_weakest_faults_are_faults():
    assert set(WEAKEST) <= {fault.id for fault in all_faults()}


def test_a_budget_too_tight_closes_the_gap_from_below(monkeypatch):
    monkeypatch.setattr(budget, "OUTPUT", 1.5)
    with remembering():
        table = summarise(measure(["core_numpy"], 2, 1))
    assert max(row["worst"] for row in table) > LIMIT


def test_a_budget_too_wide_closes_it_from_above(monkeypatch):
    for name in ("INNER", "STEP", "OUTPUT", "STORED"):
        monkeypatch.setattr(budget, name, 12.0 * getattr(budget, name))
    monkeypatch.setattr(plainly, "TWICE", 12.0 * plainly.TWICE)
    with remembering():
        assert min(planted(WEAKEST[:1]).values(), default=0.0) < GAP


def test_random_cases_are_the_same_for_a_seed_and_of_every_kind():
    first = list(random_cases(8, 3))
    assert first == list(random_cases(8, 3)) and first != list(random_cases(8, 4))
    assert {case.function for case in first} == {"attention", "attention_with_lse"}
    assert len({case.function for case in random_layers(8, 3)}) == 7
    assert all(np.isfinite(case.inputs["q"]["scale"]) for case in first)


def test_the_command_writes_its_figures_and_fails_where_the_gap_is_closed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(calibrate, "WEAKEST", WEAKEST[:1])
    arguments = ["core_numpy", "--short", "--cases", "1", "--json", str(tmp_path / "c.json"), "--png"]
    assert main([*arguments, str(tmp_path / "c.png")]) == 0
    document = json.loads((tmp_path / "c.json").read_text(encoding="utf-8"))
    assert document["faults"].keys() == set(WEAKEST[:1]) and document["shares"][0]["target"] == "core_numpy"
    assert (tmp_path / "c.png").stat().st_size > 10_000
    assert "right implementations use" in capsys.readouterr().out
    monkeypatch.setattr(calibrate, "GAP", 1e9)
    assert main([*arguments, str(tmp_path / "d.png")]) == 1


def test_unknown_names_and_no_cases_are_refused():
    with pytest.raises(ValueError, match="no right variant is called 'honest-x'"):
        main(["honest-x", "--cases", "1"])
    with pytest.raises(ValueError, match="--cases must be at least 1; got 0"):
        main(["--cases", "0"])


def test_a_gradient_too_small_for_its_type_may_be_0_and_what_is_exactly_0_must_stay_so():
    """gelu's slope far below 0 underflows: 1e-321 in float64, 0 in everything narrower."""
    [case] = [one for one in random_layers(36, 1) if one.id == "random-1-layer-35"]
    assert case.function == "gelu"
    for dtype in ("float32", "bfloat16", "float16"):
        assert judge(case, load("core_numpy"), dtype).status == PASSED
    bounds = budget.rounded_output(np.zeros(2), np.array([0.0, 1e-321]), "float32")
    assert bounds[0] == 0.0 < bounds[1] < 1e-37
