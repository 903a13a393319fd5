"""Programs of JAX: generation and compiled steps are compiled once for all lengths of a bucket."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")

import jax.numpy as jnp  # noqa: E402

import backend_jax as B  # noqa: E402
from backend_jax import cache as own  # noqa: E402
from conformance.tests.models_core import config_of  # noqa: E402


@pytest.fixture
def programs():
    """How many programs generation has compiled since the test began: (prompts, loops)."""
    before = (own._read._cache_size(), own._continue._cache_size())
    return lambda: (own._read._cache_size() - before[0], own._continue._cache_size() - before[1])


def test_generation_compiles_once_for_all_lengths_of_a_bucket(programs):
    model = B.Transformer(config_of("rotary-part", max_length=64, window=(3, 0)))
    rng = np.random.default_rng(0)
    for length, new in ((3, 5), (7, 1), (12, 9), (1, 20), (20, 12)):
        out = B.generate(model, jnp.asarray(rng.integers(0, 11, (2, length))), max_new=new)
        assert out.shape == (2, length + new)
    assert programs() == (1, 1)
    other = B.Transformer(model.config, seed=1)  # other weights, the same program
    B.generate(other, jnp.asarray(rng.integers(0, 11, (2, 5))), max_new=3)
    assert programs() == (1, 1)


def test_temperatures_and_keys_share_a_program(programs):
    model = B.Transformer(config_of("plain", max_length=32))
    prompt = jnp.zeros((1, 4), jnp.int32)
    for seed, heat, top_p in ((1, 0.5, 0.9), (2, 0.7, 0.8), (3, 1.5, 0.3)):
        B.generate(model, prompt, max_new=4, temperature=heat, top_p=top_p, key=B.key(seed))
    assert programs() == (1, 1)


def test_buckets_hold_their_lengths_and_waste_less_than_half():
    sizes = [own._bucket(n) for n in range(1, 3000)]
    assert all(size >= n and size == own._bucket(size) for n, size in enumerate(sizes, 1))
    assert all(size < 1.5 * n for n, size in enumerate(sizes, 1) if n > 32)
    assert sorted(set(sizes))[:6] == [32, 48, 64, 96, 128, 192]


@pytest.mark.parametrize("window", [None, (3, 0)])
def test_a_compiled_step_takes_a_cache_and_gives_it_back(window):
    """Twelve steps, one program, and the numbers of the full pass."""
    config = config_of("rotary-part", max_length=16, window=window)
    model, cache = B.Transformer(config), B.KVCache(config, 2)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 11, (2, 12)))
    traced = []

    @nnx.jit
    def step(model, tokens, cache):
        traced.append(tokens.shape)
        return model(tokens, cache=cache), cache

    parts = []
    for n in range(12):
        logits, cache = step(model, tokens[:, n : n + 1], cache)
        parts.append(logits)
    assert traced == [(2, 1)] and cache.length == 12 and isinstance(cache.length, int)
    assert np.abs(jnp.concatenate(parts, axis=1) - model(tokens)).max() < 1e-5
    with pytest.raises(ValueError, match="cache must have room for 5 more positions; got 12 of 16"):
        model(tokens[:, :5], cache=cache)
