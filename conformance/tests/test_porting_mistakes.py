"""Who carries a model from one framework to another is told what is wrong, and the cure."""

from __future__ import annotations

import copy
import functools
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("flax")

import jax.numpy as jnp  # noqa: E402
from flax import nnx  # noqa: E402
from torch import nn  # noqa: E402

import backend_jax as J  # noqa: E402
import backend_torch as P  # noqa: E402
import core_numpy as C  # noqa: E402
from core_numpy.contract.parameters import model_parameters  # noqa: E402

CONFIG = C.ModelConfig(vocab=9, width=8, heads=2, layers=1, hidden=12, max_length=6)
TOKENS = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])
Q = np.ones((2, 2, 4, 4), np.float32)
PACKAGES = (C, P, J)


def _model(package: Any, **fields: Any) -> Any:
    return package.Transformer(CONFIG.replace(**fields), seed=0)


def _tensors(*arrays: np.ndarray) -> list[Any]:
    return [torch.from_numpy(x) for x in arrays]


def test_numpy_arrays_are_refused_by_torch_by_the_arguments_name():
    model, block = _model(P), P.Block(CONFIG.block(0))
    tokens, q = _tensors(TOKENS, Q)
    x, padding = torch.ones(2, 4, 8), np.ones((2, 1, 1, 4), bool)
    calls = {
        "tokens": [lambda: model(TOKENS), lambda: P.generate(model, TOKENS, max_new=1)],
        "mask": [lambda: model(tokens, mask=padding), lambda: P.attention(q, q, q, mask=padding)],
        "kv_lengths": [
            lambda: model(tokens, kv_lengths=np.array([4, 2])),
            lambda: block(x, kv_lengths=np.array([4, 2])),
        ],
        "lengths": [lambda: P.generate(model, tokens, max_new=1, lengths=np.array([4, 2]))],
        "q": [lambda: P.attention(Q, Q, Q), lambda: P.attention_weights(Q, Q), lambda: P.attention_with_lse(Q, Q, Q)],
        "v": [lambda: P.attention(q, q, Q)],
        "sinks": [lambda: P.attention(q, q, q, sinks=np.ones(2, np.float32))],
        "q_offset": [lambda: P.attention(q, q, q, causal=True, q_offset=np.array([0, 1]))],
        "x": [
            lambda: block(x.numpy()),
            lambda: P.FeedForward(CONFIG.block(0))(x.numpy()),
            lambda: P.MultiHeadAttention(CONFIG.block(0))(x.numpy()),
        ],
    }
    for name, each in calls.items():
        for call in each:
            with pytest.raises(
                TypeError, match=rf"^{name} must be a tensor of torch; got an array of numpy.*from_numpy"
            ):
                call()
    with pytest.raises(TypeError, match="tokens must be a tensor of torch; got an array of jax, int32"):
        model(J.from_numpy(TOKENS))


def test_torchs_tensors_are_refused_by_jax_which_takes_numpys():
    model, block = _model(J), J.Block(CONFIG.block(0))
    tokens, q = _tensors(TOKENS, Q)
    x = torch.ones(2, 4, 8)
    calls = {
        "tokens": [lambda: model(tokens), lambda: J.generate(model, tokens, max_new=1)],
        "mask": [lambda: model(TOKENS, mask=torch.ones(4, 4, dtype=torch.bool))],
        "q": [lambda: J.attention(q, q, q), lambda: J.attention_weights(q, q), lambda: J.attention_with_lse(q, q, q)],
        "x": [
            lambda: block(x),
            lambda: J.FeedForward(CONFIG.block(0))(x),
            lambda: J.MultiHeadAttention(CONFIG.block(0))(x),
        ],
    }
    for name, each in calls.items():
        for call in each:
            with pytest.raises(TypeError, match=rf"^{name} must be an array of JAX or NumPy; got an array of torch"):
                call()
    sinks = nnx.Param(jnp.ones(2))  # a variable counts as its array
    got = J.attention(Q, Q, Q, sinks=sinks)
    np.testing.assert_array_equal(got, J.attention(Q, Q, Q, sinks=jnp.ones(2)))


def test_another_packages_model_is_refused_by_name():
    batch = {"tokens": TOKENS, "targets": TOKENS}
    for package in PACKAGES:
        for other in PACKAGES:
            if other is package:
                continue
            model, name = _model(other), package.__name__
            calls = (
                lambda: package.get_params(model),  # noqa: B023
                lambda: package.set_params(model, {}),  # noqa: B023
                lambda: package.loss_and_gradients(model, batch),  # noqa: B023
                lambda: package.Trainer(model, C.TrainConfig(steps=1)),  # noqa: B023
            )
            for call in calls:
                with pytest.raises(TypeError, match=rf"must be one of {name}'s.*got Transformer of {other.__name__}: "):
                    call()
        with pytest.raises(TypeError, match=r"module must be one of .*; got Linear of torch: .*import_params"):
            package.get_params(nn.Linear(2, 2))


def test_set_params_takes_torchs_parameters_and_bfloat16_as_they_come():
    for dtype in ("float32", "bfloat16"):
        source = P.Transformer(CONFIG, seed=1, dtype=dtype)
        params: Any = {name: nn.Parameter(P.from_numpy(x)) for name, x in P.get_params(source).items()}
        for package in PACKAGES:
            model = package.Transformer(CONFIG, seed=0, dtype=dtype)
            package.set_params(model, params)
            for name, want in P.get_params(source).items():
                np.testing.assert_array_equal(
                    package.get_params(model)[name].astype(np.float32), want.astype(np.float32)
                )


def test_params_that_do_not_fit_are_told_what_would():
    for package in PACKAGES:
        model = _model(package)
        own = package.get_params(model)
        turned = own | {"blocks.0.ffn.up.weight": own["blocks.0.ffn.up.weight"].T}
        with pytest.raises(
            ValueError, match=r"must have shape \(8, 12\); got \(12, 8\): transposed it would fit, .*\(in, out\)"
        ):
            package.set_params(model, turned)
        half = {name: x.astype(np.float16) for name, x in own.items()}
        with pytest.raises(ValueError, match=r"; make the module with dtype='float16', or convert the arrays$"):
            package.set_params(model, half)
        with pytest.raises(ValueError, match=r"norm.weight must have dtype float32; got int64$"):
            package.set_params(model, own | {"norm.weight": np.ones(8, np.int64)})


def test_many_names_that_do_not_fit_share_a_sentence():
    for package in PACKAGES:
        model = _model(package)
        own = package.get_params(model)
        theirs = {f"h.{name}": x for name, x in own.items()}
        with pytest.raises(ValueError) as caught:
            package.set_params(model, theirs)
        first, count = next(iter(own)), len(own)
        assert f"{first}, positions.weight, " in str(caught.value)
        assert f"and {count - 6} more are missing; h.{first}, " in str(caught.value)
        assert str(caught.value).endswith(f"and {count - 6} more are not parameters of this module")
        few = {name: x for n, (name, x) in enumerate(own.items()) if n >= 4}
        with pytest.raises(ValueError, match=r"embedding.weight, positions.weight, .* and \S+ are missing$"):
            package.set_params(model, few)


def test_a_field_that_a_configuration_does_not_have_is_told_the_near_one():
    with pytest.raises(
        TypeError, match=r"ModelConfig has no field 'num_heads' \(did you mean 'heads'\?\); its fields are width"
    ):
        C.ModelConfig(vocab=9, width=8, num_heads=2, layers=1)  # type: ignore[call-arg]
    with pytest.raises(
        TypeError, match=r"no field 'clip' \(did you mean 'clip_norm'\?\); its fields are optimizer, steps"
    ):
        C.TrainConfig(clip=1.0)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"no field 'zzz'; its fields are kind, factor"):
        C.RotaryScaling(kind="linear", zzz=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'heads'"):
        C.BlockConfig(width=8)  # type: ignore[call-arg]
    for twin in (copy.deepcopy(CONFIG), pickle.loads(pickle.dumps(CONFIG)), CONFIG.replace(layers=1)):
        assert twin == CONFIG


def test_a_dtype_given_as_an_object_is_told_its_name():
    for package in PACKAGES:
        for dtype in (np.float32, torch.float32, jnp.float32, np.dtype("float32")):
            with pytest.raises(ValueError, match=r"dtype must be one of .* \(did you mean 'float32'\?\)"):
                package.Transformer(CONFIG, dtype=dtype)
        with pytest.raises(ValueError, match=r"got torch.int8$"):
            package.Transformer(CONFIG, dtype=torch.int8)


def test_masks_of_torch_and_of_padding_are_told_their_form():
    for package in PACKAGES:
        model, put = _model(package), getattr(package, "from_numpy", np.asarray)
        tokens, real = put(TOKENS[:, :3]), np.array([[True, True, True], [True, False, False]])
        with pytest.raises(
            ValueError,
            match=r"mask must broadcast to \(3, 3\).*got shape \(2, 3\); of .* make mask\[:, None, None, :\]",
        ):
            model(tokens, mask=put(real))
        got = model(tokens, mask=put(real)[:, None, None, :])
        np.testing.assert_array_equal(got.detach() if package is P else got, *(  # the cure is one
            x.detach() if package is P else x for x in [model(tokens, kv_lengths=put(np.array([3, 1])))]
        ))  # fmt: skip
        added = nn.Transformer.generate_square_subsequent_mask(3).numpy()
        with pytest.raises(TypeError, match=r"where they are 0 and -inf alone, mask == 0 says the same"):
            model(tokens, mask=put(added))
        assert (np.asarray(put(added) == 0) == np.asarray(package.causal_mask(3))).all()


def test_rotary_tables_that_hold_each_angle_twice_are_told_so():
    doubled = np.ones((4, 4), np.float32)
    for package in PACKAGES:
        put = getattr(package, "from_numpy", np.asarray)
        with pytest.raises(
            ValueError, match="got 8 features: of a table that holds each angle twice, give the first half"
        ):
            package.apply_rotary(put(Q), put(doubled), put(doubled))
        with pytest.raises(ValueError, match=r"got 6 features$"):
            package.apply_rotary(put(Q), put(doubled[:, :3]), put(doubled[:, :3]))


def test_an_imported_module_says_where_its_readable_parts_are():
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    many = nn.ModuleList([nn.MultiheadAttention(8, 2) for _ in range(6)])
    for package in PACKAGES:
        with pytest.raises(TypeError, match=r"got TransformerEncoder, .*give them one by one \(layers.0, layers.1\)$"):
            package.import_params(stack)
        with pytest.raises(TypeError, match=r"one by one \(0, 1, 2, 3 and 2 more\)$"):
            package.import_params(many)
        with pytest.raises(TypeError, match=r"got Linear$"):
            package.import_params(nn.Linear(2, 2))
        with pytest.raises(ValueError, match="must be a module of torch itself; got a state_dict"):
            package.import_params(layer.state_dict())
        with pytest.raises(ValueError, match="must hold query, key, value and out"):
            package.import_params({})
        with pytest.raises(ValueError, match="must have values; got a module on the meta device"):
            package.import_params(nn.MultiheadAttention(8, 2, device="meta"))


def test_an_activation_in_a_partial_is_read():
    for approximate, want in (("tanh", "gelu_tanh"), ("none", "gelu")):
        activation = functools.partial(nn.functional.gelu, approximate=approximate)
        layer = nn.TransformerEncoderLayer(8, 2, 12, activation=activation, batch_first=True, dropout=0.0).eval()
        config, params = J.import_params(layer)
        assert config.activation == want
        block = J.Block(config)
        J.set_params(block, params)
        x = np.random.default_rng(0).normal(size=(2, 4, 8)).astype(np.float32)
        np.testing.assert_allclose(block(x), layer(torch.from_numpy(x)).detach(), atol=2e-6)
    odd = functools.partial(nn.functional.relu, inplace=True)
    with pytest.raises(ValueError, match=r"activation must not be functools.partial.*known are relu, gelu and silu"):
        J.import_params(nn.TransformerEncoderLayer(8, 2, 12, activation=odd))


def test_the_page_on_porting_has_every_parameters_name():
    page = Path(__file__).resolve().parents[2] / "docs" / "porting.md"
    if not page.exists():
        pytest.skip("the documentation is in the repository, not in an installed package")
    section = page.read_text("utf-8").split("## Names of parameters")[1].split("\n## ")[0]
    rich = C.ModelConfig(
        vocab=9, width=8, heads=2, layers=1, positions="relative", embedding_norm=True, norm_place="sandwich",
        activation="swiglu", qk_norm=True, sinks=True, head_bias=True,
    )  # fmt: skip
    pair = C.ModelConfig(vocab=9, width=8, heads=2, layers=1, kind="encoder_decoder")
    written = set(re.findall(r"[a-z_0-9]+", " ".join(re.findall("`([^`]*)`", section))))
    names = {part for config in (CONFIG, rich, pair) for name in model_parameters(config) for part in name.split(".")}
    assert len(names) > 20
    assert names <= written
