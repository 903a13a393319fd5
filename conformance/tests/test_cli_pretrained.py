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
    stored = json.loads((tmp_path / "tokenizer.json").read_text())
    stored["model"]["unk_token"] = "[NONE]"  # read without a word, and no word for "k" then
    for text, prompt in (('{"version": 1', "a c"), (json.dumps(stored), "a k")):
        (tmp_path / "tokenizer.json").write_text(text)
        code, _, error = said("core_numpy", capsys, *arguments[:2], prompt, *arguments[3:])
        assert code == 2 and "tokenizer.json is damaged: " in error and error.count("\n") == 1


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


def cut(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def lie(path):
    file = path / "model.safetensors"
    file.write_bytes((1 << 62).to_bytes(8, "little") + file.read_bytes()[8:])


def spoil(path):
    """A header that is no JSON."""
    file = path / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:8] + b"]" + data[9:])


def pickled(path):
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(b"\x80\x02K\x01.")


def fields(**changes):
    def change(path):
        file = path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


# What is done to a sound folder, and the words that the refusal must have.
BAD = {
    "no config": (lambda path: (path / "config.json").unlink(), ("config.json",)),
    "unknown family": (fields(model_type="mamba"), ("mamba", "gpt2", "llama", "t5")),
    "cut off": (cut, ("model.safetensors", "cut off")),
    "a length that lies": (lie, ("model.safetensors", "cut off")),
    "no header": (spoil, ("model.safetensors", "not a sound safetensors file")),
    "pickled": (pickled, ("pytorch_model.bin", "unpickling runs whatever code")),
    "another shape": (fields(vocab_size=12), ("embed_tokens.weight has shape (11, 24)", "(12, 24)")),
    "missing layers": (fields(num_hidden_layers=2), ("layers.1.mlp.down_proj.weight is missing",)),
}


def copy_of(folder, path):
    for each in folder.iterdir():
        (path / each.name).write_bytes(each.read_bytes())
    return path


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("package", PACKAGES)
def test_a_bad_folder_is_one_line_on_the_command_line(package, name, folder, tmp_path, capsys):
    change, words = BAD[name]
    change(copy_of(folder, tmp_path))
    code, out, error = said(package, capsys, "--model", tmp_path, "--tokens", "1 2", "--max-new", 1)
    assert code == 2 and out == ""
    assert "Traceback" not in error and len(error.strip().splitlines()) == 1
    assert all(word in error for word in words), error


@pytest.mark.parametrize("package", PACKAGES)
def test_a_folder_that_is_not_there_and_a_text_longer_than_the_model_are_one_line(package, tmp_path, capsys):
    """Longer than a table of positions; rotary ones go on for ever."""
    C = load("core_numpy")
    config = C.ModelConfig(
        vocab=11, width=6, heads=2, layers=1, max_length=5, activation="gelu_tanh", tie_embeddings=True
    )
    C.Transformer(config).save_pretrained(tmp_path / "gpt2", family="gpt2")
    for arguments, word in (
        (("--model", tmp_path / "nowhere", "--tokens", "1"), "nowhere does not exist"),
        (("--model", tmp_path / "gpt2", "--tokens", "1 2 3 4 5 6", "--max-new", 1), "max_length (5)"),
        (("--model", tmp_path / "gpt2", "--tokens", "1 2 3", "--max-new", 4), "max_length"),
    ):
        code, out, error = said(package, capsys, *arguments)
        assert code == 2 and out == "" and word in error
        assert "Traceback" not in error and len(error.strip().splitlines()) == 1


@pytest.mark.parametrize("package", PACKAGES)
def test_a_tensor_with_nan_is_named_on_the_command_line(package, folder, tmp_path, capsys):
    C = load("core_numpy")
    file = copy_of(folder, tmp_path) / "model.safetensors"
    stored = C.load_params(file)
    stored["model.norm.weight"][3] = np.nan
    C.save_params(file, stored)
    with pytest.warns(UserWarning, match=r"norm\.weight of .* holds NaN"):
        code = said(package, capsys, "--model", tmp_path, "--tokens", "1 2", "--max-new", 1)[0]
    assert code == 0
