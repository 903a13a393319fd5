"""The error map: one character per element, in its documented levels, wherever a comparison is off."""

import numpy as np
import pytest

from conformance.compare import Disagreement, Tally, check_exact, check_within
from conformance.errormap import PANELS, SIDE, error_map
from conformance.rows import load_cases
from conformance.runner import FAILED, run_case
from conformance.summary import document
from conformance.targets.protocol import Target


def rows(shares):
    return [panel["rows"] for panel in error_map("out", np.asarray(shares))["panels"]]


def test_each_level_has_its_character():
    shares = [0.0, 0.01, 0.1, 0.95, 1.0, 1.01, 10.0, 11.0, 1e3, 1e4, 1e5, 1e6, 1e99, np.inf, np.nan]
    assert rows(shares) == [[".0199aabcdeffxx"]]


def test_many_matrices_keep_the_worst_in_their_order():
    shares = np.zeros((2, 3, 2, 2))
    shares[0, 2, 1, 0], shares[1, 1, 0, 1] = 0.55, 7.0
    found = error_map("out", shares)
    assert found["shape"] == [2, 3, 2, 2] and found["pool"] == [1, 1] and len(found["panels"]) == PANELS
    by_place = {tuple(panel["at"]): panel["rows"] for panel in found["panels"]}
    assert by_place[0, 2] == ["..", "5."] and by_place[1, 1] == [".a", ".."]
    assert list(by_place) == sorted(by_place)


def test_long_axes_are_pooled_and_the_worst_stays():
    shares = np.zeros((2 * SIDE + 5, 3))
    shares[2 * SIDE + 4, 1] = 100.0
    found = error_map("out", shares)
    (panel,) = found["panels"]
    assert found["pool"] == [3, 1] and len(panel["rows"]) == 18
    assert panel["rows"][-1] == ".b." and set("".join(panel["rows"][:-1])) == {"."}
    (turned,) = error_map("out", shares.T)["panels"]
    assert turned["rows"] == ["." * 18, "." * 17 + "b", "." * 18]


def test_numbers_vectors_and_nothing_have_a_map_too():
    assert rows(2.0) == [["a"]] and rows([0.0, 0.3]) == [[".3"]]
    assert error_map("out", np.zeros((0, 3)))["panels"] == [] and error_map("out", np.zeros((2, 0, 3)))["panels"] == []


def test_a_tally_keeps_the_array_that_is_off_by_most():
    tally = Tally()
    check_within(tally, "first", np.array([1.0, 2.0]), np.array([1.0, 2.5]), np.array([1.0, 1.0]))
    check_within(tally, "second", np.array([1.0]), np.array([1.1]), np.array([1.0]))
    assert tally.worst[0] == "first" and tally.worst[1].tolist() == [0.0, 0.5]
    for got, want in (([1.0, np.nan], [1.0, 2.0]), ([1.0, 2.0], [1.0, np.inf]), ([1.0, 0.5], [1.0, 0.0])):
        with pytest.raises(Disagreement):
            check_within(tally, "third", np.array(got), np.array(want), np.array([1.0, 0.0]))
        assert tally.worst[0] == "third" and tally.worst[1].tolist() == [0.0, np.inf]
    with pytest.raises(Disagreement):
        check_exact(tally, "fourth", np.array([3, 4]), np.array([4, 4]))
    assert tally.worst[0] == "fourth" and tally.worst[1].tolist() == [np.inf, 0.0]


def test_the_document_has_a_map_where_a_call_failed_and_for_the_worst_that_passed():
    class Half:
        @staticmethod
        def relu(x):
            y = np.where(x > 0, x, 0.0).astype(x.dtype)
            return y + np.float32(0.5) if x.dtype == np.float32 else y

    results = [r for case in load_cases() if case.function == "relu" for r in run_case(case, Target(Half(), "half"))]
    calls = document(results, {"half": {}}, "quick")["targets"]["half"]["cases"]
    failed = [call for call in calls if call["status"] == FAILED]
    assert failed and all(call["errors"]["name"] == "out" for call in failed)
    for name in {call["id"] for call in calls}:
        passed = [call for call in calls if call["id"] == name and call["status"] == "passed"]
        with_map = [call for call in passed if "errors" in call]
        assert len(with_map) <= 1 and all(one["share"] == max(c["share"] for c in passed) for one in with_map)
