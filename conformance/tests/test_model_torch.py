"""The torch modules against the reference in float64, against torch's own layers, and what is native about them."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mix_model import BASE, CONFIGS, batch_of, config_of  # noqa: E402

import backend_torch as B  # noqa: E402
import core_numpy as C  # noqa: E402
from backend_torch.arrays import from_numpy, to_numpy  # noqa: E402

IDS = list(CONFIGS)


def pair_of(config, seed=3):
    """The same model in NumPy and torch, float64, with parameters moved so that no bias is 0 and no gain 1."""
    reference, model = (
        C.Transformer(config, seed=seed, dtype="float64"),
        B.Transformer(config, seed=seed, dtype="float64"),
    )
    rng = np.random.default_rng(7)
    params = {name: x + 0.3 * rng.standard_normal(x.shape) for name, x in C.get_params(reference).items()}
    C.set_params(reference, params)
    B.set_params(model, params)
    return reference, model


def call_of(batch, turn=lambda x: x):
    names = {"lengths": "kv_lengths"}
    return {names.get(name, name): turn(x) for name, x in batch.items() if name not in ("tokens", "targets")}


def expect_close(a, b, tolerance):
    """Relative to the largest number of the array; the comparison says what failed."""
    a, b = (to_numpy(x) if isinstance(x, torch.Tensor) else np.asarray(x) for x in (a, b))
    assert a.shape == b.shape and a.dtype == b.dtype
    assert np.isfinite(a).all()
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(np.abs(b).max(initial=0.0), 1e-3))


@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize("restricted", [False, True])
def test_output_is_the_reference(name, restricted):
    config = config_of(name)
    reference, model = pair_of(config)
    batch = batch_of(config, lengths=restricted, segments=restricted and config.kind == "decoder")
    got = model(from_numpy(batch["tokens"]), **call_of(batch, from_numpy))
    expect_close(got, reference(batch["tokens"], **call_of(batch)), 1e-12)


@pytest.mark.parametrize("name", [name for name in IDS if name != "hidden"])
def test_gradients_are_the_reference(name):
    config = config_of(name, dropout=0.25)
    reference, model = pair_of(config)
    batch = batch_of(config)
    options = {"label_smoothing": 0.1, "z_loss": 0.01}
    want_loss, want = C.loss_and_gradients(reference, batch, dropout_key=C.key(5), **options)
    loss, got = B.loss_and_gradients(model, batch, dropout_key=B.key(5), **options)
    assert loss == pytest.approx(want_loss, rel=1e-12)
    assert list(got) == list(want)
    for parameter, gradient in got.items():
        expect_close(gradient, want[parameter], 1e-11)


@pytest.mark.parametrize("name", IDS)
def test_initial_values_are_the_same_bits(name):
    config = config_of(name)
    for dtype in ("float32", "bfloat16"):
        want = C.get_params(C.Transformer(config, seed=11, dtype=dtype))
        model = B.Transformer(config, seed=11, dtype=dtype)
        got = B.get_params(model)
        assert list(got) == list(want)
        assert set(model.state_dict()) == set(want)
        for parameter, value in got.items():
            assert value.dtype == want[parameter].dtype
            assert value.tobytes() == want[parameter].tobytes(), parameter


def test_parts_made_alone_are_the_reference():
    config = C.BlockConfig(**{k: BASE[k] for k in ("width", "heads", "kv_heads", "head_dim", "hidden")}, dropout=0.3,
                           cross_attention=True, value_dim=5, qk_norm=True, sinks=True)  # fmt: skip
    rng = np.random.default_rng(0)
    x, context = rng.standard_normal((2, 5, 12)), rng.standard_normal((2, 3, 12))
    for name, arguments in (
        ("Block", {"context": context}),
        ("MultiHeadAttention", {}),
        ("MultiHeadAttention", {"context": context, "context_lengths": np.array([2, 0])}),
        ("FeedForward", {}),
    ):
        reference = getattr(C, name)(config, seed=2, dtype="float64")
        part = getattr(B, name)(config, seed=2, dtype="float64")
        mine = {k: from_numpy(v) for k, v in arguments.items()}
        got = part(from_numpy(x), dropout_key=B.key(9), **mine)
        expect_close(got, reference(x, dropout_key=C.key(9), **arguments), 1e-12)
        assert not torch.equal(got, part(from_numpy(x), dropout_key=B.key(10), **mine))
        part.eval()  # drops nothing, whatever the key
        expect_close(part(from_numpy(x), dropout_key=B.key(9), **mine), reference(x, **arguments), 1e-12)


def test_a_block_made_from_a_model_config_rotates_by_itself():
    config = config_of("interleaved")
    reference, block = C.Block(config, seed=2, dtype="float64"), B.Block(config, seed=2, dtype="float64")
    x = np.random.default_rng(0).standard_normal((2, 5, 12))
    places = np.array([[0, 1, 2, 3, 4], [9, 8, 7, 6, 5]])
    expect_close(block(from_numpy(x)), reference(x), 1e-12)
    expect_close(block(from_numpy(x), positions=from_numpy(places)), reference(x, positions=places), 1e-12)


@pytest.mark.parametrize("name", ["rotary", "alibi", "relative", "plain", "windows", "sinks", "pair"])
def test_attention_maps_are_the_reference_and_change_nothing(name):
    config = config_of(name)
    reference, model = pair_of(config)
    batch = batch_of(config)
    tokens, call = from_numpy(batch["tokens"]), call_of(batch, from_numpy)
    before = model(tokens, **call)
    maps, want = model.attention_maps(tokens, **call), reference.attention_maps(batch["tokens"], **call_of(batch))
    assert len(maps) == config.layers
    for got, expected in zip(maps, want, strict=True):
        assert got.shape == (3, config.heads, 7, 7)
        expect_close(got, expected, 1e-12)
    assert torch.equal(model(tokens, **call), before)


@pytest.mark.parametrize(
    "name", ["plain", "rotary", "alibi", "relative", "sinusoidal", "windows", "q/k norm", "value dim", "pair"]
)
def test_step_by_step_with_a_cache_is_one_pass(name):
    config = config_of(name)
    _, model = pair_of(config)
    batch = batch_of(config, lengths=False)
    tokens, call = from_numpy(batch["tokens"]), call_of(batch, from_numpy)
    whole, maps = model(tokens, **call), model.attention_maps(tokens, **call)
    cache = B.KVCache(config, 3, dtype="float64")
    steps = [model(part, cache=cache, **call) for part in tokens.split([3, 1, 2, 1], 1)]
    assert cache.length == 7
    expect_close(torch.cat(steps, 1), whole.detach(), 1e-12)
    begun = B.KVCache(config, 3, dtype="float64")
    model(tokens[:, :3], cache=begun, **call)
    for got, want in zip(model.attention_maps(tokens[:, 3:], cache=begun, **call), maps, strict=True):
        expect_close(got, want[:, :, 3:].detach(), 1e-12)
    with pytest.raises(ValueError, match="cache must have room for 3 more"):
        model(tokens[:, :3], cache=cache, **call)


@pytest.mark.parametrize("name", ["plain", "rotary", "alibi", "relative", "windows", "pair"])
def test_generation_is_the_reference(name):
    config = config_of(name, max_length=12)
    reference, model = pair_of(config)
    batch = batch_of(config)
    given = {k: v for k, v in batch.items() if k.startswith("context")}
    mine = {k: from_numpy(v) for k, v in given.items()}
    for options in (
        {},
        {"temperature": 1.3, "key": 5},
        {"temperature": 0.8, "key": 6, "top_k": 4},
        {"temperature": 2.0, "key": 7, "top_p": 0.7, "lengths": np.array([7, 2, 4])},
        {"lengths": np.array([7, 2, 4])},
    ):
        theirs = {k: C.key(v) if k == "key" else v for k, v in options.items()}
        ours = {k: B.key(v) if k == "key" else from_numpy(v) if k == "lengths" else v for k, v in options.items()}
        got = B.generate(model, from_numpy(batch["tokens"]), max_new=5, **ours, **mine)
        want = C.generate(reference, batch["tokens"], max_new=5, **theirs, **given)
        assert np.array_equal(to_numpy(got), want), options
    assert model.training


def test_float32_and_bfloat16_stay_near_the_reference():
    for name in ("rotary", "sandwich", "relative"):
        config = config_of(name)
        reference, _ = pair_of(config)
        batch = batch_of(config)
        want = reference(batch["tokens"], **call_of(batch))
        for dtype, bound in (("float32", 1e-5), ("bfloat16", 6e-2)):
            model = B.Transformer(config, dtype=dtype)
            B.set_params(model, {k: to_numpy(from_numpy(v, dtype=dtype)) for k, v in C.get_params(reference).items()})
            got = model(from_numpy(batch["tokens"]), **call_of(batch, from_numpy))
            assert got.dtype == getattr(torch, dtype)
            error = np.abs(got.detach().double().numpy() - want).max() / np.abs(want).max()
            assert error < bound, (name, dtype, error)


def torch_layer_params(layer, config):
    """The parameters of an nn.TransformerEncoderLayer under canonical names."""
    W = config.width
    q, k, v = layer.self_attn.in_proj_weight.split(W)
    qb, kb, vb = layer.self_attn.in_proj_bias.split(W)
    out = {"attention.query.weight": q.T, "attention.key.weight": k.T, "attention.value.weight": v.T,
           "attention.query.bias": qb, "attention.key.bias": kb, "attention.value.bias": vb,
           "attention.output.weight": layer.self_attn.out_proj.weight.T,
           "attention.output.bias": layer.self_attn.out_proj.bias}  # fmt: skip
    for ours, theirs in (("ffn.up", layer.linear1), ("ffn.down", layer.linear2)):
        out |= {f"{ours}.weight": theirs.weight.T, f"{ours}.bias": theirs.bias}
    for ours, theirs in (("norm1", layer.norm1), ("norm2", layer.norm2)):
        out |= {f"{ours}.weight": theirs.weight, f"{ours}.bias": theirs.bias}
    return {name: to_numpy(x) for name, x in out.items()}


@pytest.mark.parametrize("place", ["pre", "post"])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_a_block_is_torchs_encoder_layer(place, activation):
    config = C.BlockConfig(width=12, heads=3, hidden=20, norm_place=place, activation=activation, norm_eps=1e-3)
    theirs = torch.nn.TransformerEncoderLayer(
        12, 3, 20, dropout=0.0, activation=activation, layer_norm_eps=1e-3, batch_first=True,
        norm_first=place == "pre", dtype=torch.float64,
    )  # fmt: skip
    block = B.Block(config, dtype="float64")
    B.set_params(block, torch_layer_params(theirs, config))
    x = torch.randn(2, 5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    hidden = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
    expect_close(block(x), theirs(x, src_mask=hidden, is_causal=True).detach(), 1e-12)


def test_scores_are_scaled_by_the_head_size_not_the_width():
    # q = k = x with x the unit vector times 2: score 4 / sqrt(4) between equal tokens, 0 between orthogonal ones.
    config = C.BlockConfig(width=8, heads=2, attention_bias=False, causal=False)
    module = B.MultiHeadAttention(config, dtype="float64")
    eye = np.eye(8)
    B.set_params(module, {f"{n}.weight": eye for n in ("query", "key", "value", "output")})
    x = torch.zeros(1, 2, 8, dtype=torch.float64)
    x[0, 0, 0], x[0, 1, 1] = 2.0, 2.0
    weight = np.exp(4 / np.sqrt(4)) / (np.exp(4 / np.sqrt(4)) + 1)
    assert module(x)[0, 0, 0].item() == pytest.approx(2 * weight, rel=1e-14)


def test_dropout_draws_from_torchs_generator_in_train_mode_and_never_acts_in_eval_mode():
    config = config_of("plain", dropout=0.5)
    model, tokens = B.Transformer(config), torch.arange(6)[None]
    torch.manual_seed(1)
    first, second = model(tokens), model(tokens)
    torch.manual_seed(1)
    assert torch.equal(model(tokens), first) and not torch.equal(second, first)
    model.eval()
    plain = B.Transformer(config_of("plain"))(tokens)
    assert torch.equal(model(tokens), plain) and torch.equal(model(tokens, dropout_key=B.key(1)), plain)


def test_layers_start_different_and_drop_differently():
    model = B.Transformer(config_of("plain"))
    one, two = (model.get_parameter(f"blocks.{i}.attention.query.weight") for i in (0, 1))
    assert not torch.equal(one, two)
    x = torch.ones(4, 25)
    keys = [B.fold_in(B.key(0), i) for i in (0, 1)]
    assert not torch.equal(B.dropout(x, 0.5, keys[0]), B.dropout(x, 0.5, keys[1]))


def test_parts_train_in_a_users_own_loop():
    torch.manual_seed(0)
    config = C.BlockConfig(width=12, heads=4, hidden=10)
    block, head = B.Block(config), torch.nn.Linear(12, 1)
    optimizer = torch.optim.AdamW([*block.parameters(), *head.parameters()], lr=1e-2)
    x = torch.randn(8, 5, 12)
    y = x.sum(2, keepdim=True)
    losses = []
    for _ in range(30):
        loss = torch.nn.functional.mse_loss(head(block(x)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert all(isinstance(part, torch.nn.Linear) for part in (block.attention.query, block.ffn.up, block.ffn.down))


def test_functional_call_and_per_sample_gradients():
    config = config_of("rotary")
    model = B.Transformer(config, dtype="float64")
    params = dict(model.named_parameters())
    doubled = {name: 2 * p for name, p in params.items()}
    tokens = from_numpy(batch_of(config)["tokens"])
    out = torch.func.functional_call(model, doubled, (tokens,))
    assert not torch.allclose(out, model(tokens))

    def loss(p, row):
        return torch.func.functional_call(model, p, (row[None],)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))({n: p.detach() for n, p in params.items()}, tokens)
    for row in range(3):
        alone = torch.autograd.grad(model(tokens[row : row + 1]).square().sum(), list(params.values()))
        for (name, got), want in zip(each.items(), alone, strict=True):
            expect_close(got[row], want, 1e-11)
            assert name in params


def test_meta_device_makes_shapes_and_no_values():
    config = config_of("pair post", dropout=0.1)
    model = B.Transformer(config, device="meta")
    assert all(p.is_meta for p in model.parameters())
    tokens = torch.zeros(2, 3, dtype=torch.int64, device="meta")
    out = model(tokens, context=torch.zeros(2, 5, dtype=torch.int64, device="meta"))
    out.sum().backward()
    assert out.is_meta and out.shape == (2, 3, 13)


@pytest.mark.parametrize("name", ["relative", "alibi", "sinusoidal", "plain", "classifier first"])
def test_every_encoding_runs_on_the_meta_device(name):
    config = config_of(name)
    model = B.Transformer(config, device="meta")
    assert model(torch.zeros(2, 3, dtype=torch.int64, device="meta")).is_meta


def test_parameters_are_refused_all_in_one_sentence():
    model = B.Transformer(config_of("plain"))
    params = B.get_params(model)
    before = {k: v.copy() for k, v in params.items()}
    params["blocks.0.ffn.up.weight"] = params["blocks.0.ffn.up.weight"].T
    del params["norm.bias"]
    params["extra"] = np.zeros(1)
    with pytest.raises(ValueError, match=r"norm.bias is missing.*extra is not.*\(12, 10\); got \(10, 12\)"):
        B.set_params(model, params)
    assert all(np.array_equal(before[k], v) for k, v in B.get_params(model).items())


def test_ids_and_positions_outside_their_tables_are_errors():
    model = B.Transformer(config_of("plain"))
    for wrong, phrase in ((torch.tensor([[0, 13]]), "got 13"), (torch.tensor([[-1, 0]]), "got -1")):
        with pytest.raises(ValueError, match=phrase):
            model(wrong)
    with pytest.raises(ValueError, match="max_length"):
        model(torch.zeros(1, 10, dtype=torch.int64))
    with pytest.raises(ValueError, match="positions must be from 0 to 8"):
        model(torch.zeros(1, 2, dtype=torch.int64), positions=torch.tensor([3, 9]))
    with pytest.raises(TypeError, match="tokens must hold integers"):
        model(torch.zeros(1, 2))
