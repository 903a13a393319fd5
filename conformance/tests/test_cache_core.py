"""Caches and generation of `core_numpy`: step by step equals one pass, and draws are those of the numbered keys."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.tests.models_core import B, T, batch_of, config_of, make
from core_numpy import KVCache, ModelConfig, Transformer, generate, get_params, set_params
from core_numpy.random import categorical, fold_in, key

CACHED = ["plain", "grouped", "qk-norm", "rotary-part", "alibi", "relative", "windows", "sinks", "sinusoidal",
          "no-positions", "parallel-shared", "encoder-decoder-shared"]  # fmt: skip


@pytest.mark.parametrize("name", CACHED)
def test_steps_with_a_cache_equal_one_pass(name):
    config = config_of(name)
    model, batch = make(config), batch_of(config)
    call = {n: x for n, x in batch.items() if n in ("context", "context_lengths")}
    full = model(batch["tokens"], **call)
    cache = KVCache(config, B, 6, dtype="float64")
    parts = [model(batch["tokens"][:, a:b], cache=cache, **call) for a, b in ((0, 2), (2, 3), (3, 5))]
    assert cache.length == T
    np.testing.assert_allclose(np.concatenate(parts, axis=1), full, rtol=0, atol=1e-12)


def test_a_full_cache_refuses_more_and_is_left_as_it_was():
    config = config_of("plain")
    model, tokens = make(config), batch_of(config)["tokens"]
    cache = KVCache(config, B, 4, dtype="float64")
    model(tokens[:, :3], cache=cache)
    before = cache.keys[0].copy()
    with pytest.raises(ValueError, match="cache must have room for 2 more positions; got 3 of 4 filled"):
        model(tokens[:, :2], cache=cache)
    np.testing.assert_array_equal(cache.keys[0], before)
    assert cache.length == 3


def test_positions_past_the_learned_table_are_refused():
    model = make(config_of("plain"))
    with pytest.raises(ValueError, match=r"tokens must end at or before max_length \(8\)"):
        model(np.zeros((1, 9), int))
    cache = KVCache(model.config, 1, 20, dtype="float64")
    model(np.zeros((1, 8), int), cache=cache)
    with pytest.raises(ValueError, match="got 9 positions, 8 of them in the cache"):
        model(np.zeros((1, 1), int), cache=cache)
    with pytest.raises(ValueError, match=r"max_new must be at most 6: the learned table has max_length=8 .*; got 7"):
        generate(model, np.zeros((1, 3), int), max_new=7)
    assert generate(model, np.zeros((1, 3), int), max_new=6).shape == (1, 9)  # the last one is never read
    with pytest.raises(ValueError, match="positions must be from 0 to 7"):
        model(np.zeros((1, 2), int), positions=np.array([0, 8]))


def test_frequencies_that_change_with_the_length_refuse_a_longer_cache():
    with pytest.raises(ValueError, match=r"capacity must be at most original_max_length \(4\)"):
        KVCache(config_of("rotary-longrope"), 1)
    assert KVCache(config_of("rotary-longrope"), 1, 4).capacity == 4


def test_greedy_generation_takes_the_likeliest_of_a_full_pass():
    config = config_of("plain")
    model, tokens = make(config), batch_of(config)["tokens"][:, :3]
    out = generate(model, tokens, max_new=4)
    assert out.shape == (B, 7) and out.dtype == tokens.dtype
    expected = tokens
    for _ in range(4):
        expected = np.concatenate([expected, model(expected)[:, -1:].argmax(-1)], axis=1)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(generate(model, tokens, max_new=0), tokens)


@pytest.mark.parametrize("name", ["plain", "rotary-part", "alibi", "relative", "windows"])
def test_a_shorter_prompt_continues_as_it_does_alone(name):
    model = make(config_of(name, max_length=16))
    tokens, lengths = batch_of(model.config)["tokens"], np.array([5, 2, 3])
    out = generate(model, tokens, max_new=4, lengths=lengths)
    np.testing.assert_array_equal(out[:, :T], tokens)
    for row, n, new in zip(tokens, lengths, out[:, T:], strict=True):
        np.testing.assert_array_equal(generate(model, row[None, :n], max_new=4)[0, n:], new)


def test_sampling_draws_with_the_numbered_key_from_what_is_left():
    config = config_of("no-positions")
    model, tokens = make(config), batch_of(config)["tokens"]
    z = model(tokens)[:, -1].astype(np.float32) / np.float32(0.5)
    out = generate(model, tokens, max_new=1, temperature=0.5, key=key(3))
    np.testing.assert_array_equal(out[:, -1], categorical(fold_in(key(3), 0), z))
    best = z.argmax(-1)
    np.testing.assert_array_equal(generate(model, tokens, max_new=1, temperature=5, top_k=1, key=key(3))[:, -1], best)
    np.testing.assert_array_equal(
        generate(model, tokens, max_new=1, temperature=5, top_p=1e-6, key=key(3))[:, -1], best
    )
    third = np.sort(z, axis=-1)[:, -3, None]
    for seed in range(20):
        drawn = generate(model, tokens, max_new=1, temperature=9, top_k=3, key=key(seed))[:, -1]
        assert (z[np.arange(B), drawn] >= third[:, 0]).all()


def test_top_p_keeps_the_shortest_list_that_reaches_it():
    """One token in, logits log(0.5, 0.3, 0.2) out: 0.5 keeps one, 0.6 two, 0.81 three."""
    model = Transformer(
        ModelConfig(vocab=3, width=2, heads=1, layers=0, positions="none", final_norm=False), dtype="float64"
    )
    params = {name: np.zeros_like(p) for name, p in get_params(model).items()}
    params["embedding.weight"][:, 0] = 1.0
    params["head.weight"][0] = np.log([0.3, 0.5, 0.2])
    set_params(model, params)
    tokens = np.zeros((200, 1), int)
    for top_p, kept in ((0.4, {1}), (0.6, {0, 1}), (0.81, {0, 1, 2}), (1.0, {0, 1, 2})):
        out = generate(model, tokens, max_new=1, temperature=1, top_p=top_p, key=key(1))
        assert set(out[:, -1]) == kept


def test_an_encoder_decoder_generates_from_its_source():
    config = config_of("encoder-decoder")
    model, batch = make(config), batch_of(config)
    call = {"context": batch["context"], "context_lengths": batch["context_lengths"]}
    expected = batch["tokens"][:, :2]
    for _ in range(3):
        expected = np.concatenate([expected, model(expected, **call)[:, -1:].argmax(-1)], axis=1)
    np.testing.assert_array_equal(generate(model, batch["tokens"][:, :2], max_new=3, **call), expected)
