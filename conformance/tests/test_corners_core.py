"""Corners of the reference and the contract that the other tests pass by: what is refused there, and what is kept."""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest

import core_numpy as C
from core_numpy import gradients
from core_numpy.contract.checkpoints import read_checkpoint
from core_numpy.contract.data import default_text
from core_numpy.contract.files import load_params, save_params

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
