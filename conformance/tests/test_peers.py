"""Peers: whoever is right is not blamed, and what differs is listed, strictly both ways."""

import dataclasses

import pytest

from conformance import deviations, peers
from conformance.__main__ import main
from conformance.rows import load_cases
from conformance.runner import ABSENT, FAILED, KNOWN, PASSED, Result, run_case
from conformance.targets import load
from conformance.targets.peers import PEERS, roundings
from conformance.workers import judge_targets

CASE = Result(
    case="attention-bias", rules=("attention-5",), function="attention", target="torch-sdpa", dtype="float16",
    kernel="math", status=FAILED, share=2.0, where="out", comparisons=1, detail="out is off by 2 times", seconds=0.0,
)  # fmt: skip
ROW = deviations.Deviation(
    cases=("attention-b*",), rule="attention-5", reason="it rounds", link="https://example.org", says="off by"
)


def applied(monkeypatch, results, row=ROW, whole=True):
    monkeypatch.setattr(deviations, "load_deviations", lambda target: (row,))
    return deviations.apply("torch-sdpa", results, whole=whole)


def test_a_failure_that_a_row_explains_is_known_and_says_why(monkeypatch):
    (result,) = applied(monkeypatch, [CASE])
    assert result.status == KNOWN and result.detail == "it rounds (out is off by 2 times)"


@pytest.mark.parametrize(
    "change",
    [{"case": "attention-causal"}, {"detail": "shape"}],
)
def test_a_failure_that_no_row_explains_stays_one(monkeypatch, change):
    results = applied(monkeypatch, [CASE, dataclasses.replace(CASE, **change)])
    assert [r.status for r in results] == [KNOWN, FAILED]
    for field in ({"dtypes": ("float32",)}, {"kernels": ("flash",)}):
        results = applied(monkeypatch, [CASE], dataclasses.replace(ROW, **field), whole=False)
        assert [r.status for r in results] == [FAILED]


def test_a_listed_difference_that_does_not_occur_fails_a_whole_run(monkeypatch):
    passed = dataclasses.replace(CASE, status=PASSED, share=0.1)
    results = applied(monkeypatch, [passed])
    assert [r.status for r in results] == [PASSED, FAILED] and "did not occur" in results[1].detail
    assert [r.status for r in applied(monkeypatch, [passed], whole=False)] == [PASSED]
    absent = dataclasses.replace(CASE, status=ABSENT)
    assert "no such call was judged" in applied(monkeypatch, [absent])[1].detail


def test_every_file_of_differences_is_of_a_peer_and_names_known_cases_and_rules():
    cases = {case.id: case for case in load_cases()}
    rules = {rule for case in cases.values() for rule in case.rules}
    folder = deviations.resources.files("conformance") / "differences"
    assert {file.name.removesuffix(".toml") for file in folder.iterdir()} <= set(PEERS)
    for name in PEERS:
        for row in deviations.load_deviations(name):
            assert row.rule in rules and row.link.startswith("https://") and row.reason, (name, row)
            assert all(pattern in cases or "*" in pattern for pattern in row.cases), (name, row.cases)
            # A row for whole families of cases must say how far each of them may be off.
            assert row.rounding in roundings.KINDS if row.rounding else all("*" not in p for p in row.cases), row.cases
    assert set(peers.PACKAGES) == set(PEERS)


def test_a_difference_of_rounding_explains_the_error_of_that_arithmetic_and_no_more(monkeypatch):
    row = dataclasses.replace(ROW, cases=("attention-half-*",), rounding="query")
    plain = roundings.share("query", "attention-half-query", "bfloat16")
    assert plain > 5  # that is, the plain way does exceed the budget
    measured = dataclasses.replace(
        CASE, case="attention-half-query", dtype="bfloat16", share=plain, where="out[1, 0, 4, 2]"
    )
    for change, status in (
        ({}, KNOWN),
        ({"share": 1.2 * plain}, KNOWN),
        ({"share": 1.3 * plain}, FAILED),
        ({"where": "gradient of q[0, 0]"}, FAILED),
        ({"dtype": "float32", "share": 1.01}, FAILED),
    ):
        results = applied(monkeypatch, [dataclasses.replace(measured, **change)], row, whole=False)
        assert [r.status for r in results] == [status], change
    with pytest.raises(ValueError, match="rounding must be one of query, all; got 'half'"):
        roundings.Plain("half")


def test_the_plain_ways_agree_with_the_contract_in_float32():
    from conformance.targets.protocol import Target

    for kind in roundings.KINDS:
        results = [
            result
            for case in load_cases()
            if case.id in ("attention-causal", "attention-bias", "attention-lengths", "attention-softcap")
            for result in run_case(case, Target(roundings.Plain(kind), kind))
        ]
        assert {r.status for r in results if r.dtype == "float32"} == {PASSED}


def test_the_table_shows_shares_known_differences_and_dashes():
    passed = dataclasses.replace(CASE, status=PASSED, share=0.123)
    assert peers.cell([passed, dataclasses.replace(CASE, status=KNOWN)]) == "12 %, 1 known"
    assert peers.cell([CASE]) == "**1 failed**" and peers.cell([dataclasses.replace(CASE, status=ABSENT)]) == "–"
    by_id = {case.id: case for case in load_cases()}
    assert peers.features_of(by_id["attention-plain"]) == ["plain"]
    assert peers.features_of(by_id["attention-grouped"]) == ["grouped", "causal"]
    assert peers.features_of(by_id["attention-scale-zero"]) == ["scale"]


def test_a_grouped_query_tiled_by_a_peer_is_found():
    pytest.importorskip("x_transformers")
    (case,) = [case for case in load_cases() if case.id == "attention-grouped-order"]
    four = dataclasses.replace(case, inputs={n: {**x, "reshape": [1, *x["reshape"]]} for n, x in case.inputs.items()},
                               equals={"out": {**case.equals["out"], "reshape": [1, 4, 1, 2]}})  # fmt: skip
    results = [r for r in run_case(four, load("x-transformers")) if r.dtype == "float32"]
    assert {r.status for r in results} == {FAILED}
    results = [r for r in run_case(four, load("torch-sdpa")) if r.dtype == "float32"]
    assert PASSED in {r.status for r in results} and FAILED not in {r.status for r in results}


def test_unknown_peers_are_refused(capsys):
    assert main(["peers", "pytorch"]) == 2
    assert "unknown peers pytorch; known are torch-sdpa" in capsys.readouterr().err
    assert main(["peers", "--list"]) == 0
    assert "keras-jax" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", list(PEERS))
def test_no_peer_is_blamed_for_what_is_not_listed(name):
    if name not in peers.installed():
        pytest.skip(f"{peers.PACKAGES[name]} is not installed")
    judged, _ = judge_targets([name], "quick", "attention", lambda text: None, 1)[name]
    results = deviations.apply(name, judged, whole=True)
    assert [(r.case, r.dtype, r.kernel, r.detail) for r in results if r.status == FAILED] == []
    assert sum(r.status == PASSED for r in results) >= 10
