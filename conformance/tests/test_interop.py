"""Modules of other libraries, imported: outputs equal the source's for random weights and the source's own masks."""

from __future__ import annotations

import inspect
import os

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from three import PACKAGES, back, load, to  # noqa: E402

B, T, S, W, H = 2, 4, 5, 12, 3
# Compiling a whole block takes JAX longer than the default run allows.
QUICK = ["core_numpy", "backend_torch", pytest.param("backend_jax", marks=pytest.mark.slow)]


def drawn(module, seed):
    """The module in float64 and eval mode with every parameter drawn, biases and norms too."""
    rng = np.random.default_rng(seed)
    module = module.double().eval()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.from_numpy(rng.standard_normal(tuple(p.shape)) * (0.7 if p.ndim == 1 else 0.4)))
    return module


def inputs(*shapes, seed=1):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in shapes]


def ours(package, kind, source, *arguments, dtype="float64", **named):
    """Our module with the source's parameters, called."""
    P = load(package)
    config, params = P.import_params(source)
    module = getattr(P, kind)(config, dtype=dtype)
    if package == "backend_torch":
        module.eval()
    P.set_params(module, params)
    return back(module(*(to(package, x) for x in arguments), **to(package, named)))


def check_close(got, want, tolerance=1e-12):
    assert got.shape == want.shape
    assert np.abs(got - want).max() < tolerance * max(1.0, np.abs(want).max())


@pytest.fixture(autouse=True)
def x64():
    """JAX computes in float64 in this file."""
    jax = pytest.importorskip("jax")
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.mark.parametrize(
    ("package", "bias"), [("core_numpy", True), ("backend_torch", True), ("backend_jax", True), ("core_numpy", False)]
)
def test_torch_attention_with_its_blocked_masks(package, bias):
    """torch's masks say True = blocked, over (T, S) and over padded keys."""
    P = load(package)
    source = drawn(torch.nn.MultiheadAttention(W, H, bias=bias, batch_first=True), 1)
    (x,) = inputs((B, T, W))
    blocked = np.array([[0, 1, 1, 1], [0, 0, 1, 1], [1, 0, 0, 0], [0, 0, 0, 1]], bool)
    padded = np.array([[0, 0, 0, 0], [0, 0, 1, 1]], bool)
    y = torch.from_numpy(x)
    want, _ = source(y, y, y, attn_mask=torch.from_numpy(blocked), key_padding_mask=torch.from_numpy(padded))
    mask = back(P.combine_masks(P.from_blocked(to(package, blocked[None, None])),
                                P.from_blocked(to(package, padded[:, None, None]))))  # fmt: skip
    check_close(ours(package, "MultiHeadAttention", source, x, mask=mask), want.detach().numpy())


def test_torch_attention_reads_a_context():
    source = drawn(torch.nn.MultiheadAttention(W, H, batch_first=True), 2)
    x, context = inputs((B, T, W), (B, S, W))
    key = torch.from_numpy(context)
    padded = torch.from_numpy(np.arange(S) >= np.array([[5], [3]]))
    want, _ = source(torch.from_numpy(x), key, key, key_padding_mask=padded)
    got = ours("core_numpy", "MultiHeadAttention", source, x, context=context, context_lengths=np.array([5, 3]))
    check_close(got, want.detach().numpy())


def test_separate_projections_are_taken_as_they_are():
    fused = drawn(torch.nn.MultiheadAttention(W, H, batch_first=True), 3)
    source = torch.nn.MultiheadAttention(W, H, kdim=W + 1, batch_first=True).double().eval()
    with torch.no_grad():
        for name, weight in zip("qkv", fused.in_proj_weight.chunk(3), strict=True):
            setattr(source, f"{name}_proj_weight", torch.nn.Parameter(weight.clone()))
    source.kdim, source.in_proj_bias, source.out_proj = W, fused.in_proj_bias, fused.out_proj
    C = load("core_numpy")
    first, second = C.import_params(fused).params, C.import_params(source).params
    assert all(np.array_equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [({"add_bias_kv": True}, "bias_k"), ({"add_zero_attn": True}, "add_zero_attn"), ({"kdim": 7}, "kdim"),
     ({"vdim": 7}, "vdim")],
)  # fmt: skip
def test_what_ours_cannot_say_is_refused_by_name(arguments, word):
    C = load("core_numpy")
    with pytest.raises(ValueError, match=word):
        C.import_params(torch.nn.MultiheadAttention(W, H, **arguments))


def test_an_unknown_source_is_refused():
    C = load("core_numpy")
    with pytest.raises(TypeError, match="MultiheadAttention"):
        C.import_params(torch.nn.Linear(2, 3))
    with pytest.raises(ValueError, match="query"):
        C.import_params({"params": {"dense": {}}})
    layer = torch.nn.TransformerEncoderLayer(W, H, activation=torch.nn.functional.elu)
    with pytest.raises(ValueError, match="activation"):
        C.import_params(layer)


def unlike(module, **parts):
    """A torch module some of whose parts are set to others: path with __ for dots -> value."""
    for path, value in parts.items():
        *owners, name = path.split("__")
        owner = module
        for each in owners:
            owner = owner[int(each)] if each.isdigit() else getattr(owner, each)
        setattr(owner, name, value)
    return module


def transformer(**more):
    return torch.nn.Transformer(W, H, 1, 1, 14, batch_first=True, **more)


UNLIKE = {
    "eps of a block": (lambda: unlike(torch.nn.TransformerEncoderLayer(W, H), norm2__eps=1e-3), "eps"),
    "no final norm": (lambda: unlike(transformer(), decoder__norm=None), "decoder.norm"),
    "other stacks": (lambda: torch.nn.Transformer(W, H, 1, 2, 14), "num_decoder_layers"),
    "other layers": (lambda: unlike(transformer(), decoder__layers__0__norm_first=True), "layers of one kind"),
    "eps of a model": (lambda: unlike(transformer(), encoder__norm__eps=1e-3), "eps"),
}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("name", UNLIKE)
def test_what_one_number_cannot_say_of_two_parts_is_refused(name):
    make, word = UNLIKE[name]
    with pytest.raises(ValueError, match=word):
        load("core_numpy").import_params(make())


def test_rates_of_dropout_that_differ_are_said():
    layer = unlike(torch.nn.TransformerEncoderLayer(W, H, dropout=0.1), dropout1__p=0.2)
    with pytest.warns(UserWarning, match=r"dropout is set to 0: .* the source has \[0.1, 0.2\]"):
        assert load("core_numpy").import_params(layer).config.dropout == 0.0


def linen(**changes):
    """Variables of flax.linen's attention, by shapes: (in, heads, size) and (heads, size, out)."""
    shapes = {"query": (W, 2, 3), "key": (W, 2, 3), "value": (W, 2, 3), "out": (2, 3, W)} | changes
    return {"params": {name: {"kernel": np.zeros(shape)} for name, shape in shapes.items()}}


def test_other_widths_and_biases_of_some_projections_are_refused():
    C = load("core_numpy")
    assert C.import_params(linen()).config.width == W
    for name, shape, words in [("key", (7, 2, 3), "width of the keys"), ("value", (7, 2, 3), "width of the values"),
                               ("out", (2, 3, 7), "the width of the output")]:  # fmt: skip
        with pytest.raises(ValueError, match=words):
            C.import_params(linen(**{name: shape}))
    some = linen()
    some["params"]["query"]["bias"] = np.zeros((2, 3))
    with pytest.raises(ValueError, match="query, key and value have one each or none"):
        C.import_params(some)


LAYERS = {
    "last": {"norm_first": False, "activation": "relu", "layer_norm_eps": 3e-3},
    "first": {"norm_first": True, "activation": "gelu", "layer_norm_eps": 2e-3, "bias": False},
}


@pytest.mark.parametrize("package", QUICK)
@pytest.mark.parametrize("name", LAYERS)
def test_torch_encoder_layer(package, name):
    P = load(package)
    source = drawn(torch.nn.TransformerEncoderLayer(W, H, 14, dropout=0.2, batch_first=True, **LAYERS[name]), 4)
    (x,) = inputs((B, T, W))
    blocked = np.triu(np.ones((T, T), bool), 1)
    want = source(torch.from_numpy(x), src_mask=torch.from_numpy(blocked)).detach().numpy()
    mask = back(P.from_blocked(to(package, blocked)))
    assert P.import_params(source).config.dropout == 0.2
    check_close(ours(package, "Block", source, x, mask=mask), want)


@pytest.mark.parametrize("package", QUICK)
@pytest.mark.parametrize("name", LAYERS)
def test_torch_decoder_layer(package, name):
    """Its second norm belongs to the cross-attention, ours is the third."""
    P = load(package)
    source = drawn(torch.nn.TransformerDecoderLayer(W, H, 14, batch_first=True, **LAYERS[name]), 5)
    x, context = inputs((B, T, W), (B, S, W))
    blocked = np.triu(np.ones((T, T), bool), 1)
    padded = torch.from_numpy(np.arange(S) >= np.array([[5], [2]]))
    want = source(torch.from_numpy(x), torch.from_numpy(context), tgt_mask=torch.from_numpy(blocked),
                  memory_key_padding_mask=padded).detach().numpy()  # fmt: skip
    mask = back(P.from_blocked(to(package, blocked)))
    got = ours(package, "Block", source, x, mask=mask, context=context, context_lengths=np.array([5, 2]))
    check_close(got, want)


# torch says that an odd number of heads keeps it from a faster path.
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("package", QUICK)
@pytest.mark.parametrize("first", [True, False])
def test_torch_transformer_with_embeddings_put_in(package, first):
    P = load(package)
    source = drawn(torch.nn.Transformer(W, H, 2, 2, 14, batch_first=True, norm_first=first), 6)
    config, params = P.import_params(source)
    config = config.replace(vocab=9)
    table, other = inputs((9, W), (9, W))
    model = P.Transformer(config, dtype="float64")
    P.set_params(model, params | {"encoder.embedding.weight": table, "decoder.embedding.weight": other})
    rng = np.random.default_rng(7)
    source_ids, ids = rng.integers(0, 9, (B, S)), rng.integers(0, 9, (B, T))
    mask = torch.nn.Transformer.generate_square_subsequent_mask(T, dtype=torch.float64)
    padded = torch.from_numpy(np.arange(S) >= np.array([[5], [3]]))
    pad = torch.zeros(padded.shape, dtype=torch.float64).masked_fill(padded, -torch.inf)
    want = source(torch.from_numpy(table[source_ids]), torch.from_numpy(other[ids]), tgt_mask=mask,
                  src_key_padding_mask=pad, memory_key_padding_mask=pad).detach().numpy()  # fmt: skip
    if package == "backend_torch":
        model.eval()
    got = back(model(to(package, ids), context=to(package, source_ids), context_lengths=to(package, np.array([5, 3]))))
    check_close(got, want)


@pytest.mark.parametrize("package", PACKAGES)
def test_nnx_attention_with_its_masks(package):
    """flax says True = may attend, as we do, and keeps its heads apart: (in, heads, size)."""
    nnx = pytest.importorskip("flax.nnx")
    jnp = pytest.importorskip("jax.numpy")
    P = load(package)
    if "num_kv_heads" not in inspect.signature(nnx.MultiHeadAttention.__init__).parameters:
        pytest.skip("this flax has no grouped heads")
    source = nnx.MultiHeadAttention(num_heads=4, num_kv_heads=2, in_features=W, qkv_features=20, decode=False,
                                    param_dtype=jnp.float64, dropout_rate=0.3, rngs=nnx.Rngs(0))  # fmt: skip
    rng = np.random.default_rng(8)
    for part in (source.query, source.key, source.value, source.out):
        part.bias[...] = jnp.asarray(rng.standard_normal(part.bias[...].shape))
    (x,) = inputs((B, T, W))
    mask = np.array([[1, 0, 1, 0], [1, 1, 0, 0], [0, 1, 1, 1], [1, 0, 0, 1]], bool)
    want = np.asarray(source(jnp.asarray(x), mask=jnp.asarray(mask)[None, None], deterministic=True))
    assert P.import_params(source).config.dropout == 0.3
    check_close(ours(package, "MultiHeadAttention", source, x, mask=mask), want)


def test_nnx_norm_of_queries_and_keys_is_refused():
    nnx = pytest.importorskip("flax.nnx")
    source = nnx.MultiHeadAttention(num_heads=3, in_features=W, decode=False, normalize_qk=True, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="normalize_qk"):
        load("core_numpy").import_params(source)


def test_linen_variables():
    linen = pytest.importorskip("flax.linen")
    jax = pytest.importorskip("jax")
    (x,) = inputs((B, T, W))
    module = linen.MultiHeadDotProductAttention(num_heads=3, qkv_features=15, param_dtype=np.float64,
                                                bias_init=jax.nn.initializers.normal(0.5))  # fmt: skip
    variables = module.init(jax.random.key(0), x)
    mask = np.tril(np.ones((T, T), bool))
    want = np.asarray(module.apply(variables, x, mask=mask[None, None]))
    check_close(ours("core_numpy", "MultiHeadAttention", variables, x, mask=mask), want)
    check_close(ours("core_numpy", "MultiHeadAttention", variables["params"], x, mask=mask), want)


@pytest.mark.parametrize("bias", [True, False])
def test_keras_attention_with_its_masks(bias):
    os.environ.setdefault("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras")
    source = keras.layers.MultiHeadAttention(3, 5, use_bias=bias, dtype="float64", dropout=0.1)
    (x,) = inputs((B, T, W))
    with pytest.raises(ValueError, match="built"):
        load("core_numpy").import_params(source)
    source(x, x)
    rng = np.random.default_rng(9)
    for variable in source.weights:
        variable.assign(rng.standard_normal(variable.shape) * 0.4)
    mask = np.array([[1, 0, 1, 0], [1, 1, 0, 0], [0, 1, 1, 1], [1, 0, 0, 1]], bool)
    want = keras.ops.convert_to_numpy(source(x, x, attention_mask=np.broadcast_to(mask, (B, T, T))))
    check_close(ours("core_numpy", "MultiHeadAttention", source, x, mask=mask), want)


def test_keras_attention_over_other_axes_or_with_a_gate_is_refused():
    os.environ.setdefault("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras")
    C = load("core_numpy")
    over_two = keras.layers.MultiHeadAttention(3, 5, attention_axes=(1, 2))
    over_two(*[np.zeros((B, T, 2, W), np.float32)] * 2)
    with pytest.raises(ValueError, match="attention_axes"):
        C.import_params(over_two)
    gated = keras.layers.MultiHeadAttention(3, 5)
    gated(*[np.zeros((B, T, W), np.float32)] * 2)
    plain = gated.get_config
    gated.get_config = lambda: {**plain(), "use_gate": True}
    with pytest.raises(ValueError, match="use_gate"):
        C.import_params(gated)


def test_bfloat16_keeps_its_bits():
    source = torch.nn.MultiheadAttention(W, H, dtype=torch.bfloat16)
    weight = load("core_numpy").import_params(source).params["output.weight"]
    assert weight.dtype.name == "bfloat16"
    assert np.array_equal(weight.astype(np.float32), source.out_proj.weight.detach().float().numpy().T)
