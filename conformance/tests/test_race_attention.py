"""The race of attention alone: who is timed against whom, and what is refused."""

from __future__ import annotations

import json

import pytest

from conformance.race import alone

torch = pytest.importorskip("torch")

from conformance.race import attention_torch as race  # noqa: E402


def test_the_ratio_is_ours_by_the_fastest_of_the_others():
    row = alone.Row("full", 8, "both", {"ours": 3.0, "slow": 4.0, "fast": 2.0}, 5)
    assert row.rival == "fast"
    assert row.ratio == 1.5


def test_everybody_has_as_many_turns_and_nobody_always_follows_the_same_one(monkeypatch):
    monkeypatch.setattr(alone, "FEWEST_TURNS", 40)
    said: list[str] = []
    medians, turns = alone.take_turns({name: lambda name=name: said.append(name) for name in "abc"}, 0.0)
    assert set(medians) == {"a", "b", "c"} and turns == 40
    assert "".join(said[:3]) == "abc"  # the warm-up
    rounds = ["".join(said[n : n + 3]) for n in range(3, len(said), 3)]
    assert len(rounds) == 40 and all(sorted(order) == ["a", "b", "c"] for order in rounds)
    assert set(rounds) == {"abc", "acb", "bac", "bca", "cab", "cba"}


@pytest.mark.parametrize("name", race.CASES)
def test_every_case_is_timed_against_work_that_agrees(name):
    length = max(12, race.CASES[name].shortest)
    for mode in race.CASES[name].modes:
        row = race.measure(name, length, mode, 0.0)
        assert min(row.seconds.values()) > 0 and len(row.seconds) >= 2


def test_other_work_is_refused(monkeypatch):
    case = race.Case(lambda length: ({"causal": True}, {"sdpa": race._sdpa()}))
    monkeypatch.setitem(race.CASES, "full", case)
    with pytest.raises(ValueError, match=r"full: sdpa is off by .*, so it is not the same work"):
        race.measure("full", 8, "forward", 0.0)


def test_the_command_prints_a_line_per_case_and_writes_the_figures(tmp_path, capsys):
    file = tmp_path / "figures.json"
    threads = torch.get_num_threads()
    try:
        assert (
            race.main(["8", "4", "--case", "causal", "--seconds", "0.001", "--threads", "1", "--json", str(file)]) == 0
        )
        assert race.main(["8", "--case", "nothing like it"]) == 2
    finally:
        torch.set_num_threads(threads)
    said = capsys.readouterr()
    assert said.err == "python -m conformance.race.attention_torch: no case has 'nothing like it' in its name\n"
    printed = said.out
    assert "causal, grouped 8:2" in printed and "sdpa" in printed
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert {(row["length"], row["mode"]) for row in rows} == {(n, mode) for n in (4, 8) for mode in ("forward", "both")}
