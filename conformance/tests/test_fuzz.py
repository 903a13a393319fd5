"""Fuzzing: random cases, always the same ones; what fails is made small and is a row."""

import itertools
import json
import tomllib

import pytest

from conformance.__main__ import main
from conformance.fuzz import _RAISED, as_found, drawn, fuzz, shrink, to_toml
from conformance.fuzz_run import Fuzzed, _print
from conformance.rows import _case
from conformance.runner import FAILED, judge_call, run_case
from conformance.space import attention_space, case_of, select
from conformance.targets import load
from conformance.targets.protocol import Target
from conformance.zoo import all_faults
from conformance.zoo.faults import Faulty

FACTORS = attention_space().factors
REFERENCE = load("core_numpy")
# A fault, and the argument or input that must be left of the case that finds it.
FOUND = {
    "heads-tiled": "q",
    "cap-clips": "softcap",
    "scale-absolute": "scale",
    "window-one-more": "window",
    "gradient-sink-missing": "sinks",
    "segments-ordered": "q_segments",
}


def planted(name):
    fault = next(fault for fault in all_faults() if fault.id == name)
    return Target(Faulty(fault), name)


def after(number):
    """A clock that says no so many times."""
    counted = itertools.count()
    return lambda: next(counted) >= number


def first_failure(target, seed=0, most=400):
    return next((failure for _, _, failure in fuzz(target, seed, until=after(most)) if failure), None)


@pytest.mark.parametrize("name", FOUND)
def test_a_planted_fault_is_found_and_made_small(name):
    target = planted(name)
    failure = first_failure(target)
    assert failure is not None and failure.whole
    left = {**failure.case.inputs, **failure.case.arguments}
    assert FOUND[name] in left
    # Every other argument has gone that the fault does not need (a window needs the offset where lengths differ).
    assert len(left) <= 5, sorted(left)
    assert max(failure.case.inputs["k"]["shape"]) <= 7
    assert failure.case.dtypes == ("float64",)


def test_what_is_printed_is_a_row_that_fails_on_the_fault_and_passes_on_the_reference():
    target = planted("cap-clips")
    failure = first_failure(target)
    [table] = tomllib.loads(to_toml(failure.case))["case"]
    row = _case("pasted.toml", table)
    assert row == failure.case
    assert {result.status for result in run_case(row, target)} == {FAILED}
    assert FAILED not in {result.status for result in run_case(row, REFERENCE)}


def test_every_row_of_the_space_can_be_written_and_read():
    for case in select("full")[::7]:
        if case.id.startswith(("attention-pairs", "attention-two-arguments")):
            [table] = tomllib.loads(to_toml(case))["case"]
            assert _case("x.toml", table) == case


def test_draws_depend_on_the_seed_and_the_number_alone():
    first = [drawn(REFERENCE, 3, number) for number in range(20)]
    assert [drawn(REFERENCE, 3, number) for number in reversed(range(20))] == first[::-1]
    assert [drawn(REFERENCE, 4, number) for number in range(20)] != first
    assert len({str(choice) for choice, _ in first}) == 20
    chosen = [choice for choice, _ in (drawn(REFERENCE, 0, number) for number in range(300))]
    for name, values in FACTORS.items():
        assert {choice[name] for choice in chosen} >= set(values), name


def test_a_target_with_few_arguments_is_asked_for_these_alone_and_heads_of_models_are_drawn():
    class Few:
        @staticmethod
        def attention(q, k, v, *, mask=None, causal=False):
            raise AssertionError("only its signature is read")

    target = Target(Few, "few")
    chosen = [choice for choice, _ in (drawn(target, 0, number) for number in range(100))]
    for name in ("bias", "window", "q_offset", "kv_lengths", "segments", "sinks", "scale", "softcap", "dropout"):
        assert {choice[name] for choice in chosen} == {FACTORS[name][0]}, name
    for name in ("mask", "causal"):
        assert {choice[name] for choice in chosen} == set(FACTORS[name]), name
    assert max(choice["sizes"][0] for choice in chosen) > 200


def test_the_reference_passes_random_cases():
    results = [result for _, result, _ in fuzz(REFERENCE, 7, until=after(25))]
    assert len(results) == 25 and not [(r.case, r.detail) for r in results if r.status == FAILED]


def test_shrinking_keeps_the_kind_of_failure_and_stops_with_the_clock():
    class Breaks:
        @staticmethod
        def attention(q, k, v, *, softcap=None, **rest):
            if q.shape[-2] < 4:
                raise ZeroDivisionError("too short")
            return 2.0 * v.sum() + REFERENCE.module.attention(q, k, v, softcap=softcap, **rest)

    target = Target(Breaks, "breaks")
    choice = {name: values[0] for name, values in FACTORS.items()} | {"softcap": 2.0, "keys": 65}
    case = case_of("x", choice)
    result = judge_call(case, target, "float64", "auto")
    failure = shrink(target, choice, case, result, until=lambda: False)
    assert failure.whole and not _RAISED.match(failure.result.detail)
    assert failure.case.inputs["q"]["shape"][-2] == 4 and not failure.case.arguments
    cut = shrink(target, choice, case, result, until=lambda: True)
    assert not cut.whole and cut.case == as_found(case)


BROKEN = """
import time
from core_numpy import attention as right, key
from core_numpy.contract.config import RotaryScaling
def attention(q, k, v, *, softcap=None, sinks=None, window=None, **rest):
    if window is not None:
        time.sleep(600)
    out = right(q, k, v, softcap=softcap, sinks=sinks, **rest)
    return out if sinks is None else 2 * out
"""


def test_the_command_prints_rows_and_goes_on_behind_a_case_that_hangs(tmp_path, monkeypatch, capfd):
    (tmp_path / "hangs_here.py").write_text(BROKEN, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    # Three seconds: on a busy machine an honest call took more than one.
    assert main(["run", "hangs_here", "--fuzz", "12", "--timeout", "3", "--json", "found.json"]) == 1
    printed = capfd.readouterr().out
    document = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    own = document["targets"]["hangs_here"]
    assert any("gave no answer within 3 seconds" in failure["detail"] for failure in own["failures"])
    for failure in own["failures"]:
        [table] = tomllib.loads(failure["row"])["case"]
        assert _case("x.toml", table).id == failure["id"] and failure["row"] in printed
    assert own["draws"] > own["failed"] > 0
    assert f"{own['draws']} random cases, {own['failed']} failed" in printed


@pytest.mark.parametrize(
    ("kinds", "said"), [(0, "0 failed, "), (1, "4 failed in 1 different way, "), (2, "in 2 different ways, ")]
)
def test_the_last_line_counts_the_ways_where_there_are_any(kinds, said, capsys):
    failures = [{"dtype": "float64", "kernel": "auto", "detail": "off", "shrunk": True, "row": "a row"}] * kinds
    _print([Fuzzed("mine", "mine", 9, 4 * bool(kinds), 2, failures)])
    assert f"mine: 9 random cases, {4 * bool(kinds)} failed" in (out := capsys.readouterr().out)
    assert said in out and out.endswith("2 not offered\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--fuzz", "0"], "--fuzz must be a positive number of seconds; got 0"),
        (["--fuzz", "1", "--seed", "-1"], "--seed must be 0 or more; got -1"),
        (["--fuzz", "1", "--case", "x"], "--fuzz draws its own cases: it does not go with --case"),
        (["--fuzz", "1", "--html", "x"], "it does not go with --html; give that to a run without --fuzz"),
        (["conformance.inputs", "--fuzz", "1"], "target 'conformance.inputs' has none of the public names"),
    ],
)
def test_a_wrong_command_is_one_sentence(arguments, said, capfd):
    assert main(["run", *arguments]) in (2, 3)
    assert said in capfd.readouterr().err
