"""The JAX modules against the reference in float64, in other people's loops, and what is native about them."""

from __future__ import annotations

import math

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

import jax.numpy as jnp  # noqa: E402
from flax import nnx  # noqa: E402
from mix_model import CONFIGS, batch_of, call_of, config_of, moved  # noqa: E402

import backend_jax as B  # noqa: E402
import core_numpy as C  # noqa: E402
from backend_jax.cache import LayerCache  # noqa: E402
from core_numpy.contract.parameters import model_parameters  # noqa: E402

IDS = list(CONFIGS)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def pair_of(config, dtype="float64"):
    """The same model in NumPy and JAX."""
    reference, model = C.Transformer(config, seed=3, dtype=dtype), B.Transformer(config, seed=3, dtype=dtype)
    params = moved(C.get_params(reference))
    C.set_params(reference, params)
    B.set_params(model, params)
    return reference, model


def expect_close(got, want, tolerance):
    """Relative to the largest number of the array."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape and got.dtype == want.dtype
    assert np.isfinite(want).all()
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * max(np.abs(want).max(initial=0.0), 1e-3))


def eager(model, batch, key, options):
    """Logits, loss and gradients operation by operation: for small shapes quicker than compiling each configuration."""
    graph, state = nnx.split(model)

    def loss(state):
        logits = nnx.merge(graph, state)(batch["tokens"], **call_of(batch), dropout_key=key)
        return B.cross_entropy(logits, jnp.asarray(batch["targets"]), **options), logits

    (value, logits), grads = jax.value_and_grad(loss, has_aux=True)(state)
    return logits, value, {".".join(map(str, path)): g[...] for path, g in nnx.to_flat_state(grads)}


@pytest.mark.parametrize("name", IDS)
def test_output_and_gradients_are_the_reference(name, x64):
    config = config_of(name)
    reference, model = pair_of(config)
    batch = batch_of(config, segments=config.kind == "decoder")
    want_logits = reference(batch["tokens"], **call_of(batch))
    if config.head == "none":
        expect_close(model(batch["tokens"], **call_of(batch)), want_logits, 1e-12)
        return
    options = {"label_smoothing": 0.1, "z_loss": 0.01}
    want_loss, want = C.loss_and_gradients(reference, batch, **options)
    logits, loss, got = eager(model, batch, None, options)
    expect_close(logits, want_logits, 1e-12)
    assert float(loss) == pytest.approx(want_loss, rel=1e-12)
    assert set(got) == set(want)
    for parameter, gradient in got.items():
        expect_close(gradient, want[parameter], 1e-11)


@pytest.mark.parametrize("name", ["swiglu", "pair post"])
def test_compiled_loss_and_gradients_with_dropout_are_the_reference(name, x64):
    # One layer a side of the pair: two take XLA 23 s of a processor, and on a crowded machine longer than pytest waits.
    fewer = {"layers": 1} if name == "pair post" else {}
    config = config_of(name, dropout=0.25, **fewer)
    reference, model = pair_of(config)
    batch = batch_of(config)
    want_loss, want = C.loss_and_gradients(reference, batch, dropout_key=C.key(5), z_loss=0.01)
    loss, got = B.loss_and_gradients(model, batch, dropout_key=B.key(5), z_loss=0.01)
    assert loss == pytest.approx(want_loss, rel=1e-12) and list(got) == list(want)
    for parameter, gradient in got.items():
        expect_close(gradient, want[parameter], 1e-11)


@pytest.mark.parametrize("name", ["plain", "windows", "relative"])
def test_without_restrictions_the_output_is_the_reference(name, x64):
    config = config_of(name)
    reference, model = pair_of(config)
    tokens = batch_of(config)["tokens"]
    expect_close(model(tokens), reference(tokens), 1e-12)


def test_initial_values_are_bit_for_bit_the_references():
    for name in ("plain", "relative", "sandwich", "q/k norm", "sinks", "tied", "classifier", "pair shared"):
        config = config_of(name)
        want, got = (P.get_params(P.Transformer(config, seed=11)) for P in (C, B))
        assert list(got) == list(want) == list(model_parameters(config))
        assert all(got[key].dtype == x.dtype and np.array_equal(got[key], x) for key, x in want.items())
    # The layers of one model differ, and an array of more than one piece of draws goes on where the piece ends.
    blocks = B.get_params(B.Transformer(config_of("plain")))
    assert not np.array_equal(blocks["blocks.0.ffn.up.weight"], blocks["blocks.1.ffn.up.weight"])
    large = C.BlockConfig(width=300, heads=3, hidden=250)
    got, want = (P.get_params(P.FeedForward(large, dtype="bfloat16")) for P in (B, C))
    assert all(np.array_equal(got[key], want[key]) for key in want)


def test_float64_without_x64_is_refused():
    for make in (
        lambda: B.Transformer(config_of("plain"), dtype="float64"),
        lambda: B.KVCache(config_of("plain"), 3, dtype="float64"),
    ):
        with pytest.raises(TypeError, match="jax_enable_x64"):
            make()


def test_parameter_paths_are_the_canonical_names():
    model = B.Transformer(config_of("plain"))
    paths = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    assert paths == set(model_parameters(config_of("plain")))
    assert model.blocks[0].ffn.up.weight.shape == (12, 10)  # (in, out)


def test_set_params_takes_all_or_nothing():
    model = B.Transformer(config_of("plain"))
    params = B.get_params(model)
    wrong = {**params, "norm.bias": params["norm.bias"].astype(np.float64), "extra": params["norm.bias"]}
    with pytest.raises(ValueError, match=r"extra is not a parameter.*norm\.bias must have dtype float32"):
        B.set_params(model, wrong)
    B.set_params(model, {name: x + 1 for name, x in params.items()})
    assert np.array_equal(model.blocks[1].attention.key.bias[...], params["blocks.1.attention.key.bias"] + 1)


@pytest.mark.parametrize("name", ["windows", "interleaved", "alibi", "relative"])
def test_cached_pieces_are_one_pass(name, x64):
    config = config_of(name)
    reference, model = pair_of(config)
    tokens = batch_of(config)["tokens"]
    mask = np.ones((3, 1, 7, 7), bool)
    mask[1, :, :, 2] = False
    want = reference(tokens, mask=mask, kv_lengths=np.array([7, 7, 6]))
    cache = B.KVCache(config, 3, 8, dtype="float64")
    parts, start = [], 0
    for size in (4, 1, 2):
        end = start + size
        seen = {"mask": jnp.asarray(mask[:, :, start:end, :end]), "kv_lengths": np.array([end, end, min(end, 6)])}
        parts.append(model(tokens[:, start:end], cache=cache, **seen))
        start = end
        assert cache.length == end
    expect_close(jnp.concatenate(parts, axis=1), want, 1e-12)
    with pytest.raises(ValueError, match="room for 2 more positions; got 7 of 8"):
        model(tokens[:, :2], cache=cache)
    with pytest.raises(ValueError, match="cache must be made from the configuration"):
        model(tokens[:, :1], cache=B.KVCache(config.replace(softcap=3.0), 3, dtype="float64"))


def test_a_block_has_its_own_cache_and_rotation(x64):
    config = config_of("interleaved", layers=1)
    reference, block = C.Block(config, seed=3, dtype="float64"), B.Block(config, seed=3, dtype="float64")
    x = np.random.default_rng(0).standard_normal((3, 5, 12))
    places = np.array([[0, 2, 3, 4, 7], [1, 2, 3, 4, 5], [9, 8, 7, 6, 5]])
    expect_close(block(x, positions=places), reference(x, positions=places), 1e-12)
    cache = B.KVCache(config, 3, 5, dtype="float64")
    steps = [block(x[:, t : t + 1], cache=cache) for t in range(5)]
    expect_close(jnp.concatenate(steps, axis=1), reference(x), 1e-12)


def test_attention_alone_crosses_to_a_context(x64):
    config = C.BlockConfig(width=12, heads=4, kv_heads=2, head_dim=6, value_dim=5, qk_norm=True)
    reference, module = (P.MultiHeadAttention(config, seed=3, dtype="float64") for P in (C, B))
    rng = np.random.default_rng(0)
    x, context = rng.standard_normal((3, 5, 12)), rng.standard_normal((3, 7, 12))
    lengths = np.array([7, 0, 2])
    expect_close(
        module(x, context=context, context_lengths=lengths),
        reference(x, context=context, context_lengths=lengths),
        1e-12,
    )
    expect_close(module(x), reference(x), 1e-12)


def test_attention_maps_are_the_references(x64):
    for name in ("soft caps", "pair"):
        config = config_of(name)
        reference, model = pair_of(config)
        batch = batch_of(config)
        got = model.attention_maps(batch["tokens"], **call_of(batch))
        want = reference.attention_maps(batch["tokens"], **call_of(batch))
        assert len(got) == len(want) == 2
        for ours, theirs in zip(got, want, strict=True):
            expect_close(ours, theirs, 1e-12)


@pytest.mark.parametrize("name", ["windows", "relative", "pair shared"])
def test_generation_is_the_references(name, x64):
    config = config_of(name, max_length=12)
    reference, model = pair_of(config)
    tokens = batch_of(config)["tokens"]
    given, ours = {}, {}
    if config.kind == "encoder_decoder":
        given = {"context": batch_of(config)["context"], "context_lengths": np.array([5, 1, 2])}
    else:
        given = {"lengths": np.array([7, 3, 1])}
    if name == "windows":
        given |= {"temperature": 0.8, "top_k": 5, "top_p": 0.7}
        given, ours = given | {"key": C.key(9)}, {"key": B.key(9)}
    want = reference_tokens = C.generate(reference, tokens, max_new=5, **given)
    got = B.generate(model, jnp.asarray(tokens), max_new=5, **{**given, **ours})
    assert got.shape == (3, 12) and np.array_equal(got, want) and np.array_equal(reference_tokens[:, :7], tokens)


def test_generation_goes_on_past_the_length_of_dynamic_frequencies(x64):
    config = config_of("dynamic", max_length=12)
    reference, model = pair_of(config)
    row = batch_of(config)["tokens"][:, :3]
    got = B.generate(model, jnp.asarray(row), max_new=2)
    for _ in range(2):
        row = np.concatenate([row, np.argmax(reference(row)[:, -1], axis=-1)[:, None]], axis=1)
    assert np.array_equal(got, row)


def test_ids_and_positions_out_of_range_are_refused():
    model = B.Transformer(config_of("plain"))
    for wrong in (13, -1):
        with pytest.raises(ValueError, match="tokens must be from 0 to 12"):
            model(jnp.array([[0, wrong, 2]]))
    with pytest.raises(ValueError, match="positions must be from 0 to 8"):
        model(jnp.array([[0, 1, 2]]), positions=jnp.array([7, 8, 9]))
    with pytest.raises(ValueError, match="max_length"):
        model(jnp.zeros((1, 10), jnp.int32))


def test_writing_a_layer_cache_keeps_what_is_there():
    store = LayerCache(jnp.zeros((1, 1, 4, 2)), jnp.zeros((1, 1, 4, 3)), 3, 4)
    options = {"mask": jnp.ones((1, 3), bool), "bias": None, "kv_lengths": None, "causal": True, "window": None}
    k, v, options = store.extend(jnp.ones((1, 1, 1, 2)), jnp.ones((1, 1, 1, 3)), options)
    assert np.array_equal(k[0, 0, :, 0], [0, 0, 0, 1]) and np.array_equal(v[0, 0, :, 0], [0, 0, 0, 1])
    assert options["kv_lengths"].tolist() == [4] and options["mask"].shape == (1, 4) and not options["causal"]


def test_dropout_is_off_without_a_key_and_differs_between_keys():
    config = config_of("plain", dropout=0.5)
    model, plain = B.Transformer(config), B.Transformer(config.replace(dropout=0.0))
    tokens = batch_of(config)["tokens"]
    assert np.array_equal(model(tokens), plain(tokens))
    one, again, other = (model(tokens, dropout_key=B.key(n)) for n in (1, 1, 2))
    assert np.array_equal(one, again) and not np.array_equal(one, other)


def test_dropout_at_its_ends():
    x = jnp.array([1.0, jnp.nan, 3.0])
    assert np.array_equal(B.dropout(x, 1.0, B.key(0)), [0.0, 0.0, 0.0])
    assert B.dropout(x, 0.0, None) is x
    with pytest.raises(ValueError, match="key must be given with rate > 0"):
        B.dropout(x, 0.5, None)
    kept = B.dropout(jnp.full(1000, 0.9, jnp.bfloat16), 0.1, B.key(0))
    # 0.8984 (bfloat16's 0.9) / 0.9 = 0.998, which rounds to 1; 0.9 rounded before the division would do the same to
    # both and give 1 exactly, so look at 0.1: 0.1001 / 0.9 = 0.11122 is 0.1113 in bfloat16.
    assert set(np.asarray(kept, np.float32).tolist()) == {0.0, 1.0}
    kept = B.dropout(jnp.full(1000, 0.1, jnp.bfloat16), 0.1, B.key(0))
    assert float(kept.max()) == float(jnp.bfloat16(float(jnp.bfloat16(0.1)) / 0.9))


def test_norms_have_eps_inside_the_root_and_two_passes():
    row = jnp.array([1.0, -1.0, 2.0, -2.0]) * 1e-3
    assert float(B.layer_norm(row, None, None, eps=1e-5)[0]) == pytest.approx(0.28284, abs=1e-5)
    assert float(B.layer_norm(row, None, None, eps=1e-6)[0]) == pytest.approx(0.53452, abs=1e-5)
    assert float(B.rms_norm(jnp.full(4, 1e-3), None, eps=1e-6)[0]) == pytest.approx(0.7071, abs=1e-4)
    # E[x^2] - E[x]^2 is off by 1 here (its squares are near 10000, where float32 has steps of 1e-3).
    x = (100.0 + np.arange(16) * 1e-3).astype(np.float32)
    wide = x.astype(np.float64) - x.astype(np.float64).mean()
    want = wide / np.sqrt((wide**2).mean() + 1e-5)
    np.testing.assert_allclose(B.layer_norm(jnp.asarray(x), None, None, eps=1e-5), want, atol=3e-3)
    assert np.array_equal(B.rms_norm(row, jnp.zeros(4), eps=1e-6, unit_offset=True), B.rms_norm(row, None, eps=1e-6))


def test_gelu_is_exact_unless_asked_and_right_in_its_tail():
    x = jnp.array([-2.699, -6.0, 0.0, 6.0])
    exact = [0.5 * v * math.erfc(-v / math.sqrt(2)) for v in np.asarray(x, np.float64)]
    # 1 + erf is off by all of it at -6 in float32.
    np.testing.assert_allclose(B.gelu(x), exact, rtol=1e-5)
    assert abs(float(B.gelu(x)[0] - B.gelu(x, approximate="tanh")[0])) == pytest.approx(4.73e-4, abs=2e-6)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu"])
def test_written_derivatives_are_the_differences_both_ways(name, x64):
    f = {"gelu": B.gelu, "gelu_tanh": lambda x: B.gelu(x, approximate="tanh"), "silu": B.silu}[name]
    x = jnp.linspace(-5.0, 5.0, 41)
    step = 1e-5
    difference = (f(x + step) - f(x - step)) / (2 * step)
    np.testing.assert_allclose(jax.jvp(f, (x,), (jnp.ones_like(x),))[1], difference, atol=1e-9)
    slope = jax.grad(lambda x: jnp.sum(f(x)))
    np.testing.assert_allclose(slope(x), difference, atol=1e-9)
    bend = (slope(x + step) - slope(x - step)) / (2 * step)
    np.testing.assert_allclose(jax.grad(lambda x: jnp.sum(slope(x)))(x), bend, atol=1e-9)


def test_an_empty_softmax_and_uncounted_rows_are_zero_with_zero_gradients():
    dead = jnp.full((2, 3), -jnp.inf)
    assert np.array_equal(B.softmax(dead), np.zeros((2, 3)))
    assert np.array_equal(jax.grad(lambda x: jnp.sum(B.softmax(x)[:, 0]))(dead), np.zeros((2, 3)))
    logits, targets = jnp.array([[1.0, 2.0], [jnp.nan, 0.0]]), jnp.array([1, -100])
    assert float(B.cross_entropy(logits, targets)) == pytest.approx(math.log(1 + math.exp(-1)), rel=1e-6)
    assert np.array_equal(jax.grad(B.cross_entropy)(logits, targets)[1], [0.0, 0.0])
    assert float(B.cross_entropy(logits, jnp.array([-100, -100]))) == 0.0
    with pytest.raises(ValueError, match="targets must be from 0 to 1, or -100"):
        B.cross_entropy(logits, jnp.array([2, -100]))


def loss_of(module, x):
    return jnp.mean(jnp.square(module(x) - 1.0))


def test_a_block_trains_in_an_nnx_loop():
    optax = pytest.importorskip("optax")
    block = B.Block(C.BlockConfig(width=6, heads=2, kv_heads=1, hidden=5))
    optimizer = nnx.Optimizer(block, optax.adamw(1e-2), wrt=nnx.Param)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 6)), jnp.float32)

    @nnx.jit
    def step(block, optimizer, x):
        loss, grads = nnx.value_and_grad(loss_of)(block, x)
        optimizer.update(block, grads)
        return loss

    losses = [float(step(block, optimizer, x)) for _ in range(10)]
    assert losses[-1] < 0.7 * losses[0]


def test_a_feed_forward_trains_in_a_jax_loop():
    optax = pytest.importorskip("optax")
    graph, state = nnx.split(B.FeedForward(C.BlockConfig(width=6, heads=2, hidden=5, activation="swiglu")))
    sgd = optax.sgd(0.1)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 6)), jnp.float32)

    @jax.jit
    def step(state, slots):
        loss, grads = jax.value_and_grad(lambda state: loss_of(nnx.merge(graph, state), x))(state)
        updates, slots = sgd.update(grads, slots)
        return optax.apply_updates(state, updates), slots, loss

    slots, losses = sgd.init(state), []
    for _ in range(10):
        state, slots, loss = step(state, slots)
        losses.append(float(loss))
    assert losses[-1] < 0.9 * losses[0]
