"""`remat`: less memory, measured in each framework's own way, and the same gradients."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from three import PACKAGES, load

from core_numpy import ModelConfig, TrainConfig

MODEL = ModelConfig(vocab=32, width=32, heads=4, layers=12, max_length=64, positions="rotary", dropout=0.1)
TOKENS = np.random.default_rng(0).integers(0, 32, (4, 64))
BATCH = {"tokens": TOKENS, "targets": np.roll(TOKENS, -1, axis=1)}


def trainer(B, remat):
    return B.Trainer(B.Transformer(MODEL, seed=1), TrainConfig(steps=9, batch=4, remat=remat))


def numpy_bytes(B, remat):
    """The highest mark of memory during a step."""
    run = trainer(B, remat)
    run.step(BATCH)
    tracemalloc.start()
    try:
        run.step(BATCH)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def torch_bytes(B, remat):
    """What autograd keeps from the forward pass for the backward pass, parameters left out."""
    import torch

    run = trainer(B, remat)
    own = {p.untyped_storage().data_ptr() for p in run.model.parameters()}
    kept = {}

    def pack(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        run.step(BATCH)
    return sum(kept.values())


def jax_bytes(B, remat):
    """What XLA's plan of the compiled step needs beside parameters and moments."""
    run = trainer(B, remat)
    given = (run._together, run._state, run._arrays(BATCH), np.uint32(1), np.float32(1), np.float32(1))
    return run._program.step.lower(*given).compile().memory_analysis().temp_size_in_bytes


BYTES = {"core_numpy": numpy_bytes, "backend_torch": torch_bytes, "backend_jax": jax_bytes}


@pytest.mark.parametrize(
    "package", ["core_numpy", "backend_torch", pytest.param("backend_jax", marks=pytest.mark.slow)]
)
def test_recomputing_blocks_takes_less_memory(package):
    B = load(package)
    plain, less = (BYTES[package](B, remat) for remat in (False, True))
    print(f"{package}: {plain:,} bytes, with remat {less:,}")
    assert less < 0.5 * plain


@pytest.mark.parametrize(
    "package", ["core_numpy", "backend_torch", pytest.param("backend_jax", marks=pytest.mark.slow)]
)
def test_recomputing_blocks_gives_the_same_updates_dropout_included(package):
    B = load(package)
    plain, again = (trainer(B, remat) for remat in (False, True))
    for _ in range(2):
        one, two = plain.step(BATCH), again.step(BATCH)
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
    for name, x in B.get_params(plain.model).items():
        np.testing.assert_allclose(B.get_params(again.model)[name], x, rtol=0, atol=2e-5, err_msg=name)


def test_every_package_is_measured():
    assert set(BYTES) == set(PACKAGES)
