"""Blocks, models, caches and generation of `core_numpy`, every gradient against finite differences."""

from __future__ import annotations

import math

import numpy as np
import pytest

from conformance.tests.models_core import CONFIGS, B, T, batch_of, config_of, make
from core_numpy import (
    Block,
    BlockConfig,
    FeedForward,
    KVCache,
    MultiHeadAttention,
    Transformer,
    attention,
    cross_entropy,
    generate,
    get_params,
    gradients,
    loss_and_gradients,
    set_params,
    softmax,
)
from core_numpy.contract.parameters import block_parameters, model_parameters, name_hash
from core_numpy.encodings import alibi_bias, apply_rotary, relative_bias, rotary_frequencies, rotary_tables
from core_numpy.layers import drop
from core_numpy.random import fold_in, key, split, uniform


def loss_of(model, batch, *, dropout_key=None, **options):
    """The loss by way of the public call."""
    call = {"kv_lengths" if name == "lengths" else name: x for name, x in batch.items() if name != "targets"}
    return float(cross_entropy(model(**call, dropout_key=dropout_key), batch["targets"], **options))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_gradient_matches_differences(name):
    config = config_of(name)
    model, batch = make(config), batch_of(config)
    options = {"label_smoothing": 0.1, "z_loss": 0.01, "dropout_key": key(9) if config.dropout else None}
    loss, grads = loss_and_gradients(model, batch, **options)
    params = get_params(model)
    assert list(grads) == list(params) == list(model_parameters(config))
    # Short steps for relu: a difference across its corner has no derivative.
    rng, step = np.random.default_rng(1), 1e-6 if config.activation == "relu" else 5e-5
    for _ in range(3):
        direction = {one: rng.choice([-1.0, 1.0], p.shape) for one, p in params.items()}
        ends = []
        for times in (2, 1, -1, -2):
            set_params(model, {one: p + times * step * direction[one] for one, p in params.items()})
            ends.append(loss_of(model, batch, **options))
        # Four points: wrong by h^4 times the fifth derivative, and by the rounding, 1e-16 / h.
        expected = (ends[3] - 8 * ends[2] + 8 * ends[1] - ends[0]) / (12 * step)
        along = sum(float(np.sum(grads[one] * direction[one])) for one in params)
        assert along == pytest.approx(expected, rel=1e-8, abs=1e-9)
    set_params(model, params)
    assert loss == pytest.approx(loss_of(model, batch, **options), rel=1e-14)


def straightforward(p, c, tokens):
    """A GPT-2-like model written out anew with loops over rows and heads: pre-norm, learned positions, causal."""
    logits = np.zeros((*tokens.shape, c.vocab))
    size = c.width // c.heads

    def norm(x, name):
        z = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + c.norm_eps)
        return z * p[f"{name}.weight"] + p[f"{name}.bias"]

    def linear(x, name):
        return x @ p[f"{name}.weight"] + p[f"{name}.bias"]

    for b, row in enumerate(tokens):
        h = p["embedding.weight"][row] + p["positions.weight"][: len(row)]
        for i in range(c.layers):
            n = norm(h, f"blocks.{i}.norm1")
            q, k, v = (linear(n, f"blocks.{i}.attention.{which}") for which in ("query", "key", "value"))
            out = np.zeros_like(h)
            for head in range(c.heads):
                part = slice(head * size, (head + 1) * size)
                for t in range(len(row)):
                    w = softmax(k[: t + 1, part] @ q[t, part] / math.sqrt(size))
                    out[t, part] = w @ v[: t + 1, part]
            h = h + linear(out, f"blocks.{i}.attention.output")
            middle = linear(norm(h, f"blocks.{i}.norm2"), f"blocks.{i}.ffn.up")
            erf = np.vectorize(math.erf)(middle / math.sqrt(2))
            h = h + linear(0.5 * middle * (1 + erf), f"blocks.{i}.ffn.down")
        logits[b] = norm(h, "norm") @ p["head.weight"]
    return logits


def test_the_plain_model_is_what_loops_say():
    config = config_of("plain")
    model, tokens = make(config), batch_of(config)["tokens"]
    np.testing.assert_allclose(model(tokens), straightforward(get_params(model), config, tokens), rtol=0, atol=1e-12)


def test_scores_are_scaled_by_the_head_and_not_the_width():
    """Width 8, two heads: 1 / sqrt(4), told apart from 1 / sqrt(8) by the weights."""
    config = BlockConfig(width=8, heads=2, causal=False, attention_bias=False)
    module = MultiHeadAttention(config, dtype="float64")
    x = np.random.default_rng(0).standard_normal((1, 3, 8))
    q, k, v = (
        (x @ getattr(module, name).weight).reshape(1, 3, 2, 4).swapaxes(1, 2) for name in ("query", "key", "value")
    )
    out = attention(q, k, v, scale=0.5).swapaxes(1, 2).reshape(1, 3, 8) @ module.output.weight
    np.testing.assert_allclose(module(x), out, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", ["plain", "grouped", "encoder-decoder-shared", "tied", "sinks"])
def test_initial_values_are_those_of_the_table(name):
    config = config_of(name)
    params = get_params(Transformer(config, seed=5))
    for one, spec in model_parameters(config).items():
        assert params[one].shape == spec.shape and params[one].dtype == np.float32
        if spec.bound is None:
            np.testing.assert_array_equal(params[one], np.float32(spec.value))
        else:
            u = uniform(fold_in(key(5), name_hash(one)), spec.shape)
            np.testing.assert_array_equal(params[one], np.float32(spec.bound) * (np.float32(2) * u - np.float32(1)))


def test_no_two_layers_start_alike_and_their_gradients_differ():
    model = Transformer(config_of("plain"), dtype="float64")
    params, (_, grads) = get_params(model), loss_and_gradients(model, batch_of(model.config))
    for found in (params, grads):
        for part in ("attention.query.weight", "ffn.up.weight"):
            assert not np.array_equal(found[f"blocks.0.{part}"], found[f"blocks.1.{part}"])


def test_a_module_made_alone_draws_by_its_own_names():
    config = BlockConfig(width=6, heads=2)
    block = Block(config, seed=3)
    table = block_parameters(config)
    assert list(get_params(block)) == list(table)
    spec = table["attention.query.weight"]
    u = uniform(fold_in(key(3), name_hash("attention.query.weight")), spec.shape)
    np.testing.assert_array_equal(block.attention.query.weight, np.float32(spec.bound) * (2 * u - 1))
    assert "up.weight" in get_params(FeedForward(config)) and "query.bias" in get_params(MultiHeadAttention(config))


def test_parameters_go_in_and_out_as_copies():
    model = Transformer(config_of("plain"))
    params = get_params(model)
    params["norm.weight"][0] = 7.0
    assert model.norm.weight[0] == 1.0
    set_params(model, params)
    params["norm.weight"][0] = 8.0
    assert model.norm.weight[0] == 7.0


def test_all_that_is_wrong_with_parameters_is_said_at_once():
    model = Transformer(config_of("plain"))
    params = get_params(model)
    before = get_params(model)
    del params["norm.bias"]
    params["other"] = np.zeros(3, np.float32)
    params["head.weight"] = params["head.weight"].T
    params["norm.weight"] = params["norm.weight"].astype(np.float64)
    with pytest.raises(ValueError, match=r"norm\.bias is missing; other is not a parameter") as caught:
        set_params(model, params)
    assert "norm.weight must have dtype float32; got float64" in str(caught.value)
    assert "head.weight must have shape (6, 11); got (11, 6)" in str(caught.value)
    for name, p in get_params(model).items():
        np.testing.assert_array_equal(p, before[name])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_model_rounds_once_at_the_end(dtype):
    """The same parameters in float64 give the same logits, up to one rounding."""
    config = config_of("swiglu", positions="rotary", head_dim=4)
    model, tokens = make(config, dtype=dtype), batch_of(config)["tokens"]
    wide = Transformer(config, dtype="float64")
    set_params(wide, {name: p.astype(np.float64) for name, p in get_params(model).items()})
    logits = model(tokens)
    assert logits.dtype.name == dtype
    np.testing.assert_array_equal(logits, wide(tokens).astype(logits.dtype))


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_a_unit_offset_stores_each_norms_weight_less_one(norm):
    config = config_of("plain", norm=norm, qk_norm=True, unit_offset=True)
    model, tokens = make(config), batch_of(config)["tokens"]
    whole = Transformer(config.replace(unit_offset=False), dtype="float64")
    stored = get_params(model)
    norms = [name for name in stored if "norm" in name and name.endswith("weight")]
    assert len(norms) == 2 * 4 + 1
    set_params(whole, {name: p + 1.0 if name in norms else p for name, p in stored.items()})
    np.testing.assert_array_equal(model(tokens), whole(tokens))


def test_the_future_and_other_documents_have_no_effect():
    config = config_of("plain")
    model, batch = make(config), batch_of(config)
    segments, tokens = batch["segments"], batch["tokens"]
    changed = tokens.copy()
    changed[:, 0] = (changed[:, 0] + 1) % 11
    before, after = model(tokens, segments=segments), model(changed, segments=segments)
    np.testing.assert_array_equal(before[0, 2:], after[0, 2:])
    assert (before[2] != after[2]).any(axis=-1).all()
    changed = tokens.copy()
    changed[:, 3] = (changed[:, 3] + 1) % 11
    np.testing.assert_array_equal(model(tokens)[:, :3], model(changed)[:, :3])


def test_packed_documents_equal_separate_ones_where_positions_restart():
    config = config_of("rotary-part")
    model, tokens = make(config), batch_of(config)["tokens"][:1]
    packed = model(tokens, segments=np.array([[0, 0, 1, 1, 1]]), positions=np.array([[0, 1, 0, 1, 2]]))
    np.testing.assert_allclose(packed[:, :2], model(tokens[:, :2]), rtol=0, atol=1e-13)
    np.testing.assert_allclose(packed[:, 2:], model(tokens[:, 2:]), rtol=0, atol=1e-13)


def test_a_classifier_reads_its_real_tokens_alone():
    for name in ("mean", "first", "last"):
        config = config_of(name)
        model, batch = make(config), batch_of(config)
        tokens, lengths = batch["tokens"], batch["lengths"]
        rows = [model(tokens[b : b + 1, :n])[0] for b, n in enumerate(lengths)]
        np.testing.assert_allclose(model(tokens, kv_lengths=lengths), rows, rtol=0, atol=1e-13)
        segments = np.where(np.arange(T) < lengths[:, None], 0, -1)
        np.testing.assert_allclose(model(tokens, segments=segments), rows, rtol=0, atol=1e-13)


def test_a_classifier_of_left_padded_rows_pools_what_is_real():
    config = config_of("first", positions="none", kind="encoder")
    model, tokens = make(config), batch_of(config)["tokens"][:1]
    padded = model(tokens, segments=np.array([[-1, -1, 0, 0, 0]]))
    np.testing.assert_allclose(padded, model(tokens[:, 2:]), rtol=0, atol=1e-13)
    nothing = model(tokens, segments=np.full((1, T), -1))
    np.testing.assert_array_equal(nothing, np.zeros((1, 4)))


def test_the_encoder_sees_its_lengths_and_the_decoder_the_encoder():
    config = config_of("encoder-decoder")
    model, batch = make(config), batch_of(config)
    call = {"context": batch["context"], "context_lengths": batch["context_lengths"]}
    before = model(batch["tokens"], **call)
    changed = batch["context"].copy()
    changed[1, 2:] = (changed[1, 2:] + 1) % 11
    np.testing.assert_array_equal(model(batch["tokens"], **{**call, "context": changed}), before)
    changed[1, 0] = (changed[1, 0] + 1) % 11
    assert (model(batch["tokens"], **{**call, "context": changed})[1] != before[1]).any(axis=-1).all()
    alone = model(batch["tokens"][1:2], context=batch["context"][1:2, :2])
    np.testing.assert_allclose(before[1:2], alone, rtol=0, atol=1e-13)


def test_attention_maps_are_the_weights_of_each_layer():
    config = config_of("windows", dropout=0.5)
    model, tokens = make(config), batch_of(config)["tokens"]
    maps = model.attention_maps(tokens)
    assert [m.shape for m in maps] == [(B, 2, T, T)] * 2
    np.testing.assert_allclose(np.sum(maps, axis=-1), 1.0, rtol=1e-14)
    assert (maps[0][..., np.arange(T)[:, None] - np.arange(T) > 1] == 0).all()
    assert (maps[1][..., np.tri(T, dtype=bool)] > 0).all() and (maps[1][..., ~np.tri(T, dtype=bool)] == 0).all()
    dropped = model.attention_maps(tokens, dropout_key=key(1))
    np.testing.assert_allclose(np.sum(dropped, axis=-1), 1.0, rtol=1e-14)


def test_biases_of_positions_are_those_of_the_encodings():
    """A model without positions whose blocks get the bias by hand equals the model that has it."""
    for name in ("alibi", "relative"):
        config = config_of(name)
        model, tokens = make(config), batch_of(config)["tokens"]
        if name == "alibi":
            bias = alibi_bias(config.heads, T, dtype="float64")
        else:
            bias = relative_bias(model.relative.weight, T, buckets=6, max_distance=4, bidirectional=False)
        h = model.embedding.weight[tokens]
        for block in model.blocks:
            h = block(h, bias=bias[None])
        np.testing.assert_allclose(model.norm.run(h) @ model.head.weight, model(tokens), rtol=0, atol=1e-13)


def test_a_block_turns_by_its_own_positions_or_by_given_tables():
    config = config_of("rotary-part")
    block, x = Block(config, dtype="float64"), np.random.default_rng(0).standard_normal((B, T, 6))
    positions = np.array([[0, 1, 2, 3, 4], [2, 3, 4, 5, 6], [0, 0, 1, 1, 2]])
    tables = rotary_tables(positions, rotary_frequencies(4)[0])
    np.testing.assert_array_equal(block(x, positions=positions), block(x, rotary=tables))
    np.testing.assert_allclose(block(x)[1], block(x, positions=positions)[1], rtol=0, atol=1e-13)
    assert (np.abs(block(x)[2] - block(x, positions=positions)[2]) > 1e-6).any()


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_a_model_turns_pairs_of_the_configured_layout(layout):
    """One layer by hand; in every place the layout must be the configuration's."""
    config = config_of("rotary-part", rotary_layout=layout, layers=1, heads=1, head_dim=6, attention_bias=False)
    model, tokens = make(config), batch_of(config)["tokens"]
    block, h = model.blocks[0], model.embedding.weight[tokens]
    n = block.norm1.run(h)
    tables = rotary_tables(np.arange(T), rotary_frequencies(4)[0])
    q, k = (
        apply_rotary((n @ w.weight)[:, None], *tables, layout=layout)
        for w in (block.attention.query, block.attention.key)
    )
    out = (
        attention(q, k, (n @ block.attention.value.weight)[:, None], causal=True)[:, 0] @ block.attention.output.weight
    )
    h = h + out
    h = h + block.ffn(block.norm2.run(h))
    np.testing.assert_allclose(model.norm.run(h) @ model.head.weight, model(tokens), rtol=0, atol=1e-13)
    alone = Block(config, dtype="float64")
    set_params(alone, get_params(block))
    x = model.embedding.weight[tokens]
    np.testing.assert_array_equal(alone(x), block(x, rotary=tables))


def test_dropout_needs_a_key_and_uses_it_everywhere():
    config = config_of("dropout")
    model, tokens = make(config), batch_of(config)["tokens"]
    np.testing.assert_array_equal(model(tokens), make(config_of("dropout", dropout=0.0))(tokens))
    one, two = model(tokens, dropout_key=key(1)), model(tokens, dropout_key=key(2))
    np.testing.assert_array_equal(one, model(tokens, dropout_key=key(1)))
    assert (one != two).any() and (one != model(tokens)).any()


def test_a_block_drops_three_times_with_the_keys_of_the_contract():
    config = BlockConfig(width=6, heads=2, dropout=0.4, causal=False)
    block, x = Block(config, dtype="float64"), np.random.default_rng(0).standard_normal((B, T, 6))
    keys = split(key(4), 5)
    h = x + drop(block.attention(block.norm1.run(x), dropout_key=keys[0]), 0.4, keys[1])
    h = h + block.ffn(block.norm2.run(h), dropout_key=keys[2])
    np.testing.assert_array_equal(block(x, dropout_key=key(4)), h)


@pytest.mark.parametrize("place", ["pre", "post"])
def test_gradients_of_a_block_reach_its_inputs(place):
    config = BlockConfig(width=6, heads=2, cross_attention=True, norm_place=place, dropout=0.2, qk_norm=True)
    block, rng = Block(config, dtype="float64"), np.random.default_rng(0)
    arrays = {"x": rng.standard_normal((B, T, 6)), "context": rng.standard_normal((B, 4, 6)),
              "bias": rng.standard_normal((1, 2, T, T))}  # fmt: skip
    grad = rng.standard_normal((B, T, 6))
    tables = rotary_tables(np.arange(T), rotary_frequencies(2)[0])
    call = {"dropout_key": key(1), "rotary": tables, "context_lengths": np.array([4, 1, 3])}
    found = gradients.block_vjp(grad, block, **arrays, **call)
    assert set(found) == {"x", "context", "bias", *block_parameters(config)}
    for name, x in arrays.items():
        direction = rng.standard_normal(x.shape)
        ends = [np.sum(grad * block(**{**arrays, name: x + h * direction}, **call)) for h in (1e-5, -1e-5)]
        assert np.sum(found[name] * direction) == pytest.approx((ends[0] - ends[1]) / 2e-5, abs=1e-7), name


def test_empty_batches_and_rows_give_empty_logits():
    model = make(config_of("plain"))
    assert model(np.zeros((0, 4), int)).shape == (0, 4, 11)
    assert model(np.zeros((2, 0), int)).shape == (2, 0, 11)


MODEL, IDS = make(config_of("plain")), np.zeros((2, 4), int)
BLOCK, HIDDEN = Block(BlockConfig(width=6, heads=2)), np.zeros((2, 4, 6), np.float32)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: Transformer(BlockConfig(width=6, heads=2)), TypeError, "config must be a ModelConfig"),
        (lambda: Transformer(MODEL.config, dtype="int8"), ValueError, "dtype must be one of 'float16'"),
        (lambda: Transformer(MODEL.config, device="cuda"), ValueError, "device must be None or 'cpu'"),
        (lambda: MODEL(IDS + 11), ValueError, r"tokens must be from 0 to 10 \(the vocabulary\); got 11"),
        (lambda: MODEL(IDS - 1), ValueError, "got -1"),
        (lambda: MODEL(IDS * 1.0), TypeError, "tokens must hold integers"),
        (lambda: MODEL(IDS[0]), ValueError, r"tokens must have shape \(batch, length\)"),
        (lambda: MODEL(IDS, kv_lengths=np.array([4, 5])), ValueError, "kv_lengths must be from 0 to 4"),
        (lambda: MODEL(IDS, segments=IDS[:, :3]), ValueError, r"segments must have shape \(2, 4\)"),
        (lambda: MODEL(IDS, mask=np.ones((2, 4, 4), bool)), ValueError, "mask must have rank 2"),
        (lambda: MODEL(IDS, context=IDS), ValueError, "context must be None for kind='decoder'"),
        (lambda: MODEL(IDS, dropout_key=3), TypeError, "dropout_key must be a key made by key()"),
        (lambda: make(config_of("alibi"))(IDS, positions=np.arange(4)), ValueError, "positions must be None for"),
        (lambda: make(config_of("encoder-decoder"))(IDS), ValueError, "context must be given to an encoder-decoder"),
        (lambda: MODEL(IDS, cache=KVCache(MODEL.config, 3, dtype="float64")), ValueError, "cache must have the batch"),
        (lambda: MODEL(IDS, cache=KVCache(MODEL.config, 2)), TypeError, "cache must have the module's dtype"),
        (lambda: BLOCK(HIDDEN.astype(np.float64)), TypeError, r"x must have the module's dtype \(float32\)"),
        (lambda: BLOCK(HIDDEN[..., :5]), ValueError, r"x must have shape \(batch, length, 6\)"),
        (lambda: BLOCK(HIDDEN, positions=np.arange(4)), ValueError, "positions must be None where nothing reads them"),
        (lambda: BLOCK(HIDDEN, context=HIDDEN), ValueError, "context must be None: this module has no cross"),
        (lambda: BLOCK.attention(HIDDEN, context=HIDDEN, mask=np.ones((4, 4), bool)), ValueError, "mask must be None"),
        (lambda: KVCache(BlockConfig(width=6, heads=2), 1), ValueError, "capacity must be given for a BlockConfig"),
        (lambda: generate(MODEL, IDS, max_new=6), ValueError, "max_new must be at most 5"),
        (lambda: generate(MODEL, IDS, max_new=1, temperature=1), ValueError, "key must be given"),
        (lambda: generate(MODEL, IDS, max_new=1, top_k=3), ValueError, "top_k and top_p must be None at temperature 0"),
        (lambda: generate(MODEL, IDS, max_new=1, lengths=np.array([0, 4])), ValueError, "lengths must be from 1 to 4"),
    ],
)  # fmt: skip
def test_wrong_calls_are_refused_by_name(call, error, words):
    with pytest.raises(error, match=words):
        call()
