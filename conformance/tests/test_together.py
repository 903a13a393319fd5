"""Errors of all elements together: a small one in every element shows, and rounding to nearest does not."""

import types

import numpy as np
import pytest

import core_numpy
from conformance import runner
from conformance.budget import OUTPUT, UNIT
from conformance.compare import MANY, Tally, check_together, check_within
from conformance.inputs import DTYPES
from conformance.plainly import check_beside_plain, plain_output
from conformance.runner import ABSENT, FAILED, PASSED, arguments_of, judge
from conformance.space import select
from conformance.targets import load
from conformance.targets.protocol import Target
from conformance.zoo import all_faults, catch
from conformance.zoo.every import group_of
from conformance.zoo.faults import Faulty
from conformance.zoo.naive import Naive, functions
from conformance.zoo.rounding_faults import away, cut, shorter
from core_numpy.contract.checks.kernels import Kernel

ROUNDING = [fault.id for fault in all_faults() if group_of(fault) == "rounding"]
HALF = ("bfloat16", "float16")


def named(name):
    return next(fault for fault in all_faults() if fault.id == name)


def values(number, seed=0):
    return np.random.Generator(np.random.Philox(seed)).standard_normal(number)


def shares(got, want, dtype, bound=None):
    """The largest share of an element and that of all together."""
    bound = OUTPUT * UNIT[dtype] * np.abs(want) if bound is None else bound
    tally = Tally()
    return check_within(tally, "x", got, want, bound), check_together(tally, "x", got, want, bound, dtype)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("wrong", [cut, away, shorter])
def test_another_rounding_is_within_the_bound_of_every_element_and_out_of_that_of_all(dtype, wrong):
    want = values(500)
    each, together = shares(wrong(want, dtype), want, dtype)
    assert each <= 1.0 < together
    assert shares(want.astype(DTYPES[dtype]), want, dtype)[1] < 0.85


@pytest.mark.parametrize("dtype", HALF)
def test_rounding_to_nearest_is_never_blamed(dtype):
    for seed in range(300):
        want = values(MANY + seed, seed) * 10.0 ** (seed % 5 - 2)
        assert shares(want.astype(DTYPES[dtype]), want, dtype)[1] <= 1.0


def test_values_with_one_mantissa_count_once():
    """A thousand times 1/7: one rounding, seen a thousand times."""
    want = np.full(1000, 1 / 7) * 2.0 ** (np.arange(1000) % 3)
    got = want.astype(DTYPES["bfloat16"])
    assert shares(got, want, "bfloat16")[1] == 0.0
    mixed = np.concatenate([want, values(40)])
    assert 0 < shares(mixed.astype(DTYPES["bfloat16"]), mixed, "bfloat16")[1] <= 1.0


@pytest.mark.parametrize("dtype", HALF)
def test_values_that_are_less_than_a_unit_apart_count_once(dtype):
    """Rows of weights whose scores are almost equal: 1/n, n times, each a little different."""
    each = np.repeat(1 / np.arange(1.0, 64.0), 63)
    for seed in range(20):
        want = each * (1 + 1e-5 * values(each.size, seed))
        assert shares(want.astype(DTYPES[dtype]), want, dtype)[1] <= 1.0
        assert shares(cut(values(500, seed), dtype), values(500, seed), dtype)[1] > 1.0


def test_what_was_rounded_before_makes_room():
    """Where most of the bound is for earlier roundings, these may lean to one side."""
    want = values(500)
    got = (want * (1 + 2.0**-9)).astype(DTYPES["bfloat16"])
    own = OUTPUT * UNIT["bfloat16"] * np.abs(want)
    assert shares(got, want, "bfloat16", own)[1] > 0.8
    assert shares(got, want, "bfloat16", 4 * own)[1] < 0.3


def test_one_wrong_element_of_a_million_shows_element_by_element_alone():
    want = values(10**6)
    got = want.astype(DTYPES["bfloat16"])
    got[123456] *= 1.05
    each, together = shares(got, want, "bfloat16")
    assert each > 1.0 > together


@pytest.mark.parametrize("name", ROUNDING)
def test_a_fault_of_the_last_rounding_is_caught_by_all_elements_and_by_no_single_one(name, monkeypatch):
    found = catch(named(name))
    assert found.cases and found.share < 1.0
    monkeypatch.setattr(runner, "check_together", lambda *arguments: 0.0)
    assert catch(named(name)).cases == ()


def test_the_failure_says_what_it_is():
    [case] = select("quick", "gelu-many")
    result = judge(case, Target(Faulty(named("gelu-cut")), "cut"), "bfloat16")
    assert result.status == FAILED and result.share < 1.0
    assert "out in the mean over all elements is off by" in result.detail and "cut where it should be" in result.detail
    assert judge(case, load("core_numpy"), "bfloat16").status != FAILED


def beside(case, half, got):
    given = arguments_of(case, half)
    want = core_numpy.attention(**{n: x.astype(np.float64) for n, x in given.items()})
    return check_beside_plain(Tally(), got(given), want, plain_output(given, half), half)


@pytest.mark.parametrize("half", HALF)
def test_who_computes_in_float32_is_far_from_twice_the_plain_way_and_who_sums_in_half_is_over_it(half):
    [case] = select("quick", "attention-half-sum")
    assert beside(case, half, lambda given: core_numpy.attention(**given)) < 1.0 / 3.0
    assert 0.1 < beside(case, half, lambda given: plain_output(given, half)) <= 0.5
    broken = Faulty(named("sum-half"))
    assert beside(case, half, lambda given: broken.attention(**given)) > 2.0


def test_a_plain_way_that_is_exact_leaves_a_right_result_its_rounding():
    want = np.array([1.0, 1.0 + 2.0**-12])
    assert check_beside_plain(Tally(), want.astype(np.float16), want, want, "float16") <= 1.0 / 3.0
    assert check_beside_plain(Tally(), np.zeros(2), np.zeros(2), np.zeros(2), "float16") == 0.0


class ExponentialsStored(Naive):
    """As torch's and cuDNN's fused kernels: rounded before they are divided by their sum, which is float32."""

    def softmax(self, s, seen):
        p, lse = super().softmax(s, seen)
        largest = p.max(axis=-1, keepdims=True)
        return (p / largest).astype(self.dtype).astype(np.float64) * largest, lse


def test_quotients_stored_in_bfloat16_take_ten_times_the_budget_and_exponentials_hardly_any_of_it():
    [case] = select("quick", "attention-half-weights")
    stored = judge(case, Target(Faulty(named("weights-stored")), "stored"), "bfloat16")
    assert stored.status == FAILED and stored.share >= 10.0
    assert judge(case, Target(types.SimpleNamespace(**functions(ExponentialsStored)), "e"), "bfloat16").share < 0.1


def test_a_kernel_that_says_that_it_stores_quotients_is_not_asked():
    [case] = select("quick", "attention-half-weights")
    module = types.SimpleNamespace(**functions(Naive))
    module.available_kernels = lambda: {"wide": Kernel("wide"), "library": Kernel("library", weights="stored")}
    module.attention = lambda q, k, v, *, kernel="auto", **rest: functions(Naive)["attention"](q, k, v, **rest)
    found = {kernel: judge(case, Target(module, "m"), "bfloat16", kernel) for kernel in ("auto", "wide", "library")}
    assert {name: result.status for name, result in found.items()} == {
        "auto": ABSENT, "wide": PASSED, "library": ABSENT
    }  # fmt: skip
    assert "kernel library stores the weights" in found["library"].detail
