"""`conformance run --suite parallel`: rows are judged, wrong ones fail, and processes serve more than one row."""

from __future__ import annotations

import importlib.util
from typing import Any, cast

import pytest

from conformance.race.process import WorkerFailed
from conformance.suites import parallel
from conformance.targets import load


class Member:
    """A process that answers as it is told to."""

    def __init__(self, said: str | None = None) -> None:
        self.said, self.closed = said, False

    def send(self, command):
        assert command["do"] == "train"

    def answer(self, what):
        if self.said is not None:
            raise WorkerFailed(self.said)
        return {}

    def close(self):
        self.closed = True


@pytest.fixture
def crews(monkeypatch):
    made: dict[Any, Any] = {}
    monkeypatch.setattr(parallel, "_crews", made)
    yield made
    for members in made.values():
        for member in members:
            member.close()


def test_of_several_that_end_the_one_that_failed_is_said_and_all_are_ended(crews):
    (case,) = parallel.cases(pattern="plain/data2-fsdp2")
    members = [Member("process 0 of 2 waited for another one that has gone"), Member("ValueError: it is wrong")]
    crews["backend_torch", 4, 4] = members
    with pytest.raises(parallel.Disagreement, match=r"^ValueError: it is wrong"):
        parallel.answers("backend_torch", case, 4)
    assert not crews and all(member.closed for member in members)


def test_processes_serve_rows_of_as_many_devices_and_others_are_ended(crews, monkeypatch):
    monkeypatch.setattr(parallel, "Process", lambda **options: Member())
    two = parallel._crew("backend_jax", 2, 1)
    assert parallel._crew("backend_jax", 2, 1) is two and len(two) == 1
    four = parallel._crew("backend_jax", 4, 1)
    assert cast(Any, two[0]).closed and len(parallel._crew("backend_jax", 4, 2)) == 2
    assert parallel._crew("backend_jax", 4, 1) is four and len(crews) == 2


def test_rows_of_as_many_devices_follow_one_another():
    counts = [case.devices for case in parallel.cases("full")]
    assert len(counts) == 15 and counts == sorted(counts)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["torch", "jax"])
def test_rows_are_judged_in_the_same_processes_and_a_run_of_another_seed_fails(name, crews, monkeypatch):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    target, first = load(name), []
    for pattern in ("plain/data2", "plain/fsdp2"):
        (result,) = parallel.cases(pattern=pattern)[0].judge(target, "quick")
        assert result.status == "passed" and result.comparisons > 40, result
        first += [members for members in crews.values() if members not in first]
    assert len(first) == 1
    monkeypatch.setitem(parallel.TRAIN, "seed", 6)  # of the reference alone: other dropout
    (result,) = parallel.cases(pattern="plain/data2")[0].judge(target, "quick")
    assert result.status == "failed" and "error budget" in result.detail, result
