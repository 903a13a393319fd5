"""backend_jax's attention against the reference, in every kernel and every way of cutting the work."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import ml_dtypes  # noqa: E402

import backend_jax  # noqa: E402
import core_numpy  # noqa: E402
from conformance.tests.inputs_attention import check_close, normal  # noqa: E402
from conformance.tests.jax_attention import INF, KEY, NAN, OWN, SMALL, check_agreement, cut, inputs  # noqa: E402
from conformance.tests.mix_attention import ROWS, arguments, identity  # noqa: E402

# ---------------------------------------------------------------- every keyword with every other


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=identity)
@pytest.mark.parametrize("way", [*SMALL, "dense"])
def test_every_two_keywords_together_agree_with_the_reference_and_its_gradients(row, way, monkeypatch):
    with cut(way, monkeypatch):
        check_agreement(*arguments(row), "dense" if way == "dense" else "blockwise")


@pytest.mark.parametrize("n", range(0, len(ROWS), 6))
def test_some_keywords_together_agree_with_the_reference_and_its_gradients(n, monkeypatch):
    way = (*SMALL, "dense")[n // 6 % 6]
    with cut(way, monkeypatch):
        check_agreement(*arguments(ROWS[n]), "dense" if way == "dense" else "blockwise")


BASE = {
    "full": {},
    "causal": {"causal": True, "q_offset": -4},
    "window": {"window": (3, 1), "q_offset": 2},
    "segments": {
        "q_segments": np.array([[0, 0, 1, 1, 1, 2, -1], [5, 5, 5, -1, 7, 7, 7]]),
        "kv_segments": np.array([[0, 1, 1, 1, 1, 1, 2, 2, 3, -1, -1], [-1, 5, 5, 5, 5, 5, 7, 7, 7, 7, 8]]),
    },
    "ragged": {"causal": True, "q_offset": np.array([6, -3]), "kv_lengths": np.array([11, 4])},
    "padding": {"kv_lengths": np.array([0, 9]), "sinks": np.array([0.5, -1.0, 2.0, 0.0])},
    "bias": {"bias": normal(1, 4, 1, 11), "softcap": 1.5, "mask": normal(2, 1, 7, 11) < 0.8},
    "dropout": {"dropout_rate": 0.4, "dropout_key": KEY, "window": (None, 2), "q_offset": 1},
}


@pytest.mark.parametrize("name", BASE)
@pytest.mark.parametrize("way", ["whole", "grouped"])
def test_few_scores_whose_weights_are_kept_agree_with_the_reference_and_its_gradients(name, way, monkeypatch):
    q, k, v = inputs(T=7, S=11, dtype=np.float64)
    with cut(way, monkeypatch):
        check_agreement({"q": q, "k": k, "v": v}, BASE[name], "blockwise")


@pytest.mark.parametrize("way", ["whole", "unrolled"])
def test_a_sink_of_minus_infinity_beside_no_key_has_no_gradient(way, monkeypatch):
    q, k, v = inputs(dtype=np.float64)
    more = {"sinks": np.array([-INF, 0.5, 2.0, -INF]), "kv_lengths": np.array([0, 4])}
    with cut(way, monkeypatch):
        check_agreement({"q": q, "k": k, "v": v}, more, "blockwise")


@pytest.mark.parametrize("name", BASE)
@pytest.mark.slow
@pytest.mark.parametrize("way", ["looped", "chunks"])
def test_many_blocks_agree_with_the_reference_and_its_gradients(name, way, monkeypatch):
    q, k, v = inputs(T=7, S=11, dtype=np.float64)
    with cut(way, monkeypatch):
        check_agreement({"q": q, "k": k, "v": v}, BASE[name], "blockwise")


@pytest.mark.parametrize("restriction", [{"causal": True}, {"window": (300, 20)}, {"kv_lengths": np.array([513])}])
def test_blocks_of_the_real_size_agree_with_the_reference(restriction):
    q, k, v = inputs(B=1, H=2, G=1, T=2311, S=2311, D=3, Dv=2)
    got, lse = backend_jax.attention_with_lse(q, k, v, **restriction, kernel="blockwise")
    want, want_lse = core_numpy.attention_with_lse(q, k, v, **restriction)
    check_close(got, want, 1e-5)
    check_close(lse, want_lse, 1e-5)


# ---------------------------------------------------------------- dtypes


@pytest.mark.parametrize("kernel", [*OWN, "xla"])
@pytest.mark.parametrize(
    ("dtype", "units"),
    [(np.float16, 1), (ml_dtypes.bfloat16, 1), (np.float32, 16)],
    ids=["float16", "bfloat16", "float32"],
)
def test_low_precision_is_computed_in_float32_and_rounded_once(dtype, units, kernel):
    if kernel == "xla" and dtype == np.float16:
        with pytest.raises(ValueError, match="compile for GPUs only"):
            backend_jax.attention(*inputs(D=8, Dv=8, dtype=dtype), kernel=kernel)
        return
    if kernel == "xla" and dtype != np.float32:
        units = 4  # the library rounds the weights as well
    q, k, v = inputs(T=5, D=8, Dv=8, dtype=dtype)
    got = backend_jax.attention(q, k, v, causal=True, kernel=kernel)
    assert got.dtype == dtype
    eps = float(ml_dtypes.finfo(dtype).eps)
    want = core_numpy.attention(*(x.astype(np.float64) for x in (q, k, v)), causal=True)
    assert np.abs(np.asarray(got).astype(np.float64) - want).max() <= units * eps * np.abs(want).max()


def test_lse_is_float32_for_low_precision_and_float64_for_float64():
    q, k, v = inputs(dtype=ml_dtypes.bfloat16)
    assert backend_jax.attention_with_lse(q, k, v)[1].dtype == jnp.float32
    with jax.enable_x64(True):
        q, k, v = inputs(dtype=np.float64)
        assert backend_jax.attention_with_lse(q, k, v)[1].dtype == jnp.float64


def test_float64_without_x64_is_refused_and_says_how_to_turn_it_on():
    q, k, v = inputs()
    with pytest.raises(TypeError, match="jax_enable_x64"):
        backend_jax.attention(*inputs(dtype=np.float64))
    with pytest.raises(TypeError, match="bias is float64"):
        backend_jax.attention(q, k, v, bias=np.zeros((3, 5)))
    with pytest.raises(TypeError, match="jax_enable_x64"):
        backend_jax.from_numpy(np.zeros(2))
    with pytest.raises(TypeError, match="dtype is float64"):
        backend_jax.from_numpy(np.zeros(2, np.float32), dtype="float64")
    with pytest.raises(TypeError, match="jax_enable_x64"):
        backend_jax.merge_attention([np.zeros((2, 3))], [np.zeros(2)])


def test_a_float64_or_float32_bias_serves_bfloat16_queries_in_the_accumulation_dtype():
    q, k, v = inputs(dtype=ml_dtypes.bfloat16)
    bias = np.full((3, 5), -np.inf)
    bias[:, 1] = 1.0  # minus infinity and one: -65504 and the like would not do
    with jax.enable_x64(True):
        got = backend_jax.attention(q, k, v, bias=bias)
    want = np.repeat(v[:, :, 1:2], 2, axis=1)
    np.testing.assert_array_equal(np.asarray(got), np.broadcast_to(want, got.shape))


def test_bfloat16_survives_numpy_bit_for_bit():
    x = np.array([1.0, 1.0078125, 3.39e38, -0.0, NAN]).astype(ml_dtypes.bfloat16)
    back = backend_jax.to_numpy(backend_jax.from_numpy(x))
    assert back.dtype == x.dtype
    np.testing.assert_array_equal(back.view(np.uint16), x.view(np.uint16))


def test_from_numpy_copies_and_values_reads_only_what_is_there():
    x = np.arange(3, dtype=np.int32)
    kept = backend_jax.from_numpy(x)
    x[0] = 9
    assert backend_jax.to_numpy(kept).tolist() == [0, 1, 2]
    assert backend_jax.arrays.values(kept).tolist() == [0, 1, 2]
    seen = []
    jax.jit(lambda x: seen.append(backend_jax.arrays.values(x)) or x)(kept)
    assert seen == [None]
    assert backend_jax.describe()["framework"] == "jax"
    assert backend_jax.wait({"a": kept})["a"] is kept


@pytest.mark.parametrize("length", [4, 600])
def test_a_bias_of_the_least_number_hides_nothing(length):
    """What many programs write for -inf: a row that has nothing else is a mean, and only -inf leaves it out."""
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((1, 2, length, 8)).astype("float32") for _ in range(3))
    bias = np.full((1, 2, length, length), np.finfo("float32").min, "float32")
    bias[:, :, 0], bias[:, :, 1, 1:] = 0.0, -np.inf
    bias[:, :, 2] = -np.inf
    for sinks in (None, np.array([0.5, -np.inf], "float32")):
        for jitted in (False, True):
            call = jax.jit(backend_jax.attention) if jitted else backend_jax.attention
            expected = core_numpy.attention(q, k, v, bias=bias, sinks=sinks)
            np.testing.assert_allclose(np.asarray(call(q, k, v, bias=bias, sinks=sinks)), expected, atol=2e-6)
    grads = jax.grad(lambda *x: (backend_jax.attention(*x[:3], bias=x[3]) * v).sum(), argnums=(0, 1, 2, 3))(
        q, k, v, bias
    )
    wanted = core_numpy.gradients.attention_vjp(v, q, k, v, bias=bias)
    for name, mine in zip(("q", "k", "v", "bias"), grads, strict=True):
        np.testing.assert_allclose(np.asarray(mine), wanted[name], atol=2e-5, err_msg=name)
