"""Attention in torch: every kernel that claims a call means what the reference means, gradients included."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import core_numpy  # noqa: E402
from backend_torch.arrays import to_numpy  # noqa: E402
from backend_torch.attention import (  # noqa: E402
    attention,
    attention_weights,
    attention_with_lse,
)
from conformance.tests import mix_attention as mix  # noqa: E402
from conformance.tests.torch_attention import DTYPES, EVERY, KERNELS, as_tensors, gradients_of, qkv, serves  # noqa: E402

# --- meaning: the pairwise mix against the reference, in float64 ---


@pytest.mark.parametrize("row", mix.ROWS, ids=mix.identity)
def test_every_kernel_means_what_the_reference_means(row):
    arrays, keywords = mix.arguments(row)
    out, lse = core_numpy.attention_with_lse(**arrays, **keywords)
    weights = core_numpy.attention_weights(arrays["q"], arrays["k"], **keywords)
    ours, tensors = as_tensors(arrays), as_tensors(keywords)
    served = 0
    for kernel in KERNELS:
        mine = serves(kernel, attention, **ours, **tensors)
        if mine is not None:
            np.testing.assert_allclose(to_numpy(mine), out, rtol=1e-12, atol=1e-12, err_msg=kernel)
            served += 1
        both = serves(kernel, attention_with_lse, **ours, **tensors)
        if both is not None:
            np.testing.assert_allclose(to_numpy(both[0]), out, rtol=1e-12, atol=1e-12, err_msg=kernel)
            np.testing.assert_allclose(to_numpy(both[1]), lse, rtol=1e-12, atol=1e-12, err_msg=kernel)
    assert served >= 3  # at least the formula, the pieces and the choice
    mine = attention_weights(ours["q"], ours["k"], **tensors)
    np.testing.assert_allclose(to_numpy(mine), weights, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("row", mix.ROWS, ids=mix.identity)
def test_every_kernel_has_the_gradients_of_the_formula(row):
    arrays, keywords = mix.arguments(row, seed=1)
    names = [*arrays, *(name for name in ("bias", "sinks") if name in keywords)]
    results = {}
    for kernel in ("dense", "blockwise", "auto", "sdpa"):
        for with_lse in (False, True):
            tensors = as_tensors(arrays | keywords)
            leaves = {name: tensors[name].requires_grad_(kernel != "sdpa" or name in arrays) for name in names}
            got = serves(kernel, attention_with_lse if with_lse else attention, **(tensors | leaves))
            if got is None:
                continue
            out, lse = got if with_lse else (got, None)
            loss = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)).sum()
            if lse is not None:
                loss = loss + torch.sin(lse.where(lse > -torch.inf, 0.0)).sum()
            results[kernel, with_lse] = gradients_of(loss, *(x for x in leaves.values() if x.requires_grad))
    for (kernel, with_lse), gradients in results.items():
        expected = results["dense", with_lse][: len(gradients)]
        for name, mine, theirs in zip(names, gradients, expected, strict=kernel != "sdpa"):
            torch.testing.assert_close(
                mine, theirs, rtol=1e-11, atol=1e-11, msg=lambda m, k=kernel, n=name: f"{k} {n}: {m}"
            )


@pytest.mark.parametrize("row", mix.ROWS[::7], ids=mix.identity)
def test_the_formula_has_the_gradients_of_finite_differences(row):
    arrays, keywords = mix.arguments(row, seed=2)
    tensors = as_tensors(arrays | keywords)
    q, k, v = (tensors.pop(name).requires_grad_() for name in "qkv")
    direction = torch.linspace(-1, 1, v.shape[-1], dtype=torch.float64)

    def loss(q, k, v):
        return (attention(q, k, v, **tensors, kernel="dense") @ direction).sum()

    step = 1e-6
    for leaf, gradient in zip((q, k, v), gradients_of(loss(q, k, v), q, k, v), strict=True):
        way = torch.randn(leaf.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        with torch.no_grad():
            moved = [[x + sign * step * way if x is leaf else x for x in (q, k, v)] for sign in (1, -1)]
            slope = (loss(*moved[0]) - loss(*moved[1])) / (2 * step)
        torch.testing.assert_close((gradient * way).sum(), slope, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("length", [70, 300])
@pytest.mark.parametrize(
    "structure", ["causal", "window", "wide", "lengths", "segments", "packed causal", "offsets", "bias"]
)
def test_many_pieces_mean_what_the_formula_means(length, structure):
    ids = torch.arange(length).div(40, rounding_mode="floor").expand(2, length).clone()
    ids[1, -30:] = -1
    keywords: dict[str, Any] = {
        "causal": {"causal": True},
        "window": {"window": (9, 3)},
        "wide": {"window": (200, None), "causal": True},
        "lengths": {"kv_lengths": torch.tensor([length - 20, 0]), "causal": True},
        "segments": {"q_segments": ids, "kv_segments": ids},
        "packed causal": {"q_segments": ids, "kv_segments": ids, "causal": True, "window": (25, 0)},
        "offsets": {"causal": True, "q_offset": torch.tensor([3, -50])},
        "bias": {"bias": torch.randn(1, 4, 1, length, dtype=torch.float64), "causal": True},
    }[structure]
    for extra in ({}, {"softcap": 2.0, "sinks": torch.linspace(-1, 1, 4, dtype=torch.float64)}):
        gradients = []
        for kernel in ("dense", "blockwise"):
            leaves = qkv(T=length, S=length)
            out, lse = attention_with_lse(*leaves, **keywords, **extra, kernel=kernel)
            only = attention(*leaves, **keywords, **extra, kernel=kernel)
            loss = (out * torch.cos(torch.arange(out.numel()).reshape(out.shape))).sum()
            seen = lse.where(lse > -torch.inf, 0.0).sum()
            gradients.append(
                [out, lse, only, *gradients_of(loss + seen, *leaves), *gradients_of(only.square().sum(), *leaves)]
            )
        for mine, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


@EVERY
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_round_once_and_lse_stays_wide(dtype, kernel):
    for keywords in (
        {},
        {"causal": True, "q_offset": 2},
        {"window": (2, 1), "q_offset": 0},
        {"bias": torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(4))},
        {"softcap": 3.0, "sinks": torch.zeros(4, dtype=torch.bfloat16)},
        {"kv_lengths": torch.tensor([4, 0])},
    ):
        q, k, v = qkv(dtype=dtype)
        out = serves(kernel, attention, q, k, v, **keywords)
        if out is None:
            continue
        arrays = [to_numpy(x.double()) for x in (q, k, v)]
        plain = {
            name: to_numpy(x.double() if x.is_floating_point() else x) if isinstance(x, torch.Tensor) else x
            for name, x in keywords.items()
        }
        expected = torch.from_numpy(core_numpy.attention(*arrays, **plain))
        assert out.dtype == dtype
        # Four units in the last place of the largest entry: the result's rounding, and that of weights inside torch.
        assert (out.double() - expected).abs().max() <= 4 * torch.finfo(dtype).eps * expected.abs().max()
        if kernel != "sdpa":
            lse = attention_with_lse(q, k, v, **keywords, kernel=kernel)[1]
            assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


# --- what no query may see ---

NEVER_SEEN = {
    "lengths": {"kv_lengths": torch.tensor([4, 5])},
    "padding mask": {"mask": (torch.arange(7) < 4).reshape(1, 1, 1, 7)},
    "full mask": {"mask": (torch.arange(7) < 4) & (torch.arange(5)[:, None] != 2)},
    "bias of -inf": {"bias": torch.zeros(5, 7, dtype=torch.float64).masked_fill(torch.arange(7) >= 5, -math.inf)},
    "segments": {
        "q_segments": torch.zeros(2, 5, dtype=torch.int64),
        "kv_segments": torch.tensor([[0, 0, 0, 0, 0, -1, 1]] * 2),
    },
    "causal": {"causal": True, "q_offset": 0},
    "window": {"window": (1, 0), "q_offset": -1},
    "lengths, cap, sinks": {"kv_lengths": torch.tensor([4, 5]), "softcap": 2.0, "sinks": torch.zeros(4)},
    "lengths, dropout": {"kv_lengths": torch.tensor([4, 5]), "dropout_rate": 0.5, "dropout_key": torch.tensor([0, 1])},
}


@EVERY
@pytest.mark.parametrize("name", NEVER_SEEN)
def test_keys_that_no_query_may_see_have_no_effect_whatever_they_hold(name, kernel):
    for garbage in (math.nan, math.inf, 1e300):
        results = []
        for fill in (None, garbage):
            leaves = qkv()
            if fill is not None:
                with torch.no_grad():
                    leaves[1][:, :, 5:], leaves[2][:, :, 5:] = fill, fill
            out = serves(kernel, attention, *leaves, **NEVER_SEEN[name])
            if out is None:
                return
            results.append([out, *gradients_of(out.square().sum(), *leaves)])
        for clean, dirty in zip(*results, strict=True):
            assert torch.equal(clean, dirty)


@EVERY
@pytest.mark.parametrize("encoding", ["mask", "bias"])
def test_a_dead_row_is_zero_and_leaves_the_others_alone(encoding, kernel):
    seen = torch.tensor([[True, False, False], [False, False, False], [True, True, False]])
    keywords = {"mask": seen} if encoding == "mask" else {"bias": torch.zeros(3, 3).masked_fill(~seen, -math.inf)}
    for size in (1.0, 50.0):
        q, k, v = (x.detach() * size for x in qkv(B=1, H=1, G=1, T=3, S=3, D=4, Dv=4, dtype=torch.float32))
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        out = attention(q, k, v, **keywords, kernel=kernel)
        assert torch.equal(out[0, 0, 1], torch.zeros(4))
        rest = attention(q[:, :, ::2], k, v, **{name: x[::2] for name, x in keywords.items()}, kernel="dense")
        torch.testing.assert_close(out[:, :, ::2], rest)
        mine = gradients_of(out.square().sum(), q, k, v)
        theirs = gradients_of(rest.square().sum(), q, k, v)
        for a, b in zip(mine, theirs, strict=True):
            assert not a.isnan().any()
            torch.testing.assert_close(a, b)
        if kernel != "sdpa":
            assert attention_with_lse(q, k, v, **keywords, kernel=kernel)[1][0, 0, 1] == -math.inf


@EVERY
def test_empty_axes_give_zeros_and_zero_gradients(kernel):
    for B, T, S in ((0, 5, 7), (2, 0, 7), (2, 5, 0)):
        leaves = qkv(B=B, T=T, S=S)
        out = attention(*leaves, kernel=kernel)
        assert out.shape == (B, 4, T, 6)
        assert not out.any()
        assert not any(g.any() for g in gradients_of(out.sum(), *leaves))


@EVERY
def test_the_future_has_no_influence_on_outputs_or_gradients(kernel):
    results = []
    for huge in (1.0, 1e6):
        q, k, v = (x.detach() for x in qkv(T=6, S=6))
        k[:, :, 4:] *= huge
        v[:, :, 4:] *= huge
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        out = attention(q, k, v, causal=True, mask=torch.ones(6, 6, dtype=torch.bool), kernel=kernel)[:, :, :4]
        results.append([out, *(g[:, :, :4] for g in gradients_of(out.square().sum(), q, k, v))])
    for a, b in zip(*results, strict=True):
        # Not bit by bit: scores of such a size have another backward pass (`tiles.ENOUGH`).
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
