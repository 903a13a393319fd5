"""The command line on a stand-in backend: what it does by itself."""

import importlib
import json
import os
import re
import signal
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from stand_in import RUN, Bigram, Trainer, logged, make

from core_numpy.contract import peak, progress, training_run
from core_numpy.contract.checkpoints import read_checkpoint
from core_numpy.contract.cli import main
from core_numpy.contract.cost import step_cost
from core_numpy.contract.data import evaluation_batches
from core_numpy.contract.run_log import read_curve


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    return make(tmp_path, monkeypatch)


def test_training_prints_writes_and_measures(stand_in, capsys):
    assert main(stand_in, [*RUN, "--steps", "30"]) == 0
    out = capsys.readouterr().out
    assert "step     1/30  loss 5.5452  bits/byte 8.0000" in out  # ln 256 and 8 bits: nothing is learnt yet
    assert out.count("step ") == 30
    assert "bits per byte; the run is in runs/numpy-tiny" in out
    assert sorted(os.listdir("runs/numpy-tiny")) == [
        "log.jsonl", "loss.png", "run.json", "step-00000030", "validation.jsonl",
    ]  # fmt: skip
    with open("runs/numpy-tiny/loss.png", "rb") as file:
        assert file.read(8) == b"\x89PNG\r\n\x1a\n"
    assert [row["step"] for row in logged()] == list(range(1, 31))
    assert logged()[0]["lr"] == pytest.approx(3e-4)  # the first of ten updates of warm-up to 3e-3


def test_json_lines_are_the_whole_output_and_end_with_the_validation(stand_in, capsys):
    assert main(stand_in, [*RUN, "--steps", "5", "--json", "--out", "here"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 5]
    assert rows[-1]["bits_per_byte"] == pytest.approx(rows[-1]["validation_loss"] / np.log(2))
    assert rows[-1]["out"] == "here"


def test_a_row_has_its_speed_its_share_of_the_peak_and_the_time_left(stand_in, capsys):
    assert main(stand_in, [*RUN, "--steps", "3", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()][:3]
    flops = step_cost(training_run.model_config("tiny", 6), 3, 6).total.flops
    for row in rows:
        assert row["utilisation"] == pytest.approx(row["tokens_per_second"] * flops / 18 / 1e9, abs=1e-4, rel=1e-2)
    assert rows[0]["seconds_left"] >= rows[-1]["seconds_left"] == 0
    assert main(stand_in, [*RUN, "--steps", "1"]) == 0
    assert re.search(r"lr 3\.00e-03  [\d,]+ tokens/s  \d+% of peak  0:00 left", capsys.readouterr().out)


def test_a_file_of_token_ids_is_trained_on_measured_and_continued_by_its_ids(stand_in, capsys):
    np.save("ids.npy", np.tile(np.array([3, 500, 7, 9], np.uint16), 400))
    config = training_run.model_config("tiny", 6, 501)
    assert config.vocab == 501
    stand_in.Transformer = lambda config, **more: Bigram(config, size=501, **more)
    run = ["train", "--data", "ids.npy", "--length", "6", "--batch", "3", "--plain", "--steps", "60"]
    assert main(stand_in, run) == 0
    out = capsys.readouterr().out
    assert "1,440 tokens of ids.npy" in out and "bits/token 8.9687" in out  # log2 501: nothing is learnt yet
    assert read_checkpoint("runs/numpy-tiny").config.vocab == 501
    assert main(stand_in, ["evaluate", "--resume", "runs/numpy-tiny", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bits_per_token"] < 1
    generate = ["generate", "--resume", "runs/numpy-tiny", "--max-new", "3", "--temperature", "0"]
    assert main(stand_in, [*generate, "--tokens", "7 9"]) == 0
    assert capsys.readouterr().out == "7 9 3 500 7\n"
    assert main(stand_in, [*generate, "the"]) == 2
    assert "give the prompt as such, --tokens" in capsys.readouterr().err
    np.save("ids.npy", np.tile(np.array([3, 500, 7, 8], np.uint16), 400))
    assert main(stand_in, ["train", "--resume", "runs/numpy-tiny", "--steps", "70"]) == 2
    assert "ids.npy is not the data that" in capsys.readouterr().err


def test_a_schedule_that_ends_is_resumed_with_its_own_end(stand_in, capsys):
    assert main(stand_in, [*RUN, "--steps", "14", "--schedule", "linear", "--checkpoint-every", "7"]) == 0
    assert logged()[-1]["lr"] == 0.0 and 3e-3 == logged()[9]["lr"] > logged()[11]["lr"] > 0
    assert main(stand_in, ["train", "--resume", "runs/numpy-tiny/step-00000007", "--steps", "9"]) == 2
    assert "--steps is 14 in runs/numpy-tiny/step-00000007 and not 9" in capsys.readouterr().err
    assert main(stand_in, ["train", "--resume", "runs/numpy-tiny/step-00000007", "--out", "again"]) == 0
    assert [row["lr"] for row in logged("again")] == [row["lr"] for row in logged()[7:]]


def test_a_log_whose_last_line_was_cut_off_goes_on_with_a_line_of_its_own(stand_in):
    assert main(stand_in, [*RUN, "--steps", "4"]) == 0
    with open("runs/numpy-tiny/log.jsonl", "a") as file:
        file.write('{"step": 5, "lo')
    assert main(stand_in, ["train", "--resume", "runs/numpy-tiny", "--steps", "6", "--plain"]) == 0
    assert [step for step, _ in read_curve(Path("runs/numpy-tiny/log.jsonl"))] == [1, 2, 3, 4, 5, 6]


def test_a_step_that_is_left_out_is_no_update_and_its_batch_is_gone(stand_in, monkeypatch):
    plain, left_out = Trainer.step, []

    def step(self, batch):
        if self.updates == 2 and not left_out:
            left_out.append(batch)
            self.batches += 1
            return {"loss": 1.0, "grad_norm": np.inf, "lr": 0.1, "tokens": 3}
        return plain(self, batch)

    monkeypatch.setattr(Trainer, "step", step)
    assert main(stand_in, [*RUN, "--steps", "4"]) == 0
    assert left_out and [row["step"] for row in logged()] == [1, 2, 3, 4]
    assert read_checkpoint("runs/numpy-tiny").step == 4


MADE = []


class Recorder:
    """What tensorboard's writer is given."""

    def __init__(self, folder):
        self.folder, self.events, self.closed = folder, [], False
        MADE.append(self)

    def add_event(self, event):
        self.events.append(event)

    def close(self):
        self.closed = True


def test_tensorboard_gets_every_number_where_it_is_installed(stand_in, monkeypatch):
    parts = {
        "tensorboard.compat.proto.event_pb2": {"Event": types.SimpleNamespace},
        "tensorboard.compat.proto.summary_pb2": {"Summary": types.SimpleNamespace},
        "tensorboard.summary.writer.event_file_writer": {"EventFileWriter": Recorder},
    }
    for name, contents in parts.items():
        module = types.ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["tensorboard.compat.proto.summary_pb2"].Summary = Summary = type("Summary", (), {})
    Summary.__init__ = lambda self, value=(): setattr(self, "value", value)
    Summary.Value = types.SimpleNamespace
    assert main(stand_in, [*RUN, "--steps", "3"]) == 0
    (recorder,) = MADE
    assert recorder.closed and recorder.folder.endswith("numpy-tiny")
    assert [event.step for event in recorder.events] == [1, 2, 3, 3]  # the last is of the held-out part
    rows = [("train", row) for row in logged()] + [("validation", row) for row in logged(file="validation.jsonl")]
    for event, (tag, row) in zip(recorder.events, rows, strict=True):
        shown = {value.tag: value.simple_value for value in event.summary.value}
        assert shown == {f"{tag}/{name}": x for name, x in row.items() if name not in ("step", "backend")}


def test_the_measured_peak_is_that_of_a_product_of_a_known_size(monkeypatch):
    ticks = iter(range(100))
    monkeypatch.setattr(peak.time, "perf_counter", lambda: float(next(ticks)))
    assert peak.measure_peak(importlib.import_module("core_numpy"), "float32", None) == 2.0 * 256**3


def test_a_resumed_run_is_the_straight_run(stand_in, capsys):
    assert main(stand_in, [*RUN, "--steps", "12", "--out", "straight"]) == 0
    assert main(stand_in, [*RUN, "--steps", "12", "--out", "split", "--checkpoint-every", "5"]) == 0
    assert sorted(name for name in os.listdir("split") if name.startswith("step")) == [
        "step-00000005", "step-00000010", "step-00000012",
    ]  # fmt: skip
    assert main(stand_in, ["train", "--resume", "split/step-00000005", "--out", "again"]) == 0
    straight, keep = logged("straight"), ("step", "loss", "lr")
    assert [[row[k] for k in keep] for row in logged("again")] == [[row[k] for k in keep] for row in straight[5:]]
    a, b = read_checkpoint("again").params["table"], read_checkpoint("straight").params["table"]
    assert a.tobytes() == b.tobytes()


def test_evaluate_gives_the_number_that_training_ended_with(stand_in, capsys):
    assert main(stand_in, [*RUN, "--steps", "20", "--json"]) == 0
    trained = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert main(stand_in, ["evaluate", "--resume", "runs/numpy-tiny", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["loss"] == trained["validation_loss"] and measured["step"] == 20
    assert measured["tokens"] == sum(
        batch["tokens"].size for batch in evaluation_batches(np.zeros(200, np.uint8), batch=3, length=6, limit=64)
    )
    assert main(stand_in, ["evaluate", "--resume", "runs/numpy-tiny", "--text", "text.txt"]) == 0
    assert "bits per byte" in capsys.readouterr().out


def test_generate_continues_the_prompt(stand_in, capsys):
    assert main(stand_in, [*RUN, "--steps", "60"]) == 0
    capsys.readouterr()
    assert main(stand_in, ["generate", "--resume", "runs/numpy-tiny", "ab", "--max-new", "6"]) == 0
    assert capsys.readouterr().out == "abcdabcd\n"
    assert main(stand_in, ["generate", "--resume", "runs/numpy-tiny", "--json", "b", "--max-new", "1"]) == 0
    assert json.loads(capsys.readouterr().out) == {"prompt": "b", "text": "bc"}


def test_the_held_out_part_is_measured_on_the_way_and_the_updates_do_not_know(stand_in, capsys):
    assert main(stand_in, [*RUN, "--steps", "24", "--evaluate-every", "8", "--json", "--out", "often"]) == 0
    said = [row for row in map(json.loads, capsys.readouterr().out.splitlines()) if "validation_loss" in row]
    assert [row["step"] for row in said] == [8, 16, 24]
    rows = logged("often", "validation.jsonl")
    assert [(row["step"], row["loss"]) for row in rows] == [(row["step"], row["validation_loss"]) for row in said]
    assert rows[0]["bits_per_byte"] == pytest.approx(rows[0]["loss"] / np.log(2)) and rows[0]["backend"] == "numpy"
    # What is measured on the way is what a shorter run ends with.
    assert main(stand_in, [*RUN, "--steps", "16", "--out", "short"]) == 0
    assert read_curve(Path("short/validation.jsonl")) == [(16, rows[1]["loss"])]
    assert main(stand_in, [*RUN, "--steps", "24", "--out", "once"]) == 0
    assert [row["loss"] for row in logged("often")] == [row["loss"] for row in logged("once")]
    assert read_curve(Path("once/validation.jsonl")) == [(24, rows[2]["loss"])]


def test_the_time_that_measuring_takes_is_not_that_of_the_updates(monkeypatch):
    clock = iter([0.0, 1.0, 2.0])
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(clock))
    shown = progress.Progress(0, 2, as_json=False, plain=True)
    shown.row(1, {"loss": 1.0, "grad_norm": 1.0, "lr": 1.0, "tokens": 10})
    shown.pause(0.5)
    assert shown.row(2, {"loss": 1.0, "grad_norm": 1.0, "lr": 1.0, "tokens": 10})["tokens_per_second"] == 13.3


def test_a_second_run_gets_a_folder_of_its_own(stand_in):
    for _ in range(2):
        assert main(stand_in, [*RUN, "--steps", "1"]) == 0
    assert sorted(os.listdir("runs")) == ["numpy-tiny", "numpy-tiny-2"]


def test_ctrl_c_finishes_the_update_saves_and_says_how_to_go_on(stand_in, capsys, monkeypatch):
    plain = Trainer.step

    def step(self, batch):
        if self.updates == 3:
            signal.raise_signal(signal.SIGINT)
        return plain(self, batch)

    monkeypatch.setattr(Trainer, "step", step)
    before = signal.getsignal(signal.SIGINT)
    assert main(stand_in, [*RUN, "--steps", "9"]) == 130
    assert signal.getsignal(signal.SIGINT) is before
    assert (
        "interrupted: saved runs/numpy-tiny after update 4; go on with --resume runs/numpy-tiny"
        in capsys.readouterr().out
    )
    assert read_checkpoint("runs/numpy-tiny").step == 4
    monkeypatch.setattr(Trainer, "step", plain)
    assert main(stand_in, ["train", "--resume", "runs/numpy-tiny"]) == 0
    assert [row["step"] for row in logged()] == list(range(1, 10))


def test_a_second_ctrl_c_stops_at_once_without_a_traceback(stand_in, capsys, monkeypatch):
    def step(self, batch):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Trainer, "step", step)
    monkeypatch.setattr(training_run, "ONE_PRESS", -1.0)  # the two come closer together than anybody presses
    assert main(stand_in, [*RUN, "--steps", "9"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted"


ERRORS = [
    (["train", "--text", "none.txt"], "none.txt does not exist"),
    (["train", "--text", "text.txt", "--length", "200"], "its validation part has 200 of 2000 tokens"),
    (["train", "--text", "empty.txt"], "empty.txt is empty"),
    ([*RUN, "--steps", "0"], "--steps must be at least 1; got 0"),
    ([*RUN, "--batch", "0"], "TrainConfig.batch must be an integer of at least 1; got 0"),
    ([*RUN, "--length", "0"], "length must be an integer of at least 1; got 0"),
    ([*RUN, "--lr", "-1"], "TrainConfig.lr must be a finite number at least 0"),
    ([*RUN, "--checkpoint-every", "0"], "--checkpoint-every must be at least 1"),
    ([*RUN, "--evaluate-every", "-2"], "--evaluate-every must be at least 1; got -2"),
    ([*RUN, "--device", "quantum"], "device must be 'cpu'; got 'quantum'"),
    (["train", "--resume", "nowhere"], "nowhere does not exist"),
    (["train", "--resume", "run"], "has 2 updates already: give --steps above that"),
    (["train", "--resume", "linear"], "has 2 updates already: the end of its linear schedule"),
    (["evaluate", "--resume", "run", "--batch", "0"], "--batch must be an integer of at least 1; got 0"),
    (["evaluate", "--resume", "run", "--length", "0"], "--length must be an integer of at least 1; got 0"),
    ([*RUN, "--seed", str(2**64)], "seed must be an integer from 0 to 2**64 - 1"),
    (["train", "--resume", "run", "--steps", "9", "--lr", "0.5"], "--lr is 0.003 in"),
    (
        ["train", "--resume", "run", "--steps", "9", "--lr", "0.5", "--batch", "4"],
        "and not 4, --lr is 0.003 in run/step-00000002 and not 0.5: a resumed run keeps what it was started with",
    ),
    (["train", "--resume", "run", "--steps", "9", "--text", "other.txt"], "is not the text that"),
    ([*RUN, "--data", "ids.npy"], "--text and --data exclude each other"),
    (["train", "--data", "none.npy"], "none.npy does not exist"),
    (["train", "--data", "text.txt"], "text.txt must end in .npy, .bin or .uint16"),
    (["evaluate", "--resume", "run", "--data", "ids.npy"], "ids.npy has token 300 at 2; the vocabulary is 256"),
    ([*RUN, "--out", "run"], "run holds a run already"),
    (["evaluate", "--resume", "text.txt"], "text.txt is a file"),
    (["generate", "--resume", "run", ""], "at least one byte"),
]


@pytest.mark.parametrize(("arguments", "phrase"), ERRORS)
def test_an_error_is_one_line_and_status_2_and_debug_shows_the_rest(stand_in, capsys, monkeypatch, arguments, phrase):
    monkeypatch.setattr(training_run, "draw_losses", lambda *arguments, **more: None)  # a third of a second each
    np.save("ids.npy", np.array([1, 2, 300]))
    with open("empty.txt", "w"), open("other.txt", "w") as file:
        file.write("efgh" * 500)
    assert main(stand_in, [*RUN, "--steps", "2", "--out", "run"]) == 0
    if "linear" in arguments:
        assert main(stand_in, [*RUN, "--steps", "2", "--out", "linear", "--schedule", "linear"]) == 0
    capsys.readouterr()
    assert main(stand_in, arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1 and phrase in printed.err
    assert os.listdir("runs") == [] if os.path.exists("runs") else True  # refused before a folder is made
    with pytest.raises((ValueError, OSError), match=re.escape(phrase)):
        main(stand_in, [*arguments, "--debug"])


def test_a_package_that_is_missing_is_one_line_and_status_3(stand_in, capsys, monkeypatch):
    assert main(stand_in, [*RUN, "--steps", "1", "--out", "run"]) == 0
    capsys.readouterr()
    for name in [name for name in sys.modules if name.startswith("safetensors")]:
        monkeypatch.setitem(sys.modules, name, None)
    assert main(stand_in, ["evaluate", "--resume", "run"]) == 3
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and printed.count("\n") == 1 and "pip install safetensors" in printed


def test_an_unknown_size_is_a_usage_error(stand_in, capsys):
    with pytest.raises(SystemExit) as caught:
        main(stand_in, ["train", "--size", "tinny"])
    assert caught.value.code == 2 and "tiny" in capsys.readouterr().err


@pytest.mark.parametrize("verb", [[], ["train"], ["evaluate"], ["generate"]])
def test_help_fits_a_screen_and_has_an_example(stand_in, capsys, verb, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as caught:
        main(stand_in, [*verb, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert caught.value.code == 0 and len(lines) <= 30
    assert any(line.startswith("Example: python -m core_numpy") for line in lines)


def test_without_matplotlib_the_run_ends_well_and_says_what_is_missing(stand_in, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(stand_in, [*RUN, "--steps", "2"]) == 0
    assert "no loss.png: it needs the package matplotlib" in capsys.readouterr().out
