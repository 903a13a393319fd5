"""Misspelt arguments of a target: said, each function's in one sentence."""

import json
import types

import pytest

import core_numpy
from conformance.__main__ import main
from conformance.spelling import misspelt

MISSPELT = """
def attention(q, k, v, *, {arguments}):
    raise NotImplementedError
"""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("lengths=None", "takes lengths, which is no argument of the contract; did you mean kv_lengths?"),
        ("causal=False, is_casual=False", None),  # it has the right one
        ("is_casual=False", "takes is_casual, which is no argument of the contract; did you mean causal?"),
        (
            "sm_scale=None, attn_mask=None, dropout_p=0.0",
            "takes sm_scale, attn_mask and dropout_p, which are no arguments of the contract; "
            "did you mean scale, mask and dropout_rate?",
        ),
        ("block_size=64, training=False, cu_seqlens=None, num_warps=4", None),  # its own affair
        ("scale=None, kernel='auto', **others", None),
    ],
)
def test_a_misspelt_argument_is_said_in_one_line(arguments, said, tmp_path, monkeypatch, capfd):
    """It would only be "not offered", which is no failure and easily overlooked."""
    name = "misspelt_target"
    (tmp_path / f"{name}.py").write_text(MISSPELT.format(arguments=arguments))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    main(["run", name, "--case", "attention-square", "--jobs", "1", "--json", "found.json"])
    captured = capfd.readouterr()
    lines = [line for line in captured.err.splitlines() if "of the contract" in line]
    assert lines == ([f"conformance run: {name}: attention {said}"] if said else [])
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["targets"][name].get("notes", []) == ([f"attention {said}"] if said else [])
    assert "notes" not in found["environment"]["targets"][name] and "notes" not in captured.out


def softmax(x, *, axes):
    return x


def rms_norm(x, weight, *, epsilon):
    return x


def test_every_function_with_misspelt_arguments_has_its_sentence():
    assert misspelt(types.SimpleNamespace(softmax=softmax, rms_norm=rms_norm)) == [
        "softmax takes axes, which is no argument of the contract; did you mean axis?",
        "rms_norm takes epsilon, which is no argument of the contract; did you mean eps?",
    ]
    assert misspelt(core_numpy) == misspelt(None) == misspelt(object()) == []
