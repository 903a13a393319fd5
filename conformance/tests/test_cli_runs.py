"""Runs of the command line that stop, move and go on, on a stand-in backend: what is kept and what is measured."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from stand_in import RUN, Trainer, logged, make

from core_numpy.contract import cli, training_run
from core_numpy.contract.checkpoints import read_checkpoint
from core_numpy.contract.cli import main
from core_numpy.contract.data import evaluation_batches
from core_numpy.contract.run_log import read_curve

ERRNO = {"File exists": errno.EEXIST, "Not a directory": errno.ENOTDIR}


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    return make(tmp_path, monkeypatch)


@pytest.mark.parametrize("asked", [["--batch", "1"], ["--batch", "50"], []])
def test_how_a_text_is_cut_into_batches_changes_no_measurement_and_a_part_of_it_is_called_one(
    stand_in, capsys, monkeypatch, asked
):
    monkeypatch.setattr(cli, "EVALUATION_BATCHES", 2)
    assert main(stand_in, [*RUN, "--steps", "20"]) == 0
    row = {"step": 20, "tokens": 36, "of": 200}  # two of the training's batches, of three windows of six bytes
    trainer = Trainer.load("runs/numpy-tiny")
    tokens = np.frombuffer(b"abcd" * 50, np.uint8)
    loss = trainer.evaluate(evaluation_batches(tokens, batch=3, length=6, limit=2))["loss"]
    capsys.readouterr()
    assert main(stand_in, ["evaluate", "--resume", "runs/numpy-tiny", "--json", *asked]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert {name: measured[name] for name in row} == row and measured["loss"] == pytest.approx(loss, rel=1e-12)
    assert main(stand_in, ["evaluate", "--resume", "runs/numpy-tiny", *asked]) == 0
    assert "36 bytes, the first of 200\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "near"),
    [("--heads 3", ""), ("--stpes 3", "; did you mean --steps?"), ("--eval-every=2", "; did you mean")],
)
def test_an_option_that_a_verb_does_not_know_is_told_the_near_one_and_the_verbs_help(stand_in, capsys, words, near):
    with pytest.raises(SystemExit) as ended:
        main(stand_in, ["train", *words.split()])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1
    assert f" train: unrecognized arguments: {words}{near}" in said and said.endswith(" train --help says more\n")


def test_a_run_in_the_place_of_a_pretrained_folder_is_told_its_option(stand_in, capsys):
    assert main(stand_in, [*RUN, "--steps", "3"]) == 0
    for folder in ("runs/numpy-tiny", "runs/numpy-tiny/step-00000003"):
        capsys.readouterr()
        assert main(stand_in, ["generate", "--model", folder, "a"]) == 2
        assert (
            f"{folder} is a run or a checkpoint, no Hugging Face folder: --resume {folder} reads it"
            in capsys.readouterr().err
        )


def test_a_run_is_resumed_and_measured_from_another_directory(stand_in, capsys, monkeypatch):
    assert main(stand_in, [*RUN, "--steps", "3"]) == 0
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert main(stand_in, ["evaluate", "--resume", "../runs/numpy-tiny"]) == 0
    assert main(stand_in, ["train", "--resume", "../runs/numpy-tiny", "--steps", "5", "--plain"]) == 0
    assert read_checkpoint("../runs/numpy-tiny").step == 5
    Path("../text.txt").rename("moved.txt")
    capsys.readouterr()
    for verb in (["evaluate"], ["train", "--steps", "7"]):
        assert main(stand_in, [*verb, "--resume", "../runs/numpy-tiny"]) == 2
        assert "text.txt does not exist" in (said := capsys.readouterr().err) and "where it is now with --text" in said
    assert main(stand_in, ["train", "--resume", "../runs/numpy-tiny", "--steps", "7", "--text", "moved.txt"]) == 0
    assert main(stand_in, ["train", "--resume", "../runs/numpy-tiny", "--steps", "8"]) == 0  # it knows from now on


@pytest.mark.parametrize("dies", [3, 5])
def test_a_run_that_was_made_longer_and_then_stopped_goes_on_without_being_told_again(stand_in, monkeypatch, dies):
    assert main(stand_in, [*RUN, "--steps", "3"]) == 0
    plain = Trainer.step

    def step(self, batch):
        if self.updates == dies:
            raise OSError("the machine dies")
        return plain(self, batch)

    monkeypatch.setattr(Trainer, "step", step)
    longer = ["train", "--resume", "runs/numpy-tiny", "--plain", "--checkpoint-every", "1"]
    assert main(stand_in, [*longer, "--steps", "9"]) == 2
    found = read_checkpoint("runs/numpy-tiny")
    assert found.step == dies and found.train_config.steps == (3 if dies == 3 else 9)
    monkeypatch.setattr(Trainer, "step", plain)
    assert main(stand_in, longer) == 0
    assert [step for step, _ in read_curve(Path("runs/numpy-tiny/log.jsonl"))] == list(range(1, 10))


def test_a_run_saves_on_its_way_without_being_asked(stand_in, monkeypatch):
    plain = Trainer.step

    def step(self, batch):
        if self.updates == 101:
            raise OSError("the machine dies")
        return plain(self, batch)

    monkeypatch.setattr(Trainer, "step", step)
    assert main(stand_in, [*RUN, "--steps", "300"]) == 2
    assert read_checkpoint("runs/numpy-tiny").step == 100


@pytest.mark.parametrize(
    "damage",
    [
        '{"text": 5}',
        '{"steps": "9"}',
        '{"checkpoint_every": 0}',
        '{"evaluate_every": 1.5}',
        '{"length": null}',
        '{"size": true}',
        "[1]",
        "{",
        "[" * 9999,
    ],
)
def test_a_damaged_run_json_is_named(stand_in, capsys, damage):
    assert main(stand_in, [*RUN, "--steps", "2"]) == 0
    Path("runs/numpy-tiny/run.json").write_text(damage)
    capsys.readouterr()
    for verb in (["evaluate"], ["train", "--steps", "4"]):
        assert main(stand_in, [*verb, "--resume", "runs/numpy-tiny"]) == 2
        assert re.search(r"error: \S*numpy-tiny/run\.json is damaged", capsys.readouterr().err)


def test_a_resumed_run_keeps_how_often_it_saves_and_measures_unless_told_otherwise(stand_in):
    every = ["--checkpoint-every", "3", "--evaluate-every", "4"]
    assert main(stand_in, [*RUN, "--steps", "4", *every, "--out", "run"]) == 0
    run = json.loads(Path("run/run.json").read_text())
    assert (run["checkpoint_every"], run["evaluate_every"]) == (3, 4)
    assert main(stand_in, ["train", "--resume", "run", "--steps", "9", "--plain"]) == 0
    assert sorted(path.name[-1] for path in Path("run").glob("step-*")) == ["4", "6", "9"]  # the three newest are kept
    assert [row["step"] for row in logged("run", "validation.jsonl")] == [4, 8, 9]
    again = ["train", "--resume", "run", "--steps", "13", "--plain", "--checkpoint-every", "5", "--evaluate-every", "6"]
    assert main(stand_in, again) == 0
    assert sorted(int(path.name[5:]) for path in Path("run").glob("step-*")) == [9, 10, 13]
    assert [row["step"] for row in logged("run", "validation.jsonl")] == [4, 8, 9, 12, 13]
    # A run of an older version says neither.
    run = {name: x for name, x in run.items() if not name.endswith("_every")}
    Path("run/run.json").write_text(json.dumps(run | {"steps": 13}))
    assert main(stand_in, ["train", "--resume", "run", "--steps", "14", "--plain"]) == 0
    assert json.loads(Path("run/run.json").read_text())["checkpoint_every"] == training_run.CHECKPOINT_EVERY


def test_a_reader_of_a_pipe_that_goes_away_ends_a_command_quietly():
    done = subprocess.run(
        [sys.executable, "-c", "from core_numpy.contract.arguments import ended\n"
         "def work():\n    raise BrokenPipeError\n"
         "status = ended(work, 'x', debug=False)\nprint('into nothing')\nraise SystemExit(status)"],
        capture_output=True, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (141, "", "")


def test_a_folder_that_cannot_be_made_is_one_sentence_with_its_name(stand_in, capsys):
    for out, why in (("text.txt", "File exists"), ("text.txt/run", "Not a directory")):
        assert main(stand_in, [*RUN, "--steps", "2", "--out", out]) == 2
        assert capsys.readouterr().err == f"error: [Errno {ERRNO[why]}] cannot make the run's folder {out}: {why}\n"


def test_a_disk_that_may_only_be_read_is_said_once(stand_in, capsys, monkeypatch):
    assert main(stand_in, [*RUN, "--steps", "2"]) == 0
    capsys.readouterr()

    def refuse(number):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "fsync", refuse)
    assert main(stand_in, ["train", "--resume", "runs/numpy-tiny", "--steps", "4"]) == 2
    assert re.fullmatch(
        r"error: \[Errno 30\] cannot write \S*run\.json: Read-only file system\n", capsys.readouterr().err
    )


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")
@pytest.mark.parametrize("file", ["log.jsonl", "validation.jsonl"])
def test_a_log_that_finds_no_room_is_named(stand_in, capsys, file):
    out = Path("here")
    out.mkdir()
    (out / file).symlink_to("/dev/full")
    assert main(stand_in, [*RUN, "--steps", "3", "--checkpoint-every", "2", "--out", str(out)]) == 2
    assert f"cannot write here/{file}: No space left on device" in capsys.readouterr().err
    if file == "validation.jsonl":  # the updates are safe by then
        assert read_checkpoint(out).step == 3


def test_a_run_that_could_not_be_saved_does_not_begin(stand_in, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    assert main(stand_in, [*RUN, "--steps", "3"]) == 3
    assert "this needs the package safetensors" in capsys.readouterr().err and not Path("runs").exists()
