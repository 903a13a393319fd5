"""`conformance race --devices N --positions T`: its figures on paper, what it refuses, and one of each framework."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path

import pytest

from conformance import race
from conformance.race import long
from conformance.race.pictures import draw
from conformance.race.process import WorkerFailed
from conformance.race.table import as_text


def document(**failed) -> dict:
    """A whole that holds 100 MB, of which 60 grow, and two processes with 70 and 30."""
    rows = [
        {"contestant": "torch", "devices": 1, "status": "measured", "held": 100_000_000, "grows": 60_000_000,
         "apart": 0.0, "seconds": 2.0},
        {"contestant": "torch", "devices": 2, "status": "measured", "held": 70_000_000, "grows": 30_000_000,
         "apart": 1e-6, "seconds": 1.5} | failed,
    ]  # fmt: skip
    return {"schema": 2, "environment": {"processor": "p"}, "races": [], "interrupted": False,
            "long": {"positions": 4096, "heads": 1, "size": 64, "rows": rows}}  # fmt: skip


def test_shares_are_those_on_paper_beside_the_ideal_one():
    whole, two = long.long_cells(document())
    assert whole == ("torch", "1", "100", "1.00", "60", "1.00", "1.00", "2.0", "")
    assert two == ("torch", "2", "70", "0.70", "30", "0.50", "0.50", "1.5", "1.0e-06")
    assert "causal attention over 4,096 positions" in as_text(document())


def test_who_failed_is_said_and_the_others_are_drawn(tmp_path):
    found = document(status="failed", reason="process 1 of 2: it died")
    assert "torch, 2 processes: failed: process 1 of 2: it died" in as_text(found)
    draw(found, tmp_path / "long.png")
    assert (tmp_path / "long.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("words", "phrase"),
    [
        (["--positions", "4096"], "--positions are of --devices, which was not given"),
        (["--devices", "3", "--positions", "4096"], "must be a power of two from 2 to 16"),
        (["--devices", "32", "--positions", "4096"], "8 for each of the processors here (2); got 32"),
        (["--devices", "4", "--positions", "4100"], "positions must be a multiple of 4 x devices (16)"),
        (["--devices", "4", "--positions", "0"], "got 0"),
        (["--devices", "2", "--positions", "64", "--with", "torch,numpy"], "--positions measures torch and jax; got n"),
        (["--devices", "2", "--positions", "64", "--layout", "data"], "it does not go with --layout"),
        (["--devices", "2", "--positions", "64", "--precision", "bfloat16"], "it does not go with --precision"),
        (["--devices", "2", "--positions", "64", "--sweep", "length"], "goes with neither --sweep nor --profile"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anybody_starts(words, phrase, monkeypatch, capsys):
    monkeypatch.setattr(long, "cores", lambda: 2)
    monkeypatch.setattr(long, "MEMORY", Path(sys.executable))
    monkeypatch.setattr(long, "measured", None)
    assert race.main(words) == 2
    assert phrase in capsys.readouterr().err


def test_a_system_that_does_not_tell_the_peak_of_memory_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(long, "MEMORY", tmp_path / "clear_refs")
    with pytest.raises(ValueError, match="which this system does not have"):
        long.check_long(2, 64, ["torch"])


def test_a_process_that_fails_ends_the_others_and_its_last_words_are_said():
    dies = ["-c", "raise SystemExit('no room')"]
    began = time.monotonic()
    with pytest.raises(WorkerFailed, match="process 1 of 2: no room"):
        long._finish([["-c", "import time; time.sleep(300)"], dies], {}, 60.0)
    with pytest.raises(WorkerFailed, match=r"no end within 0\.2 s"):
        long._finish([["-c", "import time; time.sleep(300)"]], {}, 0.2)
    assert time.monotonic() - began < 60


def test_results_that_are_apart_disqualify_and_without_the_whole_nobody_is_measured(monkeypatch, capsys, tmp_path):
    def wrong(name, count, lengths, pieces, folder, timeout):
        return {"held": 10, "grows": 5, "seconds": 1.0, "apart": 0.0 if count == 1 else 1e-3}

    monkeypatch.setattr(long, "measured", wrong)
    monkeypatch.setattr(long, "MEMORY", tmp_path)
    assert race.main(["--devices", "2", "--positions", "64", "--with", "torch"]) == 1
    assert "disqualified: apart from the whole by 1.0e-03" in capsys.readouterr().out

    def dead(*arguments):
        raise WorkerFailed("it died")

    monkeypatch.setattr(long, "measured", dead)
    found = long.long(4, 64, ["torch", "jax"], timeout=1.0, say=lambda text: None)["long"]["rows"]
    assert [(row["contestant"], row["devices"], row["reason"]) for row in found] == [
        ("torch", 1, "it died"), ("jax", 1, "it died"),
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not long.MEMORY.exists(), reason="the peak of memory is read from /proc")
@pytest.mark.parametrize("name", ["torch", "jax"])
def test_attention_over_65536_positions_on_several_processes_is_the_whole_with_its_share_of_memory(
    name, tmp_path, capsys
):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    out = tmp_path / "memory.json"
    status = race.main(["--devices", "4", "--positions", "65536", "--with", name, "--json", str(out)])
    assert status == 0, capsys.readouterr()
    rows = {row["devices"]: row for row in json.loads(out.read_text())["long"]["rows"]}
    assert rows.keys() == {1, 2, 4} and max(row["apart"] for row in rows.values()) <= long.TOLERANCE
    for count in (2, 4):
        # Beyond a share what travels, by shares of a few thousand positions, which more processes do not make fewer.
        assert rows[count]["grows"] <= 1.5 / count * rows[1]["grows"], rows
        assert rows[count]["held"] < rows[count // 2]["held"], rows
