"""The reference attention and its gradients, against plain loops, finite differences and known answers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from conformance.tests.inputs_attention import check_close, inputs, normal
from conformance.tests.loops_attention import attention_by_loops
from conformance.tests.mix_attention import ROWS, arguments, identity
from conformance.tests.refusals_attention import ROWS as REFUSALS
from conformance.tests.refusals_attention import valid
from core_numpy import (
    attention,
    attention_weights,
    attention_with_lse,
    explain_kernel,
    pairs,
    random,
)
from core_numpy.gradients import attention_vjp, attention_weights_vjp, attention_with_lse_vjp

NAN, INF = np.nan, np.inf
KEY = np.array([3, 4], dtype=np.uint32)


# ---------------------------------------------------------------- every keyword with every other


@pytest.mark.parametrize("row", ROWS, ids=identity)
@pytest.mark.parametrize(("cells", "queries"), [(1 << 22, 64), (20, 2)], ids=["one-block", "many-blocks"])
def test_every_two_keywords_together_agree_with_plain_loops(row, cells, queries, monkeypatch):
    monkeypatch.setattr(pairs, "CELLS", cells)
    monkeypatch.setattr(pairs, "ROWS", queries)
    x, keywords = arguments(row)
    shape = (*x["q"].shape[:-1], x["k"].shape[-2])
    kept = random.uniform(KEY, shape) < 1
    if row["dropout"]:
        kept = random.uniform(keywords["dropout_key"], shape) < np.float32(1 - row["dropout"])
    out, lse, weights = attention_by_loops(*x.values(), kept=kept, **keywords)
    got = attention_with_lse(**x, **keywords)
    check_close(got[0], out)
    check_close(got[1], lse)
    check_close(attention(**x, **keywords), out)
    check_close(attention_weights(x["q"], x["k"], **keywords), weights)


@pytest.mark.parametrize("row", ROWS, ids=identity)
@pytest.mark.parametrize(("cells", "queries"), [(1 << 22, 64), (20, 2)], ids=["one-block", "many-blocks"])
def test_every_gradient_agrees_with_finite_differences(row, cells, queries, monkeypatch):
    monkeypatch.setattr(pairs, "CELLS", cells)
    monkeypatch.setattr(pairs, "ROWS", queries)
    x, keywords = arguments(row)
    x |= {name: keywords.pop(name) for name in ("bias", "sinks") if name in keywords}
    out, lse = attention_with_lse(**x, **keywords)
    weights = attention_weights(**{name: a for name, a in x.items() if name != "v"}, **keywords)
    do, dl, dw = normal(*out.shape, seed=1), normal(*lse.shape, seed=2), normal(*weights.shape, seed=3)

    def losses(y):
        out, lse = attention_with_lse(**y, **keywords)
        weights = attention_weights(**{name: a for name, a in y.items() if name != "v"}, **keywords)
        log = np.where(np.isfinite(lse), lse, 0.0)
        return np.array([(do * out).sum(), (do * out).sum() + (dl * log).sum(), (dw * weights).sum()])

    without_v = {name: a for name, a in x.items() if name != "v"}
    found = (
        attention_vjp(do, **x, **keywords),
        attention_with_lse_vjp(do, dl, **x, **keywords),
        attention_weights_vjp(dw, **without_v, **keywords),
    )
    assert [list(g) for g in found] == [list(x), list(x), list(without_v)]
    for name, a in x.items():
        direction, step = normal(*a.shape, seed=4), 1e-5
        ahead, behind = (losses(x | {name: a + sign * step * direction}) for sign in (1, -1))
        for numeric, gradients in zip((ahead - behind) / (2 * step), found, strict=True):
            if name in gradients:
                assert gradients[name].shape == a.shape
                assert (gradients[name] * direction).sum() == pytest.approx(numeric, rel=2e-7, abs=2e-8)


@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: row[0])
def test_what_is_wrong_is_refused_with_a_sentence_that_names_it(row):
    _, build, exception, phrase = row
    for function in (attention, attention_with_lse, explain_kernel):
        with pytest.raises(exception) as caught:
            function(**build())
        assert phrase in str(caught.value)
        assert type(caught.value) is exception


def test_the_arguments_that_the_refusals_start_from_are_accepted():
    assert attention(**valid()).shape == (2, 4, 3, 7)


def test_a_cotangent_of_another_shape_is_refused():
    x = valid()
    with pytest.raises(ValueError, match=r"grad_out must have shape \(2, 4, 3, 7\)"):
        attention_vjp(x["q"], **x)
    with pytest.raises(ValueError, match=r"grad_lse must have shape \(2, 4, 3\)"):
        attention_with_lse_vjp(np.ones((2, 4, 3, 7)), np.ones((2, 4, 3, 1)), **x)
    with pytest.raises(TypeError, match="grad_weights must be one of"):
        attention_weights_vjp(np.ones((2, 4, 3, 5), int), x["q"], x["k"])


# ---------------------------------------------------------------- known answers, on paper


def visible_by_values(T, S, **keywords):
    """With q = k = 0 and v = identity the output is the mask, each row divided by its sum."""
    return attention(np.zeros((T, 2)), np.zeros((S, 2)), np.eye(S), **keywords)


def test_causal_with_offset_0_is_top_left_and_with_s_minus_t_bottom_right():
    check_close(visible_by_values(2, 5, causal=True, q_offset=0), [[1, 0, 0, 0, 0], [0.5, 0.5, 0, 0, 0]])
    check_close(visible_by_values(2, 5, causal=True, q_offset=3), [[0.25] * 4 + [0], [0.2] * 5])
    check_close(visible_by_values(5, 2, causal=True, q_offset=-3), [[0, 0]] * 3 + [[1, 0], [0.5, 0.5]])
    check_close(visible_by_values(1, 4, causal=True, q_offset=3), [[0.25] * 4])


def test_offsets_per_batch_element_may_be_negative():
    q, k, v = np.zeros((3, 1, 2, 4)), np.zeros((3, 1, 3, 4)), np.broadcast_to(np.eye(3), (3, 1, 3, 3))
    got = attention(q, k, v, causal=True, q_offset=np.array([-1, 1, 7], dtype=np.int8))
    third = [1 / 3] * 3
    check_close(got[:, 0], [[[0, 0, 0], [1, 0, 0]], [[0.5, 0.5, 0], third], [third, third]])


def test_a_window_counts_distances_without_the_query_itself():
    half, third = 1 / 2, 1 / 3
    check_close(
        visible_by_values(4, 4, causal=True, window=(1, 5)),
        [[1, 0, 0, 0], [half, half, 0, 0], [0, half, half, 0], [0, 0, half, half]],
    )
    check_close(visible_by_values(3, 3, window=(0, 0)), np.eye(3))
    check_close(visible_by_values(3, 3, window=(None, 1)), [[half, half, 0], [third] * 3, [third] * 3])
    check_close(visible_by_values(3, 3, window=(1, None)), [[third] * 3, [third] * 3, [0, half, half]])


def test_a_window_further_than_the_keys_leaves_nothing():
    check_close(visible_by_values(2, 3, window=(1, 0), q_offset=9), np.zeros((2, 3)))
    check_close(visible_by_values(2, 3, window=(1, 0), q_offset=-9), np.zeros((2, 3)))


def test_query_head_h_reads_key_head_h_over_group():
    v = np.array([[[1.0, 0]], [[0, 1]]])
    check_close(attention(np.zeros((4, 1, 3)), np.zeros((2, 1, 3)), v)[:, 0], [[1, 0], [1, 0], [0, 1], [0, 1]])


def test_a_negative_segment_matches_nothing_not_even_itself():
    ids = np.array([0, 0, 1, -1])
    check_close(
        visible_by_values(4, 4, q_segments=ids, kv_segments=ids), [[0.5, 0.5, 0, 0]] * 2 + [[0, 0, 1, 0], [0] * 4]
    )


def test_packed_documents_do_not_see_each_other():
    q, k, v = inputs(T=5, S=5, H=3)
    ids = np.array([[0, 0, 0, 1, 1]] * 2)
    before = attention(q, k, v, causal=True, q_segments=ids, kv_segments=ids)
    k[..., :3, :], v[..., :3, :] = 1e6, -1e6
    after = attention(q, k, v, causal=True, q_segments=ids, kv_segments=ids)
    np.testing.assert_array_equal(before[..., 3:, :], after[..., 3:, :])
    check_close(before[..., 3:, :], attention(*(x[..., 3:, :] for x in inputs(T=5, S=5, H=3)), causal=True))


def test_the_soft_cap_comes_before_bias_and_mask():
    q, k, v = np.zeros((1, 1)), np.zeros((2, 1)), np.array([[1.0], [1e6]])
    check_close(attention(q, k, v, softcap=1.0, mask=np.array([[True, False]])), [[1.0]])
    check_close(attention_weights(q, k, softcap=1.0, bias=np.array([[0.0, math.log(3)]])), [[0.25, 0.75]])
    check_close(
        attention_weights(np.ones((1, 1)), np.array([[0.0], [2.0]]), softcap=1.0),
        [[1 / (1 + math.exp(math.tanh(2))), 1 / (1 + math.exp(-math.tanh(2)))]],
    )


def test_the_scale_is_one_over_the_root_of_the_head_size_and_0_is_a_scale():
    q, k = np.array([[2.0, 0, 0, 0]]), np.array([[math.log(3), 0, 0, 0], [0.0] * 4])
    check_close(attention_weights(q, k), [[0.75, 0.25]])
    check_close(attention_weights(q, k, scale=0.0), [[0.5, 0.5]])
    check_close(attention_weights(q, k, scale=-0.5), [[0.25, 0.75]])


def test_a_sink_takes_its_share_of_the_denominator():
    out, lse = attention_with_lse(
        np.zeros((2, 1, 3)), np.zeros((2, 2, 3)), np.ones((2, 2, 1)), sinks=np.array([math.log(2), -INF])
    )
    check_close(out[:, 0], [[0.5], [1.0]])
    check_close(lse[:, 0], [math.log(4), math.log(2)])


def test_a_query_alone_with_a_sink_gives_0_and_its_lse_is_the_sink():
    mask = np.array([[False, False]])
    out, lse = attention_with_lse(
        np.zeros((2, 1, 3)), np.zeros((2, 2, 3)), np.ones((2, 2, 1)), mask=mask, sinks=np.array([1.5, -INF])
    )
    check_close(out, np.zeros((2, 1, 1)))
    check_close(lse[:, 0], [1.5, -INF])
    g = attention_with_lse_vjp(
        np.ones((2, 1, 1)),
        np.array([[3.0], [5.0]]),
        np.zeros((2, 1, 3)),
        np.zeros((2, 2, 3)),
        np.ones((2, 2, 1)),
        mask=mask,
        sinks=np.array([1.5, -INF]),
    )
    check_close(g["sinks"], [3.0, 0.0])


def test_a_bias_is_added_as_it_is_and_0_and_1_mask_nothing():
    check_close(
        visible_by_values(2, 2, bias=np.array([[1.0, 0], [1, 1]])),
        [[1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1))], [0.5, 0.5]],
    )


def test_all_ways_to_mask_give_one_answer():
    q, k, v = inputs()
    mask = np.random.default_rng(5).random((2, 6, 4, 7)) < 0.6
    mask[:, :, 1] = False
    want = attention(q, k, v, mask=mask)
    np.testing.assert_array_equal(want, attention(q, k, v, bias=np.where(mask, 0.0, -INF)))
    np.testing.assert_array_equal(want, attention(q, k, v, mask=mask, bias=np.where(mask, 0.0, 77.0)))
    assert (want[:, :, 1] == 0).all()


# ---------------------------------------------------------------- dead queries and what stands in masked places


@pytest.mark.parametrize("size", [1.0, 50.0])
def test_a_dead_query_gives_0_and_leaves_the_others_alone(size):
    q, k, v = (size * x for x in inputs(T=3, S=3, H=3))
    mask = np.array([[1, 0, 0], [0, 0, 0], [1, 1, 0]], dtype=bool)
    out, lse = attention_with_lse(q, k, v, mask=mask)
    assert (out[..., 1, :] == 0).all() and (lse[..., 1] == -INF).all()
    assert (attention_weights(q, k, mask=mask)[..., 1, :] == 0).all()
    do, dl = normal(*out.shape), normal(*lse.shape)
    do[..., 1, :], dl[..., 1] = NAN, INF  # whatever comes back to a dead query stops there
    g = attention_with_lse_vjp(do, dl, q, k, v, mask=mask)
    alive = [0, 2]
    few = attention_with_lse_vjp(do[..., alive, :], dl[..., alive], q[..., alive, :], k, v, mask=mask[alive])
    assert (g["q"][..., 1, :] == 0).all()
    check_close(g["q"][..., alive, :], few["q"])
    check_close(g["k"], few["k"])
    check_close(g["v"], few["v"])


@pytest.mark.parametrize("bad", [NAN, INF, -INF, 1e30])
@pytest.mark.parametrize("where", ["k", "v"])
def test_whatever_stands_at_a_padded_key_has_no_effect(bad, where):
    x = dict(zip("qkv", inputs(), strict=True))
    lengths, bias, sinks = np.array([5, 3]), normal(4, 7), normal(6)
    do, dl = normal(2, 6, 4, 8), normal(2, 6, 4)
    want = attention_with_lse(**x, kv_lengths=lengths, bias=bias, sinks=sinks)
    gradients = attention_with_lse_vjp(do, dl, **x, kv_lengths=lengths, bias=bias, sinks=sinks)
    x[where][0, :, 5:], x[where][1, :, 3:] = bad, bad
    got = attention_with_lse(**x, kv_lengths=lengths, bias=bias, sinks=sinks)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)
    for name, gradient in attention_with_lse_vjp(do, dl, **x, kv_lengths=lengths, bias=bias, sinks=sinks).items():
        np.testing.assert_array_equal(gradient, gradients[name])
    assert (gradients["k"][1, :, 3:] == 0).all() and (gradients["v"][1, :, 3:] == 0).all()


@pytest.mark.parametrize("where", ["k", "v", "q", "out", "bias"])
def test_nan_in_the_future_does_not_reach_the_past(where):
    x = dict(zip("qkv", inputs(T=5, S=5, H=3), strict=True)) | {"bias": normal(3, 5, 5)[None].repeat(2, axis=0)}
    do = normal(2, 3, 5, 8)
    want, gradients = attention(**x, causal=True), attention_vjp(do, **x, causal=True)
    clean = {name: a.copy() for name, a in x.items()}
    if where == "out":
        do[..., 3, :] = NAN
    elif where == "bias":
        x["bias"][..., 3] = np.where(np.arange(5) < 3, INF, x["bias"][..., 3])  # only pairs that causality masks
    else:
        x[where][..., 3, :] = NAN
    got, after = attention(**x, causal=True), attention_vjp(do, **x, causal=True)
    rows = slice(0, 5 if where in ("out", "bias") else 3)
    np.testing.assert_array_equal(got[..., rows, :], want[..., rows, :])
    np.testing.assert_array_equal(after["q"][..., :3, :], gradients["q"][..., :3, :])
    np.testing.assert_array_equal(after["bias"][..., :3, :], gradients["bias"][..., :3, :])
    # Key 4 is seen by query 4 alone, which NaN in query 3 does not reach.
    if where in ("q", "out"):
        np.testing.assert_array_equal(after["k"][..., 4, :], gradients["k"][..., 4, :])
        np.testing.assert_array_equal(after["v"][..., 4, :], gradients["v"][..., 4, :])
        assert np.isnan(after["k"][..., :4, :]).all()
    if where == "k" or where == "v":
        assert np.isnan(got[..., 3:, :]).all()  # what is seen is seen
        assert np.isfinite(attention(**clean, causal=True)).all()


@pytest.mark.parametrize("where", ["k", "v"])
def test_a_bias_of_minus_infinity_shields_from_nan_as_a_mask_does(where):
    x, bias = dict(zip("qkv", inputs(), strict=True)), normal(4, 7)
    bias[:, 2] = -INF
    want, gradients = attention(**x, bias=bias), attention_vjp(normal(2, 6, 4, 8), **x, bias=bias)
    x[where][..., 2, :] = NAN
    np.testing.assert_array_equal(attention(**x, bias=bias), want)
    for name, gradient in attention_vjp(normal(2, 6, 4, 8), **x, bias=bias).items():
        np.testing.assert_array_equal(gradient, gradients[name])


def test_a_masked_score_larger_than_all_others_leaves_the_gradient_finite():
    q, k = np.ones((1, 1)), np.array([[1.0], [1.0], [1000.0]])
    mask = np.array([[True, True, False]])
    check_close(attention_weights(q, k, mask=mask), [[0.5, 0.5, 0]])
    g = attention_weights_vjp(np.ones((1, 3)), q, k, mask=mask)
    assert (g["q"] == 0).all() and (g["k"] == 0).all()


def test_gradients_at_masked_pairs_are_exactly_0():
    q, k, v = inputs()
    mask, bias = np.random.default_rng(6).random((2, 6, 4, 7)) < 0.5, normal(2, 6, 4, 7)
    g = attention_vjp(normal(2, 6, 4, 8), q, k, v, mask=mask, bias=bias, softcap=2.0)
    assert (g["bias"][~mask] == 0).all()
    assert (g["bias"][mask & (mask.sum(axis=-1, keepdims=True) > 1)] != 0).all()  # one key alone has weight 1, whatever


@pytest.mark.parametrize("shape", [(1, 2, 3, 3), (2, 1, 3, 3), (1, 1, 1, 3), (2, 2, 3, 1), (3, 3)])
def test_a_broadcast_bias_has_the_sum_of_the_gradients(shape):
    q, k, v = inputs(H=2, G=1, T=3, S=3)
    bias, do = normal(*shape), normal(2, 2, 3, 8)
    full = attention_vjp(do, q, k, v, bias=np.broadcast_to(bias, (2, 2, 3, 3)).copy())["bias"]
    axes = tuple(a for a, n in enumerate((1,) * (4 - len(shape)) + shape) if n == 1)
    check_close(attention_vjp(do, q, k, v, bias=bias)["bias"], full.sum(axis=axes, keepdims=True).reshape(shape))
