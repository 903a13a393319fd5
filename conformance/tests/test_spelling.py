"""Misspelt arguments of a target: said, each function's in one sentence."""

import json
import types

import pytest

import core_numpy
from conformance.__main__ import main
from conformance.spelling import misspelt


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
def test_a_misspelt_argument_is_said_with_the_one_that_was_meant(arguments, said):
    names = {}
    exec(f"def attention(q, k, v, *, {arguments}): pass", names)
    assert misspelt(types.SimpleNamespace(attention=names["attention"])) == ([f"attention {said}"] if said else [])


@pytest.mark.parametrize("argument", ["lengths", "kv_lengths"])
def test_a_run_says_it_in_one_line_and_in_its_document(argument, tmp_path, monkeypatch, capfd):
    """It would only be "not offered", which is no failure and easily overlooked."""
    name = f"takes_{argument}"
    (tmp_path / f"{name}.py").write_text(
        f"def attention(q, k, v, *, {argument}=None):\n    raise NotImplementedError\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    main(["run", name, "--case", "attention-square", "--jobs", "1", "--json", "found.json"])
    captured = capfd.readouterr()
    said = ["attention takes lengths, which is no argument of the contract; did you mean kv_lengths?"]
    said = said if argument == "lengths" else []
    lines = [line for line in captured.err.splitlines() if "of the contract" in line]
    assert lines == [f"conformance run: {name}: {one}" for one in said]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["targets"][name].get("notes", []) == said
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
