"""Attention in torch: every kernel that claims a call means what the reference means, gradients included."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import core_numpy  # noqa: E402
from backend_torch.arrays import from_numpy, to_numpy  # noqa: E402
from backend_torch.attention import (  # noqa: E402
    attention,
    attention_weights,
    attention_with_lse,
    merge_attention,
)
from conformance.tests import mix_attention as mix  # noqa: E402

KERNELS = ("dense", "sdpa", "blockwise", "auto")
EVERY = pytest.mark.parametrize("kernel", KERNELS)
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def _tensors(keywords: dict[str, Any]) -> dict[str, Any]:
    return {
        name: from_numpy(x.astype(np.int64) if x.dtype == np.uint32 else x) if isinstance(x, np.ndarray) else x
        for name, x in keywords.items()
    }


def _serves(kernel: str, call, *arguments, **keywords):
    """The result, or None where the kernel says that it cannot serve the call."""
    try:
        return call(*arguments, **keywords, kernel=kernel)
    except ValueError as error:
        assert "cannot serve" in str(error)
        assert kernel != "auto"
        return None


def _qkv(B=2, H=4, G=2, T=5, S=7, D=6, Dv=6, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, H, T, D), (B, G, S, D), (B, G, S, Dv))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def _gradients(loss, *leaves):
    return torch.autograd.grad(loss, leaves)


# --- meaning: the pairwise mix against the reference, in float64 ---


@pytest.mark.parametrize("row", mix.ROWS, ids=mix.identity)
def test_every_kernel_means_what_the_reference_means(row):
    arrays, keywords = mix.arguments(row)
    out, lse = core_numpy.attention_with_lse(**arrays, **keywords)
    weights = core_numpy.attention_weights(arrays["q"], arrays["k"], **keywords)
    ours, tensors = _tensors(arrays), _tensors(keywords)
    served = 0
    for kernel in KERNELS:
        mine = _serves(kernel, attention, **ours, **tensors)
        if mine is not None:
            np.testing.assert_allclose(to_numpy(mine), out, rtol=1e-12, atol=1e-12, err_msg=kernel)
            served += 1
        both = _serves(kernel, attention_with_lse, **ours, **tensors)
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
            tensors = _tensors(arrays | keywords)
            leaves = {name: tensors[name].requires_grad_(kernel != "sdpa" or name in arrays) for name in names}
            got = _serves(kernel, attention_with_lse if with_lse else attention, **(tensors | leaves))
            if got is None:
                continue
            out, lse = got if with_lse else (got, None)
            loss = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)).sum()
            if lse is not None:
                loss = loss + torch.sin(lse.where(lse > -torch.inf, 0.0)).sum()
            results[kernel, with_lse] = _gradients(loss, *(x for x in leaves.values() if x.requires_grad))
    for (kernel, with_lse), gradients in results.items():
        expected = results["dense", with_lse][: len(gradients)]
        for name, mine, theirs in zip(names, gradients, expected, strict=kernel != "sdpa"):
            torch.testing.assert_close(
                mine, theirs, rtol=1e-11, atol=1e-11, msg=lambda m, k=kernel, n=name: f"{k} {n}: {m}"
            )


@pytest.mark.parametrize("row", mix.ROWS[::7], ids=mix.identity)
def test_the_formula_has_the_gradients_of_finite_differences(row):
    arrays, keywords = mix.arguments(row, seed=2)
    tensors = _tensors(arrays | keywords)
    q, k, v = (tensors.pop(name).requires_grad_() for name in "qkv")
    direction = torch.linspace(-1, 1, v.shape[-1], dtype=torch.float64)

    def loss(q, k, v):
        return (attention(q, k, v, **tensors, kernel="dense") @ direction).sum()

    step = 1e-6
    for leaf, gradient in zip((q, k, v), _gradients(loss(q, k, v), q, k, v), strict=True):
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
            leaves = _qkv(T=length, S=length)
            out, lse = attention_with_lse(*leaves, **keywords, **extra, kernel=kernel)
            only = attention(*leaves, **keywords, **extra, kernel=kernel)
            loss = (out * torch.cos(torch.arange(out.numel()).reshape(out.shape))).sum()
            seen = lse.where(lse > -torch.inf, 0.0).sum()
            gradients.append(
                [out, lse, only, *_gradients(loss + seen, *leaves), *_gradients(only.square().sum(), *leaves)]
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
        q, k, v = _qkv(dtype=dtype)
        out = _serves(kernel, attention, q, k, v, **keywords)
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
            leaves = _qkv()
            if fill is not None:
                with torch.no_grad():
                    leaves[1][:, :, 5:], leaves[2][:, :, 5:] = fill, fill
            out = _serves(kernel, attention, *leaves, **NEVER_SEEN[name])
            if out is None:
                return
            results.append([out, *_gradients(out.square().sum(), *leaves)])
        for clean, dirty in zip(*results, strict=True):
            assert torch.equal(clean, dirty)


@EVERY
@pytest.mark.parametrize("encoding", ["mask", "bias"])
def test_a_dead_row_is_zero_and_leaves_the_others_alone(encoding, kernel):
    seen = torch.tensor([[True, False, False], [False, False, False], [True, True, False]])
    keywords = {"mask": seen} if encoding == "mask" else {"bias": torch.zeros(3, 3).masked_fill(~seen, -math.inf)}
    for size in (1.0, 50.0):
        q, k, v = (x.detach() * size for x in _qkv(B=1, H=1, G=1, T=3, S=3, D=4, Dv=4, dtype=torch.float32))
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        out = attention(q, k, v, **keywords, kernel=kernel)
        assert torch.equal(out[0, 0, 1], torch.zeros(4))
        rest = attention(q[:, :, ::2], k, v, **{name: x[::2] for name, x in keywords.items()}, kernel="dense")
        torch.testing.assert_close(out[:, :, ::2], rest)
        mine = _gradients(out.square().sum(), q, k, v)
        theirs = _gradients(rest.square().sum(), q, k, v)
        for a, b in zip(mine, theirs, strict=True):
            assert not a.isnan().any()
            torch.testing.assert_close(a, b)
        if kernel != "sdpa":
            assert attention_with_lse(q, k, v, **keywords, kernel=kernel)[1][0, 0, 1] == -math.inf


@EVERY
def test_empty_axes_give_zeros_and_zero_gradients(kernel):
    for B, T, S in ((0, 5, 7), (2, 0, 7), (2, 5, 0)):
        leaves = _qkv(B=B, T=T, S=S)
        out = attention(*leaves, kernel=kernel)
        assert out.shape == (B, 4, T, 6)
        assert not out.any()
        assert not any(g.any() for g in _gradients(out.sum(), *leaves))


@EVERY
def test_the_future_has_no_influence_on_outputs_or_gradients(kernel):
    results = []
    for huge in (1.0, 1e6):
        q, k, v = (x.detach() for x in _qkv(T=6, S=6))
        k[:, :, 4:] *= huge
        v[:, :, 4:] *= huge
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        out = attention(q, k, v, causal=True, mask=torch.ones(6, 6, dtype=torch.bool), kernel=kernel)[:, :, :4]
        results.append([out, *(g[:, :, :4] for g in _gradients(out.square().sum(), q, k, v))])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


# --- known faults, by hand ---


@EVERY
def test_causal_with_fewer_queries_counts_from_the_offset(kernel):
    q, k, v = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 5, 4), torch.eye(5)[None, None]
    top_left = attention(q, k, v, causal=True, q_offset=0, kernel=kernel)[0, 0]
    assert torch.allclose(top_left, torch.tensor([[1, 0, 0, 0, 0], [0.5, 0.5, 0, 0, 0]]))
    bottom_right = attention(q, k, v, causal=True, q_offset=3, kernel=kernel)[0, 0]
    assert torch.allclose(bottom_right, torch.tensor([[0.25, 0.25, 0.25, 0.25, 0], [0.2, 0.2, 0.2, 0.2, 0.2]]))


@EVERY
def test_query_heads_read_their_key_head_in_blocks(kernel):
    v = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).reshape(1, 2, 1, 2)
    out = attention(torch.zeros(1, 4, 3, 2), torch.zeros(1, 2, 1, 2), v, kernel=kernel)
    assert torch.equal(out[0, :, 0], torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]))


@EVERY
@pytest.mark.parametrize("scale", [0.0, -0.7])
def test_scale_zero_and_negative_mean_what_they_say_with_causality(scale, kernel):
    q, k, v = _qkv(T=7, S=7)
    scores = scale * (q @ k.repeat_interleave(2, 1).mT)
    seen = torch.ones(7, 7, dtype=torch.bool).tril()
    expected = torch.softmax(scores.masked_fill(~seen, -math.inf), -1) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(attention(q, k, v, causal=True, scale=scale, kernel=kernel), expected)


@EVERY
def test_the_cap_comes_before_the_mask(kernel):
    v = torch.tensor([[0.0], [1e6]])[None, None]
    mask = torch.tensor([[True, False], [True, False]])
    out = _serves(kernel, attention, torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 2, 1), v, mask=mask, softcap=1.0)
    assert out is None or not out.any()


@EVERY
def test_scores_of_ten_thousand_are_exact(kernel):
    q = torch.tensor([[1e4], [-1e4]])[None, None]
    k, v = torch.tensor([[1.0], [0.5], [-1.0]])[None, None], torch.eye(3)[None, None]
    out = attention(q, k, v, scale=1.0, kernel=kernel)
    assert torch.equal(out[0, 0], torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]))


@pytest.mark.parametrize(
    "shape", [(1, 2, 3, 4), (2, 1, 3, 4), (1, 1, 3, 4), (2, 2, 3, 4), (3, 4), (1, 1, 1, 4), (2, 1, 3, 1)]
)
@pytest.mark.parametrize("kernel", ["dense", "blockwise", "auto"])
def test_the_gradient_of_a_bias_has_its_own_shape(shape, kernel):
    q, k, v = (x.detach() for x in _qkv(H=2, G=2, T=3, S=4))
    bias = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).requires_grad_()
    mask = torch.arange(4) < 3
    assert torch.autograd.gradcheck(
        lambda b: attention(q, k, v, bias=b, mask=mask[None].expand(3, 4), kernel=kernel), bias
    )
    (gradient,) = _gradients(attention(q, k, v, bias=bias, mask=mask[None], kernel=kernel).square().sum(), bias)
    assert gradient.shape == shape
    if shape[-1] == 4:
        assert not gradient[..., 3].any()


@EVERY
def test_strided_inputs_give_the_numbers_of_contiguous_ones(kernel):
    q, k, v = (x.detach() for x in _qkv())
    for turn in (
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x.mT.contiguous().mT,
        lambda x: torch.stack((x, x), -1)[..., 0],
    ):
        torch.testing.assert_close(
            attention(turn(q), turn(k), turn(v), kernel=kernel), attention(q, k, v, kernel=kernel)
        )


@EVERY
def test_inputs_are_never_written_into(kernel):
    q, k, v = (x.detach() for x in _qkv())
    sinks, bias = torch.zeros(4, dtype=torch.float64), torch.zeros(5, 7, dtype=torch.float64)
    before = [x.clone() for x in (q, k, v, sinks, bias)]
    _serves(kernel, attention, q, k, v, bias=bias, softcap=1.0, sinks=sinks, kv_lengths=torch.tensor([3, 7]))
    _serves(kernel, attention, q, k, v, bias=bias, window=(1, 0), q_offset=2)
    for x, y in zip((q, k, v, sinks, bias), before, strict=True):
        assert torch.equal(x, y)


@EVERY
def test_autocast_does_not_round_what_came_in_float32(kernel):
    q, k, v = _qkv(dtype=torch.float32)
    expected = attention(q, k, v, kernel=kernel)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(q, k, v, kernel=kernel)
    assert torch.equal(out, expected)


def test_merged_parts_are_the_whole_with_gradients():
    q, k, v = _qkv(S=7)
    sinks = torch.linspace(-1, 1, 4, dtype=torch.float64)
    lengths = torch.tensor([7, 2])  # the second element's last part is empty: lse -inf
    for kernel in ("dense", "blockwise"):
        whole = attention_with_lse(q, k, v, sinks=sinks, kv_lengths=lengths)
        parts = [
            attention_with_lse(q, k[:, :, a:b], v[:, :, a:b], kv_lengths=(lengths - a).clamp(0, b - a), kernel=kernel,
                               sinks=sinks if a == 0 else None)
            for a, b in ((0, 3), (3, 7))
        ]  # fmt: skip
        merged = merge_attention([out for out, _ in parts], [lse for _, lse in parts])
        for mine, theirs in zip(merged, whole, strict=True):
            torch.testing.assert_close(mine, theirs)
        loss = [(out.square().sum() + lse.sum()) for out, lse in (merged, whole)]
        for mine, theirs in zip(_gradients(loss[0], q, k, v), _gradients(loss[1], q, k, v), strict=True):
            torch.testing.assert_close(mine, theirs)


def test_no_part_with_a_key_merges_to_nothing():
    out, lse = merge_attention([torch.zeros(1, 2, 3)] * 2, [torch.full((1, 2), -math.inf, requires_grad=True)] * 2)
    assert not out.any()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("kernel", ["dense", "blockwise", "auto"])
def test_a_huge_sink_takes_everything_and_one_of_minus_infinity_nothing(kernel):
    q, k, v = _qkv(H=4, G=4)
    sinks = torch.tensor([1e4, -1e4, -math.inf, 0.0], dtype=torch.float64).requires_grad_()
    out, lse = attention_with_lse(q, k, v, sinks=sinks, kv_lengths=torch.tensor([7, 0]), kernel=kernel)
    plain = attention(q, k, v, kernel="dense")
    assert not out[0, 0].any()
    assert (lse[0, 0] == 1e4).all()
    torch.testing.assert_close(out[0, 1:3], plain[0, 1:3])
    assert torch.equal(lse[1], sinks[:, None].expand(4, 5))
    assert not any(g.isnan().any() for g in _gradients(out.square().sum(), q, k, v, sinks))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "keywords",
    ["window=(256, 0)", "causal=True", "kv_lengths=torch.tensor([T // 2])", "q_segments=ids, kv_segments=ids"],
)
def test_long_sequences_take_linear_memory_forward_and_backward(keywords):
    script = f"""
import resource, sys, torch
from backend_torch import attention
T = int(sys.argv[1])
ids = torch.arange(T).div(4096, rounding_mode="floor")[None]
q, k, v, g = (torch.randn(1, 8, T, 64).requires_grad_() for _ in range(4))
before = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 2**20
attention(q, k, v, {keywords}).backward(g)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before)
"""

    def growth(length: int) -> float:
        run = subprocess.run([sys.executable, "-c", script, str(length)], capture_output=True, text=True, check=True)
        return float(run.stdout)

    # A call with quadratic memory would take 32 GB for its scores at the shorter length, and four times that at the
    # longer.
    shorter, longer = growth(32768), growth(65536)
    assert shorter < 1500
    assert longer <= 2 * 1.05 * shorter
