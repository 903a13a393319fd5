"""The argument space: any two values meet, and each choice is the case that it says."""

from itertools import combinations

import numpy as np
import pytest

from conformance import rows, space
from conformance.inputs import build
from conformance.pairwise import all_pairs, covering
from conformance.runner import FAILED, arguments_of, run_case
from conformance.targets import load

SPACE = space.attention_space()
PLAIN = {name: values[0] for name, values in SPACE.factors.items()}
# The distributions and lengths that the rows of `full` must meet in every pair.
DISTRIBUTIONS = {"ordinary", "hot", "negative", "dominating", "ties", "denormal", "wide", "zero rows", "dead rows"}
LENGTHS = {63, 64, 65, 127, 128, 129, 1000, 1024, 1025}


def met(choices, factors=SPACE.factors):
    """Counted anew, from the rows alone."""
    return {((a, row[a]), (b, row[b])) for row in choices for a, b in combinations(factors, 2)}


def forbidden(pair):
    """Whether one exclusion alone forbids the two values to meet."""
    given = dict(pair)
    return any(set(rule) <= set(given) and all(given[n] in rule[n] for n in rule) for rule in SPACE.excluded)


def test_any_two_values_of_any_two_factors_meet_in_the_rows_of_full_unless_an_exclusion_says_why():
    wanted = {
        ((a, x), (b, y)) for a, b in combinations(SPACE.factors, 2) for x in SPACE.factors[a] for y in SPACE.factors[b]
    }
    missing = wanted - met(space.pairwise_choices())
    assert len(wanted) > 3000
    assert {pair for pair in missing if not forbidden(pair)} == set()
    assert len(space.pairwise_choices()) < 200


def test_the_lean_rows_cover_what_fast_kernels_serve():
    lean = [row for row in space.pairwise_choices() if all(row[n] in v for n, v in SPACE.lean.items())]
    wanted = {((a, x), (b, y)) for a, b in combinations(SPACE.lean, 2) for x in SPACE.lean[a] for y in SPACE.lean[b]}
    assert {pair for pair in wanted - met(lean, SPACE.lean) if not forbidden(pair)} == set()


def test_every_distribution_meets_every_length_around_an_edge():
    found = {(row["distribution"], row["keys"]) for row in space.pairwise_choices()}
    assert {(d, n) for d in DISTRIBUTIONS for n in LENGTHS} <= found


def test_a_row_that_is_taken_away_is_missed():
    choices = space.pairwise_choices()[:100]
    pairs = met(choices)
    assert any(met([row for row in choices if row is not left]) < pairs for left in choices[:20])


def test_a_small_space_is_covered_by_as_few_rows_as_there_are_pairs_of_the_two_largest():
    factors = {"a": (1, 2, 3), "b": ("x", "y"), "c": (True, False)}
    found = covering(factors)
    assert len(found) == 6 and met(found, factors) == set(all_pairs(factors, ()))
    excluded = ({"a": (1,), "b": ("x",)}, {"b": ("y",), "c": (True,)})
    found = covering(factors, excluded)
    # a = 1 asks for b = y, and that for c = False: 1 and True never meet, though no exclusion names the two.
    assert (("a", 1), ("c", True)) not in met(found, factors)
    assert met(found, factors) == set(all_pairs(factors, excluded))
    assert covering(factors, excluded) == found


def test_exhaustive_has_every_combination_of_restrictions():
    choices = space.restriction_choices()
    present = {tuple(row[name] != PLAIN[name] for name in space.RESTRICTIONS) for row in choices}
    assert len(present) == len(choices) == 2 ** len(space.RESTRICTIONS)
    assert len(space.select("exhaustive")) == len(space.select("full")) + len(choices)


def test_any_two_arguments_stand_alone_together_so_that_a_kernel_with_these_two_is_asked():
    names = SPACE.two["arguments"]
    given = [frozenset(name for name in names if row[name] != PLAIN[name]) for row in space.two_choices()]
    assert set(given) == {frozenset(some) for some in (*((n,) for n in names), *combinations(names, 2))}
    cases = space.select("full", "attention-two-arguments-")
    assert len(cases) == len(given) == 66 and all("float32" in case.dtypes for case in cases)
    sizes = {case.inputs["q"]["shape"][-1] for case in cases}
    assert {64, 72, 80, 96, 128, 192, 256} == sizes


def test_the_rows_of_a_level_are_the_lower_ones_and_more_with_ids_of_their_own():
    quick, full = space.select("quick"), space.select("full")
    assert [case for case in full if case.level == "quick"] == quick == rows.select(rows.load_cases(), "quick")
    ids = [case.id for case in space.select("exhaustive")]
    assert len(ids) == len(set(ids))
    assert space.select("full", "attention-pairs-007")[0].id == "attention-pairs-007"


def test_a_choice_is_the_case_that_it_says():
    choice = PLAIN | {
        "keys": 65, "queries": 5, "heads": (6, 2), "mask": "per batch", "bias": "with holes", "causal": True,
        "window": (3, "none"), "q_offset": "end", "kv_lengths": "ragged", "segments": "padded", "sinks": "given",
        "distribution": "dead rows", "dropout": 0.3,
    }  # fmt: skip
    given = arguments_of(space.case_of("x", choice), "float32")
    assert given["q"].shape == (2, 6, 5, 8) and given["k"].shape == (2, 2, 65, 8) and given["v"].shape == (2, 2, 65, 6)
    assert given["mask"].shape == (2, 1, 5, 65)
    assert not given["mask"][..., 0, :].any() and given["mask"][..., 1, :].any() and not given["mask"][..., 3, :].any()
    assert np.isneginf(given["bias"]).mean() == pytest.approx(0.3, abs=0.1)
    assert (given["causal"], given["window"], given["q_offset"]) == (True, (3, None), 60)
    assert given["kv_lengths"].tolist() == [32, 0] and given["sinks"].shape == (6,)
    assert given["q_segments"][0].tolist() == [0, 0, 1, 1, -1]
    assert given["kv_segments"][0].tolist().count(-1) == 13 and given["dropout_rate"] == 0.3


def test_the_distributions_are_what_they_are_called():
    def of(name, dtype="float32"):
        return arguments_of(space.case_of(name, PLAIN | {"distribution": name, "dtype": dtype, "keys": 64}), dtype)

    hot = of("hot")
    assert np.abs(hot["q"][0, 0] @ hot["k"][0, 0].T).max() > 1e4
    negative = of("negative")
    assert (negative["q"][0, 0] @ negative["k"][0, 0].T).max() < -1e4
    for dtype in ("float64", "float32", "bfloat16", "float16"):
        small = of("denormal", dtype)["v"].astype(np.float64)
        assert 0 < np.abs(small).max() < 2 * float(np.float64(space.TINY[dtype]))
        assert np.mean(small != 0) > 0.9
    zero = of("zero rows")["k"]
    assert not zero[..., ::2, :].any() and zero[..., 1::2, :].all()


def test_values_that_cannot_stand_together_are_refused():
    for wrong in ({"batch": "no heads"}, {"keys": 1000}, {"queries": 5, "causal": True}):
        with pytest.raises(ValueError, match="cannot stand together"):
            space.case_of("x", PLAIN | wrong)


def test_inputs_of_a_space_are_built_from_their_description():
    assert build("c", "s", {"shape": [2, 7], "segments": 3, "padding": 2}).tolist() == [[0, 0, 0, 1, 1, -1, -1]] * 2
    assert build("c", "m", {"shape": [4, 2], "density": 1.0, "dead": 2}).tolist() == [[False] * 2, [True] * 2] * 2
    assert isinstance(build("c", "sinks", {"shape": []}), np.ndarray)


def test_the_reference_passes_a_spread_of_the_rows():
    target = load("core_numpy")
    chosen = [case for case in space.select("full") if case.id.startswith("attention-pairs-")][::12]
    results = [result for case in chosen for result in run_case(case, target)]
    assert not [(r.case, r.detail) for r in results if r.status == FAILED]
    assert len(results) >= 20 and all(r.comparisons for r in results)


def test_the_reference_passes_a_spread_of_the_rows_of_two_arguments():
    target = load("core_numpy")
    results = [
        result for case in space.select("full", "attention-two-arguments-")[::8] for result in run_case(case, target)
    ]
    assert {r.status for r in results} == {"passed"} and len(results) >= 18
