"""Attention in JAX: faults that others reported, and numbers one can redo by hand."""

from __future__ import annotations

import importlib
from functools import partial

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import backend_jax  # noqa: E402
import core_numpy  # noqa: E402
from conformance.tests.inputs_attention import check_close, normal  # noqa: E402
from conformance.tests.jax_attention import INF, KEY, NAN, OWN, SMALL, check_agreement, cut, inputs  # noqa: E402


@pytest.mark.parametrize("kernel", OWN)
@pytest.mark.parametrize("how", ["mask", "bias"])
def test_a_dead_query_gives_zeros_and_leaves_the_gradients_of_others_alone(how, kernel):
    """Permitted keys {0}, {}, {0, 1}; the dead row holds NaN, and so does what comes back for it."""
    mask = np.array([[1, 0, 0], [0, 0, 0], [1, 1, 0]], bool)
    q, k, v = inputs(B=1, H=1, G=1, T=3, S=3, D=4, Dv=4)
    q[0, 0, 1] = NAN
    keywords = {"mask": mask} if how == "mask" else {"bias": np.where(mask, 0, -INF).astype(np.float32)}
    out, back = jax.vjp(lambda *x: backend_jax.attention(*x, **keywords, kernel=kernel), q, k, v)
    assert not np.asarray(out[0, 0, 1]).any()
    check_close(out[0, 0, 0], v[0, 0, 0], 1e-6)
    dout = np.ones(out.shape, np.float32)
    dout[0, 0, 1] = NAN if kernel == "blockwise" else 0.0
    gradients = back(jnp.asarray(dout))
    assert all(np.isfinite(np.asarray(x)).all() for x in gradients)
    assert not np.asarray(gradients[0][0, 0, 1]).any()
    weights = backend_jax.attention_weights(q, k, **keywords)
    assert not np.asarray(weights[0, 0, 1]).any()


@pytest.mark.parametrize("kernel", OWN)
@pytest.mark.parametrize("hidden", ["mask", "bias", "kv_lengths", "segments", "window"])
def test_nothing_in_a_key_that_no_query_sees_reaches_outputs_or_gradients(hidden, kernel):
    keywords = {
        "mask": {"mask": np.array([[True, True, False]])},
        "bias": {"bias": np.array([[0, 0, -INF]], np.float32)},
        "kv_lengths": {"kv_lengths": np.array([2])},
        "segments": {"q_segments": np.array([[1, 1]]), "kv_segments": np.array([[1, 1, -1]])},
        "window": {"window": (2, 0), "q_offset": 0},
    }[hidden]
    q, k, v = inputs(B=1, H=1, G=1, T=2, S=3, D=4, Dv=4)
    loss = lambda *x: (backend_jax.attention(*x, **keywords, kernel=kernel) ** 2).sum()  # noqa: E731
    f = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    clean = f(q, k, v)
    for poison in (NAN, INF, 1e30):
        bad_k, bad_v = k.copy(), v.copy()
        bad_k[..., 2, :] = bad_v[..., 2, :] = poison
        for got, want in zip(jax.tree.leaves(f(q, bad_k, bad_v)), jax.tree.leaves(clean), strict=True):
            np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    assert not np.asarray(clean[1][1][..., 2, :]).any()


@pytest.mark.parametrize("way", SMALL)
def test_padding_stays_out_however_the_work_is_cut(way, monkeypatch):
    q, k, v = inputs(T=6, S=8, dtype=np.float64)
    k[1, :, 3:], v[1, :, 3:] = NAN, INF
    k[0, :, 7], v[0, :, 7] = INF, NAN
    keywords = {"kv_lengths": np.array([7, 3]), "causal": True, "q_offset": 1}
    with cut(way, monkeypatch):
        check_agreement({"q": q, "k": k, "v": v}, keywords, "blockwise")


@pytest.mark.parametrize("kernel", OWN)
def test_hidden_keys_that_change_leave_permitted_rows_bit_equal(kernel):
    q, k, v = inputs(T=4, S=4)
    f = partial(backend_jax.attention, causal=True, kernel=kernel)
    before = np.asarray(f(q, k, v))
    k[..., 3, :], v[..., 3, :] = 1e6, -1e6
    after = np.asarray(f(q, k, v))
    np.testing.assert_array_equal(before[..., :3, :], after[..., :3, :])
    assert (before[..., 3, :] != after[..., 3, :]).all()


@pytest.mark.parametrize("kernel", OWN)
def test_zero_scores_and_an_identity_for_values_show_the_mask_normalised(kernel):
    """T2 S5: top-left [1, 0, 0, 0, 0], [1/2, 1/2, 0, 0, 0]; bottom-right four quarters, then five fifths."""
    q, k, v = np.zeros((1, 2, 3), np.float32), np.zeros((1, 5, 3), np.float32), np.eye(5, dtype=np.float32)[None]
    f = partial(backend_jax.attention, q, k, v, causal=True, kernel=kernel)
    check_close(f(q_offset=0)[0], [[1, 0, 0, 0, 0], [0.5, 0.5, 0, 0, 0]], 1e-6)
    check_close(f(q_offset=3)[0], [[0.25] * 4 + [0], [0.2] * 5], 1e-6)


@pytest.mark.parametrize("kernel", [*OWN, "xla"])
def test_query_heads_share_key_heads_in_blocks_of_neighbours(kernel):
    q, k = np.zeros((1, 4, 2, 2), np.float32), np.zeros((1, 2, 2, 2), np.float32)
    v = np.broadcast_to(np.eye(2, dtype=np.float32)[None, :, None], k.shape)
    got = np.asarray(backend_jax.attention(q, k, v, kernel=kernel))
    assert got[0, :, 0].tolist() == [[1, 0], [1, 0], [0, 1], [0, 1]]


def test_the_soft_cap_comes_before_the_mask():
    """Scores 0, cap 1: after the mask it would let exp(-1) / (1 + exp(-1)) of the hidden key through."""
    one = np.zeros((1, 1), np.float32)
    keys, values = np.zeros((2, 1), np.float32), np.array([[1.0], [1e6]], np.float32)
    for kernel in OWN:
        got = backend_jax.attention(one, keys, values, mask=np.array([[True, False]]), softcap=1.0, kernel=kernel)
        assert float(got[0, 0]) == 1.0


@pytest.mark.parametrize("kernel", OWN)
@pytest.mark.parametrize("scale", [0.0, -2.5, 1.0])
def test_the_scale_is_taken_as_it_is_zero_and_negative_ones_too(scale, kernel):
    q, k, v = inputs()
    want = core_numpy.attention(q, k, v, scale=scale)
    check_close(jax.jit(partial(backend_jax.attention, scale=scale, kernel=kernel))(q, k, v), want, 1e-6)
    check_close(backend_jax.attention(q, k, v, scale=scale, kernel=kernel), want, 1e-6)


@pytest.mark.parametrize("kernel", OWN)
def test_scores_of_ten_thousand_neither_overflow_nor_vanish(kernel):
    q, k, v = inputs(T=2, S=3, D=1)
    k = np.array([1e4, -1e4, 1e4 - 1], np.float32).reshape(1, 1, 3, 1) * np.ones((2, 2, 1, 1), np.float32)
    q = np.ones_like(q)
    got = backend_jax.attention(q, k, v, scale=1.0, kernel=kernel)
    check_close(got, core_numpy.attention(q, k, v, scale=1.0), 1e-6)
    # A hidden score far above the visible ones must not spoil the gradient.
    grads = jax.grad(
        lambda q: backend_jax.attention(q, k, v, scale=1.0, mask=np.array([[False, True, True]]), kernel=kernel).sum()
    )(q)
    assert np.isfinite(np.asarray(grads)).all()


@pytest.mark.parametrize("kernel", OWN)
def test_a_hundred_thousand_keys_are_summed_without_loss(kernel):
    S = 100_000
    q, k = np.zeros((1, 1, 2), np.float32), np.zeros((1, S, 2), np.float32)
    v = np.ones((1, S, 1), np.float32)
    v[:, ::2] = 3.0
    out, lse = backend_jax.attention_with_lse(q, k, v, kernel=kernel)
    # One product over all keys is as good as XLA's: before 0.10.2 on a CPU that adds a single row up one by one.
    alone = jnp.full((1, S), 1 / S, jnp.float32) @ v[0]
    check_close(out, [[[2.0]]], 2e-5 + (abs(float(alone[0, 0]) - 2.0) if kernel == "dense" else 0.0))
    check_close(lse, [[np.log(S)]], 1e-6)


@pytest.mark.parametrize("kernel", OWN)
@pytest.mark.parametrize("shape", [(1, 2, 3, 3), (2, 1, 3, 3), (1, 1, 1, 3), (3, 3), (2, 2, 3, 1)])
def test_a_bias_that_broadcasts_gets_a_gradient_of_its_own_shape(shape, kernel):
    q, k, v = inputs(B=2, H=2, G=2, T=3, S=3)
    bias, w = normal(*shape).astype(np.float32), normal(2, 2, 3, 7).astype(np.float32)
    got = jax.grad(lambda bias: (backend_jax.attention(q, k, v, bias=bias, kernel=kernel) * w).sum())(bias)
    want = core_numpy.gradients.attention_vjp(w, q, k, v, bias=bias)["bias"]
    check_close(got, want, 1e-5)


@pytest.mark.parametrize("kernel", OWN)
@pytest.mark.parametrize("empty", ["B", "T", "S", "Dv"])
def test_empty_axes_give_empty_or_zero_results_and_gradients(empty, kernel):
    q, k, v = inputs(**{empty: 0})
    sinks = np.array([1.0, 2.0, 3.0, 4.0], np.float32)
    out, lse = backend_jax.attention_with_lse(q, k, v, sinks=sinks, kernel=kernel)
    want, want_lse = core_numpy.attention_with_lse(q, k, v, sinks=sinks)
    check_close(out, want, 1e-6)
    check_close(lse, want_lse, 1e-6)
    f = lambda *x: backend_jax.attention_with_lse(*x[:3], sinks=x[3], kernel=kernel)[1].sum()  # noqa: E731
    gradients = jax.grad(f, argnums=(0, 1, 2, 3))(q, k, v, sinks)
    if empty == "S":
        check_close(gradients[3], [6.0] * 4, 1e-6)
    assert all(not np.asarray(x).any() for x in gradients[:3]) or empty == "Dv"


@pytest.mark.parametrize("kernel", OWN)
def test_dropout_is_the_reference_s_and_rate_one_gives_zeros(kernel):
    q, k, v = inputs()
    f = partial(backend_jax.attention, q, k, v, kernel=kernel)
    check_close(
        f(dropout_rate=0.4, dropout_key=KEY), core_numpy.attention(q, k, v, dropout_rate=0.4, dropout_key=KEY), 1e-6
    )
    assert not np.asarray(f(dropout_rate=1.0, dropout_key=KEY)).any()
    weights = backend_jax.attention_weights(q, k, dropout_rate=0.4, dropout_key=KEY)
    check_close(weights.sum(-1), np.ones((2, 4, 3)), 1e-6)


def test_the_index_of_an_element_is_right_beyond_32_bits():
    visibility = importlib.import_module("backend_jax.visibility")
    lines, S = np.array([0, 1, 70_000, 2**32 - 1], np.uint32), 3_000_000_019
    low, high = visibility.index_words(jnp.asarray(lines), S, jnp.asarray(np.uint32(2_999_999_999)))
    for line, lo, hi in zip(lines.tolist(), low.tolist(), high.tolist(), strict=True):
        assert (hi << 32) + lo == line * S + 2_999_999_999


def test_parts_of_the_keys_merge_to_the_whole_with_gradients():
    q, k, v = inputs(S=7)

    def split(q, k, v):
        parts = [backend_jax.attention_with_lse(q, k[..., n, :], v[..., n, :]) for n in (slice(0, 3), slice(3, 7))]
        parts.append(backend_jax.attention_with_lse(q, k, v, mask=np.zeros((3, 7), bool)))  # sees nothing
        return backend_jax.merge_attention(*map(list, zip(*parts, strict=True)))

    out, lse = split(q, k, v)
    want, want_lse = backend_jax.attention_with_lse(q, k, v)
    check_close(out, want, 1e-6)
    check_close(lse, want_lse, 1e-6)
    loss = lambda f: lambda *x: (f(*x)[0] ** 2).sum() + f(*x)[1].sum()  # noqa: E731
    got, expected = (jax.grad(loss(f), argnums=(0, 1, 2))(q, k, v) for f in (split, backend_jax.attention_with_lse))
    for a, b in zip(got, expected, strict=True):
        check_close(a, b, 1e-5)
