"""Decoding and padding see the positions of a full pass: the same tables to the bit, the same logits to rounding."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

LENGTH, WIDTH = 7, 12
PACKAGES = [("core_numpy", "numpy"), ("backend_torch", "torch"), ("backend_jax", "jax")]


def package(name: str, framework: str):
    pytest.importorskip(framework)
    from conformance.targets import load

    return importlib.import_module(name), load(name)


@pytest.mark.parametrize(("name", "framework"), PACKAGES)
def test_a_step_has_the_tables_of_its_place_in_the_full_pass_to_the_bit(name, framework):
    B, target = package(name, framework)
    with target.scope("float64"):
        frequencies, factor = B.rotary_frequencies(WIDTH, base=500.0)
        whole = np.arange(LENGTH, dtype=np.int32)
        full = [target.numpy(x) for x in B.rotary_tables(target.native(whole), frequencies, attention_factor=factor)]
        waves = target.numpy(B.sinusoidal_encoding(target.native(whole), WIDTH, dtype="float64"))
        assert full[0].dtype == waves.dtype == np.float64
        for step in range(LENGTH):
            place = target.native(np.array([step], dtype=np.int32))
            for one, all_of_them in zip(B.rotary_tables(place, frequencies), full, strict=True):
                assert np.array_equal(target.numpy(one)[0], all_of_them[step])
            assert np.array_equal(target.numpy(B.sinusoidal_encoding(place, WIDTH, dtype="float64"))[0], waves[step])


@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary", "alibi", "relative"])
@pytest.mark.parametrize(("name", "framework"), PACKAGES[:2])
def test_a_left_padded_row_gives_the_logits_of_the_row_alone(name, framework, positions):
    B, target = package(name, framework)
    config = B.ModelConfig(vocab=11, width=WIDTH, heads=3, head_dim=4, layers=2, max_length=16, positions=positions)
    model = B.Transformer(config, seed=3, dtype="float64")
    if framework == "torch":
        model.eval()
    padding = np.array([[False, False, True, True, True], [True, True, True, True, True]])
    tokens = np.array([[0, 0, 4, 9, 2], [1, 2, 3, 4, 5]], dtype=np.int32)
    places = B.positions_from_mask(target.native(padding))
    segments = target.native(np.where(padding, 0, -1).astype(np.int32))
    # A distance between columns is a distance between positions, whichever side is padded.
    given = {} if positions in ("alibi", "relative") else {"positions": places}
    padded = target.numpy(model(target.native(tokens), segments=segments, **given))
    alone = target.numpy(model(target.native(tokens[:1, 2:])))
    np.testing.assert_allclose(padded[0, 2:], alone[0], rtol=1e-11, atol=1e-13)
    if positions in ("learned", "sinusoidal"):
        shifted = target.numpy(model(target.native(tokens), segments=segments))
        assert np.abs(shifted[0, 2:] - alone[0]).max() > 1e-6


@pytest.mark.parametrize("width", [8, 9])
def test_the_concatenated_layout_is_that_of_marian(width):
    marian = pytest.importorskip("transformers.models.marian.modeling_marian")
    import core_numpy

    theirs = marian.MarianSinusoidalPositionalEmbedding(6, width)
    theirs.weight.data = theirs.create_weight()
    ours = core_numpy.sinusoidal_encoding(np.arange(6), width, layout="concatenated")
    np.testing.assert_allclose(theirs.weight.detach().numpy(), ours, rtol=1e-6, atol=1e-7)
