"""`conformance curves`: what it reads of runs, what it says of them, and what it refuses."""

from __future__ import annotations

import bz2
import gzip
import json
import math

import pytest

from conformance.__main__ import main
from conformance.curves import compared, named, pieces, read_run
from core_numpy.contract.data import byte_tokens, default_text, split
from core_numpy.contract.source import open_source

HALF = math.log(2) / 2  # nats of half a bit
SETTINGS = {"text": None, "data": None, "size": "tiny", "steps": 4, "batch": 2, "length": 16, "lr": 1e-3, "seed": 0,
            "precision": "float32", "schedule": "constant"}  # fmt: skip


def run_of(folder, backend="numpy", losses=(4, 3, 2, 1), validation=((2, 3), (4, 1)), **settings):
    """A run's folder; losses and validation in bits."""
    folder.mkdir(parents=True, exist_ok=True)
    digest = open_source(None, None).digest
    (folder / "run.json").write_text(json.dumps({**SETTINGS, "digest": digest, "backend": backend, **settings}))
    rows = [{"step": step, "loss": bits * 2 * HALF} for step, bits in enumerate(losses, 1)]
    measured = [{"step": step, "loss": bits * 2 * HALF} for step, bits in validation]
    for name, lines in (("log.jsonl", rows), ("validation.jsonl", measured)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in lines))
    return folder


def test_runs_are_held_against_each_other_and_against_compressors(tmp_path, capsys):
    one = run_of(tmp_path / "a")
    two = run_of(tmp_path / "b", "torch", losses=(4, 3.5, 2), validation=((2, 3.25), (4, 2.05)))
    out, png = tmp_path / "curves.json", tmp_path / "curves.png"
    assert main(["curves", str(one), str(two), "--json", str(out), "--png", str(png)]) == 0
    found = json.loads(out.read_text())
    held_out = split(byte_tokens(default_text()), length=16)[1].tobytes()
    assert found["compressors"]["gzip -9"] == 8 * len(gzip.compress(held_out, 9)) / len(held_out)
    assert found["compressors"]["bz2 -9"] == 8 * len(bz2.compress(held_out)) / len(held_out)
    assert 1.9 < found["compressors"]["bz2 -9"] < found["compressors"]["gzip -9"] < 2.3
    assert found["runs"]["torch"]["bits"] == pytest.approx(2.05) and found["runs"]["torch"]["updates"] == 3
    assert found["runs"]["numpy"]["below"] == {"gzip -9": 4, "bz2 -9": 4}
    assert found["runs"]["torch"]["below"] == {"gzip -9": 4, "bz2 -9": None}
    far = found["apart"]["torch"]
    assert far["updates"] == 3 and far["early"] == pytest.approx(HALF) and far["bits"] == pytest.approx(1.05)
    assert far["loss"] == pytest.approx(HALF / 3)
    assert far["differing"] == [] and png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    printed = capsys.readouterr().out
    assert (
        "torch and numpy: 3 losses lie 1.2e-01 nats apart in the mean, the first 3 3.5e-01 at most" in printed
        and "never" in printed
    )


def test_a_dip_below_a_compressor_that_does_not_last_does_not_count(tmp_path):
    run = run_of(tmp_path / "a", validation=((1, 1.0), (2, 3.0), (3, 1.5), (4, 1.4)))
    document = compared(named([read_run(run)]), {"none": 2.0})
    assert document["runs"]["numpy"]["below"] == {"none": 3} and document["apart"] == {}


def test_a_curve_is_cut_where_the_updates_between_are_another_runs():
    measured, losses = [(2, 1.0), (4, 2.0), (8, 3.0), (9, 4.0)], [(step, 0.0) for step in (1, 2, 3, 4, 7, 8, 9)]
    assert pieces(measured, losses) == [measured[:2], measured[2:]]
    assert pieces(measured, [(step, 0.0) for step in range(1, 10)]) == [measured]


def test_runs_of_one_backend_are_called_by_their_folders_and_their_differing_settings_are_said(tmp_path, capsys):
    one, two = run_of(tmp_path / "a"), run_of(tmp_path / "b", lr=2e-3, seed=1)
    assert main(["curves", str(one), str(two)]) == 0
    assert "(their lr, seed differ)" in capsys.readouterr().out.replace("\n", " ")
    assert list(named([read_run(one), read_run(two)])) == [str(one), str(two)]


def test_a_run_of_token_ids_has_no_compressor(tmp_path, capsys):
    assert main(["curves", str(run_of(tmp_path / "a", data="ids.npy", digest="x")), "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["compressors"] == {} and found["unit"] == "token"


def _other_text(folder):
    return [run_of(folder / "a"), run_of(folder / "b", "torch", digest="another")]


def _changed_text(folder):
    (folder / "text.txt").write_text("abc" * 300)
    return [run_of(folder / "a", text=str(folder / "text.txt"))]


def _no_run(folder):
    return [folder]


def _damaged(folder):
    (run_of(folder / "a") / "run.json").write_text("{")
    return [folder / "a"]


REFUSED = {
    "another text": (_other_text, "b was trained on another text than"),
    "a text that has changed": (_changed_text, "its digest differs"),
    "no folder": (lambda folder: [folder / "none"], "none does not exist"),
    "no run": (_no_run, "is no training run: it lacks run.json"),
    "a damaged one": (_damaged, "run.json is damaged"),
    "never measured": (lambda folder: [run_of(folder / "a", validation=())], "4 updates and 0 measurements"),
    "twice the same": (lambda folder: [run_of(folder / "a")] * 2, "runs must differ"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_pair_of_runs_is_refused_in_one_line(case, tmp_path, capsys):
    make, phrase = REFUSED[case]
    assert main(["curves", *map(str, make(tmp_path))]) == 2
    error = capsys.readouterr().err
    assert error.startswith("conformance curves: ") and error.count("\n") == 1 and phrase in error
