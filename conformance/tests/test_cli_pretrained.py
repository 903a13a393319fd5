"""`generate --model FOLDER`: somebody else's model writes from the command line, the same in three packages."""

from __future__ import annotations

import importlib
import json

import numpy as np
import pytest
from three import PACKAGES, load

from core_numpy.contract.cli import main

CONFIG = {"vocab": 11, "width": 24, "heads": 4, "kv_heads": 2, "layers": 1, "max_length": 16, "positions": "rotary",
          "norm": "rms", "activation": "swiglu", "attention_bias": False, "ffn_bias": False}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama whose next token depends on the last ones."""
    C = load("core_numpy")
    path = tmp_path_factory.mktemp("llama")
    model = C.Transformer(C.ModelConfig(**CONFIG), seed=3)
    rng = np.random.default_rng(1)
    C.set_params(model, {name: rng.standard_normal(x.shape).astype(np.float32)
                         for name, x in C.get_params(model).items()})  # fmt: skip
    model.save_pretrained(path)
    return path


def said(package, capsys, *arguments):
    code = main(load(package), ["generate", *map(str, arguments)])
    out = capsys.readouterr()
    return code, out.out.strip(), out.err


def test_the_three_write_the_same_tokens(folder, capsys):
    written = {package: said(package, capsys, "--model", folder, "--tokens", "1 2 3", "--max-new", 5, "--json")
               for package in PACKAGES}  # fmt: skip
    for code, out, _ in written.values():
        row = json.loads(out)
        assert code == 0 and row["tokens"][:3] == [1, 2, 3] and len(row["tokens"]) == 8
        assert row["text"] == " ".join(map(str, row["tokens"]))
    assert len({out for _, out, _ in written.values()}) == 1


def test_a_tokenizer_gives_the_prompt_its_ids(folder, capsys, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, **{name: i + 1 for i, name in enumerate(["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"])}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    arguments = ("--model", tmp_path, "a c", "--max-new", 4, "--temperature", 0, "--json")
    code, out, _ = said("core_numpy", capsys, *arguments)
    row = json.loads(out)
    assert code == 0 and row["tokens"][:2] == [1, 3]
    assert row["text"].split() == [next(w for w, i in words.items() if i == token) for token in row["tokens"]]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(("text",), "--tokens"), (("--tokens", "1 x"), "whole numbers"), (("--tokens", ""), "at least one"),
     (("--tokens", "11"), "vocabulary"), (("text", "--tokens", "1"), "both")],
)  # fmt: skip
def test_prompts_that_make_no_sense_are_refused(folder, capsys, arguments, word):
    code, _, error = said("core_numpy", capsys, "--model", folder, *arguments, "--max-new", 1)
    assert code == 2 and word in error


def test_a_model_that_cannot_write_is_refused(tmp_path, capsys):
    C = load("core_numpy")
    C.Transformer(C.ModelConfig(**CONFIG | {"head": "none"})).save_pretrained(tmp_path)
    code, _, error = said("core_numpy", capsys, "--model", tmp_path, "--tokens", "1")
    assert code == 2 and "head='none'" in error


def test_a_source_is_needed_and_one_alone(folder, capsys):
    parser = importlib.import_module("core_numpy.contract.cli").build_parser(load("core_numpy"))
    for arguments in (["generate"], ["generate", "--model", str(folder), "--resume", "x"]):
        with pytest.raises(SystemExit):
            parser.parse_args(arguments)
    capsys.readouterr()
