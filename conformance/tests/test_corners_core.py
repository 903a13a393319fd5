"""Corners of the reference and the contract that the other tests pass by: what is refused there, and what is kept."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import core_numpy as C
from core_numpy import gradients
from core_numpy.contract import checkpoints, shards, tensor_file, training_run
from core_numpy.contract.checkpoints import read_checkpoint
from core_numpy.contract.cli import main
from core_numpy.contract.data import default_text
from core_numpy.contract.files import load_config, load_params, save_params
from core_numpy.contract.run_log import read_curve
from core_numpy.contract.saving import whole

CONFIG = C.ModelConfig(vocab=5, width=4, heads=2, layers=1, max_length=6)
RNG = np.random.default_rng(0)


def test_an_rms_norm_without_a_weight_has_the_gradient_of_one_with_ones():
    x, grad = RNG.standard_normal((2, 3, 5)), RNG.standard_normal((2, 3, 5))
    alone = gradients.rms_norm_vjp(grad, x, None, eps=0.1)
    with_ones = gradients.rms_norm_vjp(grad, x, np.ones(5), eps=0.1)
    assert set(alone) == {"x"}
    np.testing.assert_array_equal(alone["x"], with_ones["x"])


def test_a_block_without_bias_and_context_has_no_gradient_of_them():
    block = C.Block(C.BlockConfig(width=6, heads=2), seed=1, dtype="float64")
    x, grad = RNG.standard_normal((2, 3, 6)), RNG.standard_normal((2, 3, 6))
    found = gradients.block_vjp(grad, block, x)
    assert set(found) == {"x", *C.get_params(block)}
    direction = RNG.standard_normal(x.shape)
    ends = [np.sum(grad * block(x + h * direction)) for h in (1e-5, -1e-5)]
    assert np.sum(found["x"] * direction) == pytest.approx((ends[0] - ends[1]) / 2e-5, abs=1e-7)


def test_attention_alone_with_a_cache_gives_piece_by_piece_what_it_gives_at_once():
    config = C.BlockConfig(width=6, heads=2, causal=True)
    layer, x = C.MultiHeadAttention(config, seed=1, dtype="float64"), RNG.standard_normal((2, 5, 6))
    cache = C.KVCache(config, 2, 5, dtype="float64")
    pieces = [layer(part, cache=cache) for part in (x[:, :2], x[:, 2:3], x[:, 3:])]
    assert cache.length == 5
    np.testing.assert_allclose(np.concatenate(pieces, 1), layer(x), rtol=0, atol=1e-13)


def test_a_checkpoint_that_cannot_be_replaced_stays(tmp_path, monkeypatch):
    trainer = C.Trainer(C.Transformer(CONFIG, seed=1), C.TrainConfig(batch=2))
    before = trainer.save(tmp_path)
    params = {name: x + 1 for name, x in C.get_params(trainer.model).items()}
    C.set_params(trainer.model, params)
    rename, refused = os.rename, []

    def refuse_once(source, target):
        if os.fspath(target) == os.fspath(before) and not refused:
            refused.append(source)
            raise OSError(28, "no space left")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse_once)
    with pytest.raises(OSError, match="older checkpoints are untouched"):
        trainer.save(tmp_path)
    assert len(refused) == 1 and sorted(path.name for path in tmp_path.iterdir()) == [before.name]
    found = read_checkpoint(tmp_path)
    for name, x in C.get_params(C.Transformer(CONFIG, seed=1)).items():
        np.testing.assert_array_equal(found.params[name], x)


def test_a_checkpoint_file_of_another_size_is_named_with_both_sizes(tmp_path):
    path = C.Trainer(C.Transformer(CONFIG), C.TrainConfig(batch=2)).save(tmp_path)
    with open(path / "model.safetensors", "ab") as file:
        file.write(b"more")
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged: \d+ bytes where \d+ were written"):
        read_checkpoint(path)


REFUSED = {
    "train_config": (lambda path: read_checkpoint(path, train_config=3), TypeError, "train_config must be a"),
    "model_config": (lambda path: read_checkpoint(path, model_config=3), TypeError, "model_config must be a"),
    "config": (lambda path: save_params(path / "x.safetensors", {}, config=3), TypeError, "config must be a Model"),
    "metadata": (
        lambda path: save_params(path / "x.safetensors", {}, config=CONFIG, metadata={"config": "x"}),
        ValueError, "metadata must not have the key 'config'",
    ),
    "from_dict": (lambda path: C.ModelConfig.from_dict([1]), TypeError, "from_dict expects a dict; got list"),
    "window": (lambda path: C.BlockConfig(width=4, heads=2, window=(True, 1)), TypeError, "window must be None or"),
    "negative window": (lambda path: C.BlockConfig(width=4, heads=2, window=(-1, 1)), ValueError, "window must be"),
    "fold_in": (lambda path: C.fold_in(C.key(0), np.arange(2)), ValueError, "data must be one integer"),
    "bernoulli's shape": (lambda path: C.bernoulli(C.key(0), np.ones((3, 2)), (2,)), ValueError, "p must b"),
    "bernoulli's p": (lambda path: C.bernoulli(C.key(0), np.array(2.0), (2,)), ValueError, "p must hold numbers"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_sense_is_refused_by_its_name(name, tmp_path):
    call, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        call(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_parameters_with_a_config_and_metadata_come_back(tmp_path):
    save_params(tmp_path / "x.safetensors", {"a": np.ones(2)}, config=CONFIG, metadata={"note": "n"})
    np.testing.assert_array_equal(load_params(tmp_path / "x.safetensors")["a"], np.ones(2))


def test_a_python_without_the_default_text_says_what_to_give(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ValueError, match=r"ships without pydoc_data.*give one with --text"):
        default_text()


def test_a_checkpoint_whose_manifest_lacks_what_is_needed_says_so(tmp_path):
    path = C.Trainer(C.Transformer(CONFIG), C.TrainConfig(batch=2)).save(tmp_path)
    document = json.loads((path / "checkpoint.json").read_text())
    for name in ("files", "tensors", "step", "config"):
        lacking = {key: x for key, x in document.items() if key not in (name, "digest")}
        (path / "checkpoint.json").write_bytes(checkpoints._render(lacking))
        with pytest.raises(ValueError, match=rf"checkpoint\.json does not say what a checkpoint needs: '{name}'"):
            read_checkpoint(path)


def test_a_process_that_may_not_be_asked_is_alive_as_all_are_where_no_one_can_be(monkeypatch):
    def refuse(pid, number):
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(checkpoints.os, "kill", refuse)
    assert checkpoints._alive(1)
    monkeypatch.setattr(checkpoints.os, "name", "nt")
    monkeypatch.setattr(checkpoints.os, "kill", None)  # there it would be a signal
    assert checkpoints._alive(1)


def test_a_directory_is_not_flushed_where_renames_need_it_not(monkeypatch, tmp_path):
    def never(*arguments):
        raise AssertionError("opened")

    monkeypatch.setattr(tensor_file.os, "open", never)
    with pytest.raises(AssertionError):
        tensor_file.flush_directory(tmp_path)
    monkeypatch.setattr(tensor_file.os, "name", "nt")
    tensor_file.flush_directory(tmp_path)


def test_a_file_that_cannot_be_put_in_place_is_named_and_leaves_nothing(tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(OSError, match=r"cannot write .*there"):
        tensor_file.write_whole(tmp_path / "there", b"data")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_pickle_is_told_by_its_name_alone_and_metadata_are_words(tmp_path):
    (tmp_path / "weights.pt").write_bytes(b"no pickle at all")
    with pytest.raises(ValueError, match="pickle"):
        load_params(tmp_path / "weights.pt")
    with pytest.raises(TypeError, match=r"metadata must be a dict of strings to strings; got \{'a': 1\}"):
        save_params(tmp_path / "x.safetensors", {"a": np.ones(1)}, metadata={"a": 1})


def test_a_config_in_a_file_that_is_none_is_refused(tmp_path):
    save_params(tmp_path / "x.safetensors", {"a": np.ones(1)}, config=CONFIG)
    assert load_config(tmp_path / "x.safetensors") == CONFIG
    for text in ("[1]", "{", '{"width": 3}'):
        data = tensor_file.encode_tensors("x", {"a": np.ones(1)}, {"config": text})
        (tmp_path / "y.safetensors").write_bytes(data)
        with pytest.raises(ValueError, match=r"y\.safetensors has a config in its metadata that is no ModelConfig"):
            load_config(tmp_path / "y.safetensors")


def test_a_piece_that_lies_outside_its_parameter_is_damage(tmp_path):
    whole = np.arange(6.0).reshape(2, 3)
    said = shards.write_shard(tmp_path, 0, {("params", "a"): [((1, 0), whole)]})  # two rows from the second on
    document = {"shards": {shards.shard_name(0): said}, "wholes": {"params": {"a": [2, 3]}}}
    with pytest.raises(ValueError, match=r"is damaged: its piece params/a\|1,0 does not fit into \(2, 3\)"):
        shards.read_shards(tmp_path, document)


def test_a_second_press_ends_a_block_at_once():
    begun = []
    with pytest.raises(KeyboardInterrupt), whole():
        signal.raise_signal(signal.SIGINT)
        begun.append("first")
        signal.raise_signal(signal.SIGINT)
        begun.append("second")
    assert begun == ["first"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_run_in_another_thread_is_not_interruptible():
    found = []

    def work():
        with training_run._interruptible() as event:
            found.append(event.is_set())

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [False] and signal.getsignal(signal.SIGINT) is before


def test_no_log_is_no_points(tmp_path):
    assert read_curve(tmp_path / "log.jsonl") == []


def test_a_trainers_own_checkpoint_asks_for_the_length(tmp_path, capsys):
    config = C.ModelConfig(vocab=256, width=4, heads=2, layers=1, max_length=8)
    C.Trainer(C.Transformer(config), C.TrainConfig(batch=2, steps=1)).save(tmp_path / "own")
    assert main(C, ["train", "--resume", str(tmp_path / "own"), "--steps", "2"]) == 2
    assert "was not written by this command line: give --length" in capsys.readouterr().err


def test_a_checkpoint_of_no_language_model_or_of_other_tokens_is_not_evaluated(tmp_path, capsys):
    fields = {"width": 4, "heads": 2, "layers": 1, "max_length": 8}
    classifier = C.ModelConfig(vocab=256, head="classifier", classes=2, **fields)
    words = C.ModelConfig(vocab=300, **fields)
    for name, config, said in [
        ("classes", classifier, "is no language model: expected a decoder with head='lm'"),
        ("words", words, "is no byte-level model: it has vocab=300"),
    ]:
        C.Trainer(C.Transformer(config), C.TrainConfig(batch=2)).save(tmp_path / name)
        assert main(C, ["evaluate", "--resume", str(tmp_path / name)]) == 2
        assert said in capsys.readouterr().err


def test_a_process_that_is_not_the_first_trains_without_a_word_or_a_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(C.Trainer, "first", False, raising=False)
    arguments = ["train", "--steps", "2", "--batch", "2", "--length", "8", "--out", str(tmp_path / "run")]
    assert main(C, arguments) == 0
    said = capsys.readouterr()
    assert "step" not in said.out + said.err
    assert not (tmp_path / "run" / "log.jsonl").exists()


@pytest.mark.parametrize("package", ["core_numpy", "backend_torch", "backend_jax"])
def test_a_package_is_a_program(package):
    pytest.importorskip({"core_numpy": "numpy", "backend_torch": "torch", "backend_jax": "flax"}[package])
    done = subprocess.run([sys.executable, "-m", package, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == C.__version__


@pytest.mark.parametrize("package", ["core_numpy", "backend_torch", "backend_jax"])
def test_a_process_that_imports_the_program_again_does_not_begin_it(package):
    """As the workers of `multiprocessing` do, under another name than `__main__`."""
    pytest.importorskip({"core_numpy": "numpy", "backend_torch": "torch", "backend_jax": "flax"}[package])
    assert importlib.import_module(f"{package}.__main__").main is main
