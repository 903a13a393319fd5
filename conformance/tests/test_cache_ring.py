"""Caches of the three packages: rings where a window ends what is seen, sources read once, programs compiled once."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from conformance.tests.models_core import config_of, make
from conformance.tests.three import PACKAGES, back, load, to, wide
from core_numpy import get_params

T = 13


def model_of(package, config):
    """The package's model in float64 with random parameters, and the reference's."""
    reference, B = make(config), load(package)
    if package == "core_numpy":
        return reference, reference
    model = B.Transformer(config, dtype="float64")
    B.set_params(model, get_params(reference))
    return model.eval() if package == "backend_torch" else model, reference


# Uncompiled calls of JAX compile each operation for each shape: one configuration by default.
RINGS = [
    pytest.param(package, name, marks=[pytest.mark.slow] if package == "backend_jax" and name != "alibi" else [])
    for package in PACKAGES
    for name in ("grouped", "alibi", "rotary-part")
]
SOURCES = [
    pytest.param(package, name, marks=[pytest.mark.slow] if package == "backend_jax" and "shared" in name else [])
    for package in PACKAGES
    for name in ("encoder-decoder", "encoder-decoder-shared")
]


@pytest.mark.parametrize(("package", "name"), RINGS)
def test_a_window_keeps_its_last_positions_and_every_step_is_the_full_pass(package, name):
    """Two rings of 3 and 6 slots and a layer without; single steps and chunks past the wrap, masks, lengths, maps."""
    config = config_of(name, max_length=16, layers=3, layer_windows=((2, 0), None, (5, 1)))
    tokens = np.random.default_rng(0).integers(0, 11, (2, T))
    mask, lengths = np.ones((2, 1, T, T), bool), np.array([13, 11])
    mask[0, 0, :, 3] = mask[1, :, :, :2] = False
    with wide(package):
        model, reference = model_of(package, config)
        full = reference(tokens, mask=mask, kv_lengths=lengths)
        maps = reference.attention_maps(tokens, mask=mask, kv_lengths=lengths)
        cache, start = load(package).KVCache(config, 2, dtype="float64"), 0
        assert [k.shape[2] for k in cache.keys] == [v.shape[2] for v in cache.values] == [3, 16, 6]
        for size in (4, 1, 1, 4, 1, 1, 1):  # T in all
            end = start + size
            seen = {"mask": mask[:, :, start:end, :end], "kv_lengths": np.minimum(lengths, end)}
            here = to(package, {"mask": seen["mask"].copy(), "kv_lengths": seen["kv_lengths"]})
            row = to(package, tokens[:, start:end])
            if size == 4:
                got = model.attention_maps(row, cache=copy.deepcopy(cache), **here)
                for mine, theirs in zip(got, maps, strict=True):
                    np.testing.assert_allclose(back(mine), theirs[:, :, start:end, :end], rtol=0, atol=1e-12)
            got = back(model(row, cache=cache, **here))
            np.testing.assert_allclose(got, full[:, start:end], rtol=0, atol=1e-12)
            start = end
        assert cache.length == T


@pytest.mark.parametrize("package", PACKAGES)
def test_steps_past_the_wrap_without_restrictions_are_the_full_pass(package):
    config = config_of("rotary-part", max_length=16, window=(3, 0))
    tokens = np.random.default_rng(1).integers(0, 11, (2, T))
    with wide(package):
        model, reference = model_of(package, config)
        cache = load(package).KVCache(config, 2, dtype="float64")
        parts = [back(model(to(package, tokens[:, n : n + 1]), cache=cache)) for n in range(T)]
        np.testing.assert_allclose(np.concatenate(parts, axis=1), reference(tokens), rtol=0, atol=1e-12)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_ring_is_not_taken_back_and_a_part_of_a_model_with_layer_windows_has_none(package):
    B = load(package)
    config = config_of("plain", max_length=16, window=(2, 0))
    model, cache = B.Transformer(config), B.KVCache(config, 1)
    tokens = to(package, np.zeros((1, 4), np.int64))
    model(tokens, cache=cache)
    cache.length = 2
    with pytest.raises(ValueError, match="cache must not be taken back from 4 positions to 2"):
        model(tokens, cache=cache)
    config = config_of("windows")
    x = to(package, np.zeros((1, 2, config.width), np.float32))
    with pytest.raises(ValueError, match="cache must be None for a part made from a ModelConfig with layer_windows"):
        B.Block(config)(x, cache=B.KVCache(config, 1))
    block, own = B.Block(config.block(0)), B.KVCache(config.block(0), 1, 8)
    assert tuple(block(x, cache=own).shape) == (1, 2, config.width) and own.keys[0].shape[2] == 2


@pytest.mark.parametrize(("package", "name"), SOURCES)
def test_a_source_is_read_once_and_another_one_is_refused(package, name, monkeypatch):
    config = config_of(name)
    rng = np.random.default_rng(0)
    tokens, source, lengths = rng.integers(0, 11, (3, 5)), rng.integers(0, 11, (3, 7)), np.array([7, 2, 4])
    with wide(package):
        model, reference = model_of(package, config)
        want = reference(tokens, context=source, context_lengths=lengths)
        call = to(package, {"context": source, "context_lengths": lengths})
        cache, counts, encode = load(package).KVCache(config, 3, dtype="float64"), [], model.encode
        monkeypatch.setattr(model, "encode", lambda *a, **k: counts.append(1) or encode(*a, **k))
        parts = [
            back(model(to(package, tokens[:, a:b]), cache=cache, **call)) for a, b in ((0, 2), (2, 3), (3, 4), (4, 5))
        ]
        np.testing.assert_allclose(np.concatenate(parts, axis=1), want, rtol=0, atol=1e-12)
        assert len(counts) == 1
        other = load(package).KVCache(config, 3, dtype="float64")
        model(to(package, tokens[:, :2]), cache=other, **call)
        for wrong, word in (
            ({**call, "context": to(package, source[:, ::-1].copy())}, "context"),
            ({**call, "context_lengths": to(package, lengths - 1)}, "context_lengths"),
            ({"context": call["context"]}, "context_lengths"),
        ):
            with pytest.raises(ValueError, match=f"^{word} must be what the cache was begun with"):
                model(to(package, tokens[:, 2:3]), cache=other, **wrong)
        assert other.length == 2
