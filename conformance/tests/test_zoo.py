"""The zoo: every planted fault is caught, no honest variant is blamed."""

import numpy as np
import pytest

from conformance.memory import remembering
from conformance.runner import run_case
from conformance.targets.protocol import Target
from conformance.zoo import all_faults, catch, touched, variants
from conformance.zoo.catching import cases_for
from conformance.zoo.command import catches, main, score
from conformance.zoo.faults import STRENGTHS, Fault, Faulty
from conformance.zoo.naive import Naive, functions

# Every 24th fault, so that all groups are met.
SPREAD = [fault.id for fault in all_faults()[5::24]]
HONEST = {fault.id: fault for fault in variants()}
OF_ATTENTION = ("honest-narrow", "honest-permuted", "honest-online", "honest-split-keys")


def named(name: str) -> Fault:
    return next(fault for fault in all_faults() if fault.id == name)


def test_the_zoo_has_faults_of_every_kind_and_strength_with_ids_of_their_own():
    ids = [fault.id for fault in all_faults()]
    assert len(ids) == len(set(ids)) >= 150
    for strength in STRENGTHS:
        assert sum(fault.strength == strength for fault in all_faults()) > 20
    assert all(fault.stands_for and fault.diagnosis for fault in all_faults())
    assert len({fault.diagnosis for fault in all_faults()}) > 0.97 * len(ids)


@pytest.mark.parametrize("name", SPREAD)
def test_a_planted_fault_is_caught(name):
    with remembering():
        assert catch(named(name), first=True).cases


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_planted_fault_is_caught_at_quick():
    with remembering():
        missed = [fault.id for fault in all_faults() if not catch(fault, first=True).cases]
    assert missed == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_weakest_fault_takes_ten_times_its_budget():
    """Where a case fails by its budget; faults that break what must be exact, or give NaN, have no share."""
    with remembering():
        shares = {fault.id: catch(fault).share for fault in all_faults()}
    by_budget = {name: share for name, share in shares.items() if share > 1.0}
    weakest = min(by_budget, key=by_budget.__getitem__)
    assert by_budget[weakest] >= 10.0, f"{weakest} takes {by_budget[weakest]:.3g} times its budget"


def test_a_fault_changes_nothing_outside_its_own_module():
    import core_numpy

    before = {name: getattr(core_numpy, name) for name in core_numpy.__all__}
    faults = [named("model-scale"), named("gelu-quick"), named("clip-eps")]
    for fault in faults:
        catch(fault, first=True)
        assert {name: getattr(core_numpy, name) for name in core_numpy.__all__} == before
        assert Faulty(fault).causal_mask is core_numpy.causal_mask


def test_a_fault_that_raises_is_not_caught():
    def broken(x):
        raise NameError("undefined")

    assert catch(Fault("broken", "-", "blatant", "-", {"silu": broken}.copy)).cases == ()


def test_a_fault_of_a_gradient_is_seen_by_the_rows_of_its_function():
    assert touched(named("gradient-silu")) == {"silu"}
    assert touched(named("model-loss-z")) == {"Transformer"}
    assert all(case.verb != "refuses" for case in cases_for(named("gelu-quick"), "quick"))
    assert any(case.verb == "refuses" for case in cases_for(named("embed-clamps"), "quick"))


@pytest.mark.parametrize("name", ["honest-online", "honest-split-keys"])
def test_an_honest_variant_of_attention_is_not_blamed(name):
    assert catch(HONEST[name]).cases == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", list(HONEST))
def test_no_honest_variant_is_blamed_at_full(name):
    assert catch(HONEST[name], "full").cases == ()


@pytest.mark.slow
def test_honest_attention_takes_a_third_of_the_budget_at_most():
    """A result rounded correctly to a half type takes the third that its own rounding is allowed."""
    with remembering():
        for name in OF_ATTENTION:
            target = Target(Faulty(HONEST[name]), name)
            results = [result for case in cases_for(HONEST[name], "quick") for result in run_case(case, target)]
            worst = max((result for result in results if result.share is not None), key=lambda result: result.share)
            assert worst.share <= 1.0 / 3.0 + 1e-9, (name, worst.case, worst.dtype, worst.share)


def test_a_planted_flip_of_the_honest_variant_is_blamed():
    class Flipped(Naive):
        def scale(self) -> float:
            return -super().scale()

    assert catch(Fault("flipped", "-", "blatant", "-", functions(Flipped).copy), first=True).cases


def test_the_score_lists_what_each_case_catches():
    with remembering():
        found = [catch(named("gelu-quick")), catch(named("silu-hard"))]
    by_case = catches(found, "quick")
    assert by_case["gelu"] == ["gelu-quick"] and by_case["silu"] == ["silu-hard"] and by_case["relu"] == []
    table = score(found, "quick")
    assert (table["caught"], table["planted"]) == (2, 2)
    assert table["faults"][0]["group"] == "layers" and table["faults"][0]["share"] > 10


def test_the_command_prints_the_score_and_ends_with_0(capsys):
    assert main(["--fault", "silu", "--cases"]) == 0
    printed = capsys.readouterr().out
    assert "planted faults caught" in printed and "catch nothing" in printed
    assert main(["--fault", "silu-hard", "--all"]) == 0
    with pytest.raises(ValueError, match="no fault has"):
        main(["--fault", "no such fault"])


def test_what_is_remembered_is_computed_once_and_forgotten():
    from conformance.memory import remembered

    made = []
    with remembering():
        for _ in range(2):
            remembered("key", lambda: made.append(1) or np.ones(2))
    remembered("key", lambda: made.append(1))
    assert len(made) == 2
