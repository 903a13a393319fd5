"""Attention in NumPy: large scores, many keys, dtypes, empty axes, dropout, merging, memory and cost."""

from __future__ import annotations

import itertools
import math
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from conformance.tests.inputs_attention import check_close, inputs, normal
from core_numpy import (
    attention,
    attention_weights,
    attention_with_lse,
    available_kernels,
    explain_kernel,
    merge_attention,
    pairs,
    random,
)
from core_numpy.gradients import attention_vjp, attention_with_lse_vjp, merge_attention_vjp
from core_numpy.rounding import rounded

NAN, INF = np.nan, np.inf
KEY = np.array([3, 4], dtype=np.uint32)


# ---------------------------------------------------------------- large scores, many keys, dtypes, empty axes


def test_scores_of_ten_thousand_do_not_overflow():
    q, k, v = np.array([[1.0], [-1.0]]), np.array([[1e4], [-1e4], [1e4]]), np.array([[1.0], [2], [4]])
    out, lse = attention_with_lse(q, k, v, scale=1.0)
    check_close(out, [[2.5], [2.0]])
    check_close(lse, [1e4 + math.log(2), 1e4])
    out, lse = attention_with_lse(np.ones((1, 1)), np.full((3, 1), -1e4), v, scale=1.0)
    check_close(out, [[7 / 3]])
    check_close(lse, [-1e4 + math.log(3)])


def test_one_key_gives_its_value_and_no_gradient_to_the_scores():
    q, k, v = inputs(S=1)
    check_close(attention(q, k, v), np.repeat(v, 2, axis=1).repeat(4, axis=2))
    g = attention_vjp(normal(2, 6, 4, 8), q, k, v)
    assert (g["q"] == 0).all() and (g["k"] == 0).all()


def test_a_hundred_thousand_keys():
    S = 100_000
    v = np.arange(S, dtype=np.float32)[:, None]
    out, lse = attention_with_lse(np.zeros((2, 1), np.float32), np.zeros((S, 1), np.float32), v)
    check_close(out, [[(S - 1) / 2]] * 2, 1e-7)
    check_close(lse, [math.log(S)] * 2, 1e-7)
    lengths = np.asarray(3)
    check_close(
        attention(np.zeros((2, 1), np.float32), np.zeros((S, 1), np.float32), v, kv_lengths=lengths), [[1.0]] * 2
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_result_is_the_float64_result_rounded_once(dtype):
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    x = inputs(dtype=dtype)
    bias, sinks = normal(4, 7), normal(6).astype(dtype)
    wide = [a.astype(np.float64) for a in x]
    out, lse = attention_with_lse(*x, bias=bias, sinks=sinks)
    want, logs = attention_with_lse(*wide, bias=bias, sinks=sinks.astype(np.float64))
    assert out.dtype == dtype and lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
    np.testing.assert_array_equal(out, rounded(want, dtype))
    np.testing.assert_array_equal(lse, logs.astype(lse.dtype))
    g = attention_vjp(normal(2, 6, 4, 8), *x, bias=bias, sinks=sinks)
    assert [g[name].dtype for name in ("q", "k", "v", "bias", "sinks")] == [dtype] * 3 + [np.float64, dtype]


def test_rounding_to_bfloat16_happens_once():
    tie = 1 + 2.0**-8
    got = rounded(
        np.array([tie, tie + 2.0**-40, tie - 2.0**-40, -tie - 2.0**-40, 3.3961775e38, 1e39, NAN]), ml_dtypes.bfloat16
    )
    np.testing.assert_array_equal(
        got.astype(np.float64), [1, 1 + 2.0**-7, 1, -1 - 2.0**-7, 2.0**128 - 2.0**120, INF, NAN]
    )


@pytest.mark.parametrize(("batch", "T", "S"), [((0,), 4, 7), ((2,), 0, 7), ((2,), 4, 0), ((2,), 0, 0), ((2, 0), 4, 7)])
def test_empty_axes(batch, T, S):
    q, k, v = inputs(batch=batch, T=T, S=S)
    keywords = {"causal": True, "q_offset": 0, "window": (2, 1), "sinks": np.zeros(6)} if T else {}
    out, lse = attention_with_lse(q, k, v, **keywords)
    assert out.shape == (*batch, 6, T, 8) and (out == 0).all()
    assert (lse == (0 if keywords else -INF)).all()
    assert attention_weights(q, k, **keywords).shape == (*batch, 6, T, S)
    g = attention_with_lse_vjp(out, lse, q, k, v, **keywords)
    assert [g[name].shape for name in "qkv"] == [q.shape, k.shape, v.shape]
    assert not any((g[name] != 0).any() for name in "qkv")


def test_arguments_are_not_written_to():
    x = dict(zip("qkv", inputs(), strict=True)) | {
        "bias": normal(4, 7),
        "sinks": normal(6),
        "mask": np.eye(4, 7, dtype=bool),
    }
    before = {name: a.copy() for name, a in x.items()}
    out = attention(**x)
    attention_vjp(out, **x)
    for name, a in x.items():
        np.testing.assert_array_equal(a, before[name])


def test_strided_inputs_mean_the_same():
    q, k, v = inputs()
    strided = [np.asfortranarray(x) for x in (q, k, v)]
    np.testing.assert_allclose(
        attention(*strided, mask=np.asfortranarray(np.tri(4, 7, dtype=bool))),
        attention(q, k, v, mask=np.tri(4, 7, dtype=bool)),
        rtol=1e-14,
        atol=1e-15,  # BLAS adds up in another order, and an output may cancel
    )


# ---------------------------------------------------------------- dropout


def test_weights_are_before_dropout_and_asking_for_them_changes_nothing():
    q, k, v = inputs()
    keywords = {"dropout_rate": 0.5, "dropout_key": KEY, "causal": True, "q_offset": 3}
    weights = attention_weights(q, k, **keywords)
    check_close(weights.sum(axis=-1), np.ones((2, 6, 4)))
    np.testing.assert_array_equal(weights, attention_weights(q, k, causal=True, q_offset=3))
    np.testing.assert_array_equal(attention(q, k, v, **keywords), attention(q, k, v, **keywords))
    assert np.abs(attention(q, k, v, **keywords) - attention(q, k, v, causal=True, q_offset=3)).max() > 0.1


def test_a_key_without_a_rate_drops_nothing_and_rate_1_drops_all():
    q, k, v = inputs()
    np.testing.assert_array_equal(attention(q, k, v, dropout_key=KEY), attention(q, k, v))
    assert (attention(q, k, v, dropout_rate=1.0, dropout_key=KEY) == 0).all()
    g = attention_vjp(normal(2, 6, 4, 8), q, k, v, dropout_rate=1.0, dropout_key=KEY)
    assert not any(x.any() for x in g.values())


def test_dropout_follows_the_flat_index_of_the_weight_and_divides_by_what_is_kept():
    T, S = 3, 4
    got = attention(
        np.zeros((2, 1, T, 2)),
        np.zeros((2, 1, S, 2)),
        np.broadcast_to(np.eye(S), (2, 1, S, S)),
        dropout_rate=0.2,
        dropout_key=KEY,
    )
    kept = random.uniform(KEY, (2, 1, T, S)) < np.float32(0.8)
    check_close(got, np.where(kept, 0.25 / 0.8, 0.0))
    assert kept.any() and not kept.all()


# ---------------------------------------------------------------- merging, kernels


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_merging_the_parts_gives_the_whole(dtype):
    q, k, v = inputs(dtype=dtype)
    lengths = np.array([2, 7])
    whole = attention_with_lse(q, k, v, kv_lengths=lengths, sinks=normal(6))
    parts = []
    for n, (start, stop) in enumerate(itertools.pairwise((0, 3, 4, 7))):
        own = np.clip(lengths - start, 0, stop - start)
        part = attention_with_lse(
            q, k[:, :, start:stop], v[:, :, start:stop], kv_lengths=own, sinks=normal(6) if n == 0 else None
        )
        parts.append(part)
    merged = merge_attention(*zip(*parts, strict=True))
    assert [x.dtype for x in merged] == [x.dtype for x in whole]
    for got, want in zip(merged, whole, strict=True):
        check_close(got, want, 1e-12 if dtype is np.float64 else 1e-6)


def test_merging_parts_without_keys_gives_0_and_minus_infinity():
    out, lse = merge_attention([np.full((1, 2), NAN), np.zeros((1, 2))], [np.array([-INF]), np.array([-INF])])
    assert (out == 0).all() and (lse == -INF).all()
    out, lse = merge_attention([np.full((1, 2), NAN), np.ones((1, 2))], [np.array([-INF]), np.array([1.5])])
    assert (out == 1).all() and (lse == 1.5).all()


def test_the_gradient_of_merging_agrees_with_finite_differences():
    outs, lses = [normal(2, 3, 4, seed=n) for n in range(3)], [normal(2, 3, seed=n + 9) for n in range(3)]
    lses[1][0, 0] = -INF
    lses[0][1, 1] = lses[1][1, 1] = lses[2][1, 1] = -INF
    do, dl = normal(2, 3, 4), normal(2, 3)
    g = merge_attention_vjp(do, dl, outs, lses)

    def loss(outs, lses):
        out, lse = merge_attention(outs, lses)
        return (do * out).sum() + (dl * np.where(np.isfinite(lse), lse, 0)).sum()

    for n, name in itertools.product(range(3), ("outs", "lses")):
        given = {"outs": outs, "lses": lses}
        direction = normal(*given[name][n].shape, seed=30)
        ahead, behind = (
            {**given, name: [x + (sign * 1e-6 * direction if m == n else 0) for m, x in enumerate(given[name])]}
            for sign in (1, -1)
        )
        assert (g[name][n] * direction).sum() == pytest.approx((loss(**ahead) - loss(**behind)) / 2e-6, abs=1e-8)
        assert np.isfinite(g[name][n]).all()
    assert g["lses"][1][0, 0] == 0 and (g["outs"][2][1, 1] == 0).all()


@pytest.mark.parametrize(
    ("outs", "lses", "exception", "phrase"),
    [
        ([], [], ValueError, "at least 1"),
        ([np.ones((2, 3))], [], ValueError, "same length"),
        (np.ones((2, 3)), np.ones(2), ValueError, "two sequences"),
        ([np.ones((2, 3))], [np.ones(3)], ValueError, "without its last axis"),
        ([np.ones((2, 3)), np.ones((2, 4))], [np.ones(2)] * 2, ValueError, "that of outs"),
        ([np.ones((2, 3)), np.ones((2, 3), np.float32)], [np.ones(2)] * 2, TypeError, "dtype of outs"),
        ([np.ones((2, 3), int)], [np.ones(2)], TypeError, "must be one of"),
    ],
)
def test_merging_what_does_not_fit_is_refused(outs, lses, exception, phrase):
    with pytest.raises(exception, match=phrase):
        merge_attention(outs, lses)


def test_the_only_kernel_is_the_reference_and_it_shields_every_pair():
    kernel = available_kernels()["reference"]
    assert list(available_kernels()) == ["reference"] == [kernel.name]
    assert kernel.cannot == () and kernel.shields == "pairs"
    assert explain_kernel(*inputs()).startswith("reference: chosen")
    np.testing.assert_array_equal(attention(*inputs(), kernel="reference"), attention(*inputs()))


# ---------------------------------------------------------------- memory and cost


@pytest.mark.parametrize("T", [2048, 4096])
def test_a_window_meets_a_number_of_pairs_that_grows_with_t_times_window(T):
    q = np.zeros((2, T, 4))
    plan = pairs.arrange(
        q,
        q,
        q,
        **dict.fromkeys(
            (
                "mask",
                "bias",
                "q_offset",
                "kv_lengths",
                "q_segments",
                "kv_segments",
                "sinks",
                "scale",
                "softcap",
                "dropout_key",
            )
        ),
        causal=True,
        window=(64, None),
        dropout_rate=0.0,
        kernel="auto",
    )
    met = sum((rows.stop - rows.start) * (keys.stop - keys.start) for rows, keys in pairs.blocks(plan))
    assert T * 64 < met < 4 * T * 64


def peak(call) -> int:
    """Most bytes that NumPy held at once during a call, above what was there before it."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_the_memory_of_windowed_attention_and_of_its_gradient_grows_with_t_not_t_squared():
    def forward_and_back(T):
        q = np.zeros((2, T, 4), np.float32)
        return peak(lambda: attention_vjp(attention(q, q, q, window=(63, 0)), q, q, q, window=(63, 0)))

    assert forward_and_back(4096) < 2.2 * forward_and_back(2048)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("window", [(1024, None), None], ids=["window", "causal"])
def test_memory_at_length_32768_stays_within_a_gigabyte_and_a_half_above_the_inputs(window):
    T = 32768
    q, k, v = (np.random.default_rng(n).normal(size=(8, T, 64)).astype(np.float32) for n in range(3))
    out = []
    most = peak(lambda: out.append(attention(q, k, v, causal=True, window=window)))
    assert most < 1.5 * 2**30, f"{most / 2**30:.2f} GiB"
    last = attention(q[:, -2:], k, v, causal=True, window=window, q_offset=T - 2)
    np.testing.assert_allclose(out[0][:, -2:], last, rtol=1e-6)
