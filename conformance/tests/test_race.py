"""The race: its figures on paper, its refusals, and one short race of the reference."""

import json
import math
import os

import numpy as np
import pytest

from conformance import race
from conformance.race import figures, judging, lane, racing
from conformance.race.contestants import all_contestants, missing
from conformance.race.contestants.base import Contestant
from conformance.race.pictures import draw
from conformance.race.process import Process, WorkerFailed
from conformance.race.table import as_text, table_rows
from conformance.race.task import SIZES, Task

# --- figures


def test_quartiles_and_the_ratio_of_medians_are_those_on_paper():
    assert figures.quartiles([5, 1, 3, 2, 4]) == (2, 3, 4)
    assert figures.ratio_interval([4.0] * 6, [2.0] * 6) == (2, 2, 2)
    ratio, low, high = figures.ratio_interval([3, 1, 2, 3, 1, 2], [1.0] * 6)
    assert ratio == 2 and 1 <= low < 2 < high <= 3


def test_rounds_are_resampled_in_pairs():
    # The machine halves its speed in half of the rounds; one contestant is always 10 % slower.
    fast = [1.0, 2.0] * 10
    slow = [1.1 * t for t in fast]
    _, low, high = figures.ratio_interval(slow, fast)
    assert low == pytest.approx(1.1) and high == pytest.approx(1.1)


def test_a_clear_difference_has_a_winner_and_noise_has_none():
    steady = [1.0, 1.01, 0.99, 1.0, 1.02, 0.98]
    assert figures.verdict({"a": [1.5 * t for t in steady], "b": steady}).startswith(
        "b wins: a takes 1.50 times as long"
    )
    rng = np.random.default_rng(0)
    noise = {name: list(1 + 0.3 * rng.random(12)) for name in "ab"}
    assert "no winner" in figures.verdict(noise)
    told = figures.verdict({"a": steady, "b": steady[::-1], "c": [9.0] * 6})
    assert told == "no winner: a, b lie within the noise of each other"  # c is out of it


@pytest.mark.parametrize(
    ("rounds", "phrase"),
    [({}, "nobody"), ({"a": [1.0]}, "only a finished"), ({"a": [1.0] * 4, "b": [2.0] * 4}, "fewer than 5 rounds")],
)
def test_too_little_to_compare_is_no_verdict(rounds, phrase):
    assert phrase in figures.verdict(rounds)


def test_the_distance_of_losses_is_relative_and_never_of_nothing():
    assert figures.loss_distance([2.0, 4.4, 9.9], [2.0, 4.0]) == pytest.approx(0.1)
    assert figures.loss_distance([math.nan], [1.0]) == math.inf
    with pytest.raises(ValueError, match="nothing was compared"):
        figures.loss_distance([], [1.0])


# --- judging


def rows(**losses):
    made = {}
    for name, values in losses.items():
        made[name] = {"status": "raced", "note": "", "rounds": [0.5 if name == "numpy" else 0.25] * 6, "losses": values,
                      "first_step_seconds": 1.0, "memory_before": 10.0, "memory_peak": 15.0}  # fmt: skip
    return made


def test_a_contestant_whose_losses_differ_is_disqualified_and_does_not_count():
    found = rows(numpy=[5.5] * 9, honest=[5.5 * (1 + 1e-6)] * 9, cheat=[5.5] * 7 + [5.4] * 2)
    judging.judge(found, dict.fromkeys(found, 1e-4))
    assert [row["status"] for row in found.values()] == ["raced", "raced", "disqualified"]
    assert "differ from numpy's by 1.8e-02" in found["cheat"]["reason"]
    verdict = judging.conclude(found, Task("tiny"), 1e12)["verdict"]
    assert verdict.startswith("honest wins: numpy takes 2.00")
    assert "median" not in found["cheat"]
    assert found["honest"]["tokens_per_second"] == 4 * SIZES["tiny"].batch * SIZES["tiny"].length
    assert found["honest"]["share_of_peak"] == pytest.approx(4 * Task("tiny").flops / 1e12)
    assert found["honest"]["memory_growth"] == 5 and found["numpy"]["ratio"] == 2


def test_losses_after_the_first_updates_may_drift_and_a_missing_reference_is_replaced():
    found = rows(a=[5.5] * 9, b=[5.5] * 8 + [5.4])
    judging.judge(found, {"a": 1e-4, "b": 1e-4})
    assert found["b"]["status"] == "raced" and found["b"]["loss_reference"] == "a"
    assert found["b"]["loss_distance"] == 0 and found["b"]["loss_distance_all"] > 0.01


# --- the task and the contestants


def test_every_process_builds_the_same_task():
    first, second = Task("tiny"), Task("tiny")
    for name, array in first.params().items():
        assert array.tobytes() == second.params()[name].tobytes()
    a, b = next(first.batches()), next(second.batches())
    assert a["tokens"].tobytes() == b["tokens"].tobytes() and a["tokens"].shape == (16, 64)


def test_contestants_are_found_and_ours_come_first():
    names = list(all_contestants())
    assert names[:4] == ["numpy", "torch", "torch-compiled", "jax"]


def test_a_contestant_whose_framework_is_missing_is_skipped_by_name(monkeypatch):
    ghost = Contestant("ghost", lambda task: None, ("no_such_framework", "numpy"))
    assert missing(ghost) == ["no_such_framework"]
    for module in (racing, lane):
        monkeypatch.setattr(module, "all_contestants", lambda: {"ghost": ghost})
    document = racing.run(["tiny"], ["ghost"], rounds=1, threads=1)
    row = document["races"][0]["contestants"]["ghost"]
    assert row["status"] == "skipped" and row["reason"] == "not installed: no_such_framework"
    assert document["races"][0]["verdict"] == "nobody finished"
    assert "skipped: not installed: no_such_framework" in as_text(document)


@pytest.mark.parametrize(
    ("changes", "phrase"),
    [
        ({"contestants": ["nobody"]}, "unknown contestant 'nobody'; known are numpy"),
        ({"sizes": ["huge"]}, "size must be one of tiny, small, long; got 'huge'"),
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"seconds": 0.0}, "seconds above 0"),
        ({"threads": 0}, "threads must be at least 1"),
        ({"architectures": ["rnn"]}, "architecture must be one of gpt, .*; got 'rnn'"),
        ({"precision": "float8"}, "precision must be one of float32, bfloat16; got 'float8'"),
        ({"measure": "sideways"}, "measure must be one of step, .*; got 'sideways'"),
        ({"device": "npu"}, "device must be one of cpu, cuda, tpu; got 'npu'"),
        ({"contestants": []}, "unknown contestant none at all"),
    ],
)
def test_a_wrong_argument_is_refused_before_anybody_starts(changes, phrase, monkeypatch):
    monkeypatch.setattr(lane, "Process", None)
    with pytest.raises(ValueError, match=phrase):
        race.run(**changes)


# --- processes


@pytest.fixture
def process():
    made = Process(threads=1, timeout=60)
    yield made
    made.close()


def test_an_error_in_the_worker_is_an_answer_and_it_goes_on(process):
    with pytest.raises(WorkerFailed, match="ValueError: steps before build"):
        process.ask({"do": "steps", "count": 1})
    with pytest.raises(WorkerFailed, match="unknown command 'dance'"):
        process.ask({"do": "dance"})
    assert process.ask({"do": "peak"})["flops_per_second"] > 1e8


def test_a_worker_that_dies_or_hangs_is_a_failure_not_a_hang(process):
    process.ask({"do": "peak"})
    process._process.kill()
    with pytest.raises(WorkerFailed, match="its process ended"):
        process.ask({"do": "peak"})
    slow = Process(threads=1, timeout=0.01)
    with pytest.raises(WorkerFailed, match=r"no answer to 'peak' within 0\.01 s"):
        slow.ask({"do": "peak"})


def test_a_short_race_gives_a_table_a_picture_and_a_document(tmp_path, capsys):
    arguments = ["--contestants", "numpy", "--rounds", "2", "--seconds", "0.01", "--threads", "1"]
    files = {"json": tmp_path / "race.json", "png": tmp_path / "race.png"}
    assert race.main([*arguments, "--json", str(files["json"]), "--png", str(files["png"])]) == 0
    printed = capsys.readouterr()
    assert "only numpy finished" in printed.out and "round 2 of 2" in printed.err
    document = json.loads(files["json"].read_text())
    row = document["races"][0]["contestants"]["numpy"]
    assert len(row["rounds"]) == 2 and len(row["losses"]) == 1 + lane.WARM_UP + 2
    assert row["losses"][0] == pytest.approx(math.log(256), rel=0.05)  # nothing is learnt yet
    assert row["memory_peak"] >= row["memory_before"] > 0
    assert files["png"].read_bytes()[:4] == b"\x89PNG"
    assert [len(cells) for cells in table_rows(document["races"][0])] == [12]


def test_wrong_arguments_of_the_command_end_with_status_2(capsys):
    assert race.main(["--rounds", "0"]) == 2
    assert "rounds must be at least 1" in capsys.readouterr().err
    assert race.main(["--list"]) == 0
    assert "torch-compiled" in capsys.readouterr().out


def test_a_picture_of_a_race_without_finishers_can_be_drawn(tmp_path):
    document = {"races": [{"task": {"size": "tiny"}, "contestants": {}}]}
    draw(document, tmp_path / "race.png")
    assert os.path.getsize(tmp_path / "race.png") > 0
