"""The command line on the real backends: what they print is the same, and one goes on where another stopped."""

import importlib
import json
import os
import re

import pytest
from three import wide

from core_numpy.contract import peak, training_run
from core_numpy.contract.checkpoints import read_checkpoint
from core_numpy.contract.cli import main
from core_numpy.contract.run_log import read_curve
from core_numpy.contract.train_config import PRECISIONS

SMALL = ["--batch", "4", "--length", "16", "--plain"]


def real(name):
    package = {"numpy": "core_numpy", "torch": "backend_torch", "jax": "backend_jax"}[name]
    pytest.importorskip(name)
    return importlib.import_module(package)


def logged(path):
    with open(f"{path}/log.jsonl") as lines:
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A run of the reference, with a checkpoint after 10 of its 20 updates."""
    out = str(tmp_path_factory.mktemp("reference") / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_run, "EVALUATION_BATCHES", 2)
        assert main(real("numpy"), ["train", "--steps", "20", *SMALL, "--checkpoint-every", "10", "--out", out]) == 0
    return out


def losses(path):
    return [f"{row['loss']:.4f}" for row in logged(path)]


def test_a_disk_that_fills_up_ends_the_run_in_one_line_and_leaves_its_last_checkpoint(tmp_path, monkeypatch, capsys):
    plain, out = os.fsync, tmp_path / "run"

    def full(number):
        if (out / "step-00000002").exists():
            raise OSError(28, "No space left on device")
        return plain(number)

    monkeypatch.setattr(os, "fsync", full)
    run = ["train", "--steps", "9", "--batch", "2", "--length", "16", "--plain", "--checkpoint-every", "2"]
    assert main(real("numpy"), [*run, "--out", str(out)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(r"error: .*cannot write the checkpoint .*step-0000000\d: No space left on device; .*", error)
    assert read_checkpoint(out).step == 2 and not [name for name in os.listdir(out) if name.startswith(".")]
    monkeypatch.undo()
    monkeypatch.setattr(training_run, "EVALUATION_BATCHES", 2)
    assert main(real("numpy"), ["train", "--resume", str(out), "--plain"]) == 0
    assert [step for step, _ in read_curve(out / "log.jsonl")] == list(range(1, 10))


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_the_same_seed_prints_the_same_losses_as_the_reference(name, reference, tmp_path, monkeypatch):
    monkeypatch.setattr(training_run, "EVALUATION_BATCHES", 2)
    assert main(real(name), ["train", "--steps", "20", *SMALL, "--out", str(tmp_path / "run")]) == 0
    assert len(losses(reference)) == 20 and losses(tmp_path / "run") == losses(reference)


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_a_run_of_the_reference_goes_on_and_writes_in_another_backend(name, reference, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(training_run, "EVALUATION_BATCHES", 2)
    out = str(tmp_path / "run")
    assert main(real(name), ["train", "--resume", f"{reference}/step-00000010", "--plain", "--out", out]) == 0
    assert losses(out) == losses(reference)[10:]
    texts = []
    for each in ("numpy", name):
        capsys.readouterr()
        assert main(real(each), ["generate", "--resume", out, "The ", "--max-new", "8", "--temperature", "0"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[0].startswith("The ")
    capsys.readouterr()
    for each in ("numpy", name):  # and what another backend wrote goes back to the reference
        assert main(real(each), ["evaluate", "--resume", out, "--json", "--batch", "2"]) == 0
    first, second = (json.loads(line)["loss"] for line in capsys.readouterr().out.splitlines())
    assert first == pytest.approx(second, rel=1e-5)


EVERY = [
    # float64 is the one whose parameters are kept in another dtype.
    pytest.param(name, precision, marks=[] if precision == "float64" and name != "jax" else pytest.mark.slow)
    for name in ("numpy", "torch", "jax")
    for precision in PRECISIONS
]


@pytest.mark.parametrize(("name", "precision"), EVERY)
def test_every_precision_is_trained_resumed_measured_and_written_with(name, precision, tmp_path, monkeypatch):
    monkeypatch.setattr(training_run, "draw_losses", lambda *arguments, **more: None)
    (tmp_path / "text.txt").write_text("the same again and again " * 20)
    package = {"numpy": "core_numpy", "torch": "backend_torch", "jax": "backend_jax"}[name]
    out, text = str(tmp_path / "run"), str(tmp_path / "text.txt")
    new = ["train", "--text", text, "--precision", precision, "--batch", "2", "--length", "8", "--steps", "1"]
    with wide(package):
        assert main(real(name), [*new, "--plain", "--out", out]) == 0
        assert main(real(name), ["train", "--resume", out, "--steps", "2", "--plain"]) == 0
        assert main(real(name), ["evaluate", "--resume", out]) == 0
        assert main(real(name), ["generate", "--resume", out, "--max-new", "2"]) == 0
    found = read_checkpoint(out)
    assert found.train_config.precision == precision and found.step == 2
    assert {x.dtype.name for x in found.params.values()} == {"float64" if precision == "float64" else "float32"}


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_the_peak_is_measured_in_the_backends_own_arrays(name, monkeypatch):
    monkeypatch.setattr(peak, "LONG_ENOUGH", 0.0)
    assert peak.measure_peak(real(name), "float32", None) > 1e6
