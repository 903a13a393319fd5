"""Attention in torch: faults that others reported, numbers one can redo by hand, and what a call leaves alone."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from backend_torch.attention import (  # noqa: E402
    attention,
    attention_with_lse,
    merge_attention,
)
from conformance.tests.torch_attention import EVERY, gradients_of, qkv, serves  # noqa: E402


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
    q, k, v = qkv(T=7, S=7)
    scores = scale * (q @ k.repeat_interleave(2, 1).mT)
    seen = torch.ones(7, 7, dtype=torch.bool).tril()
    expected = torch.softmax(scores.masked_fill(~seen, -math.inf), -1) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(attention(q, k, v, causal=True, scale=scale, kernel=kernel), expected)


@EVERY
def test_the_cap_comes_before_the_mask(kernel):
    v = torch.tensor([[0.0], [1e6]])[None, None]
    mask = torch.tensor([[True, False], [True, False]])
    out = serves(kernel, attention, torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 2, 1), v, mask=mask, softcap=1.0)
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
    q, k, v = (x.detach() for x in qkv(H=2, G=2, T=3, S=4))
    bias = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).requires_grad_()
    mask = torch.arange(4) < 3
    assert torch.autograd.gradcheck(
        lambda b: attention(q, k, v, bias=b, mask=mask[None].expand(3, 4), kernel=kernel), bias
    )
    (gradient,) = gradients_of(attention(q, k, v, bias=bias, mask=mask[None], kernel=kernel).square().sum(), bias)
    assert gradient.shape == shape
    if shape[-1] == 4:
        assert not gradient[..., 3].any()


@EVERY
def test_strided_inputs_give_the_numbers_of_contiguous_ones(kernel):
    q, k, v = (x.detach() for x in qkv())
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
    q, k, v = (x.detach() for x in qkv())
    sinks, bias = torch.zeros(4, dtype=torch.float64), torch.zeros(5, 7, dtype=torch.float64)
    before = [x.clone() for x in (q, k, v, sinks, bias)]
    serves(kernel, attention, q, k, v, bias=bias, softcap=1.0, sinks=sinks, kv_lengths=torch.tensor([3, 7]))
    serves(kernel, attention, q, k, v, bias=bias, window=(1, 0), q_offset=2)
    for x, y in zip((q, k, v, sinks, bias), before, strict=True):
        assert torch.equal(x, y)


@EVERY
def test_autocast_does_not_round_what_came_in_float32(kernel):
    q, k, v = qkv(dtype=torch.float32)
    expected = attention(q, k, v, kernel=kernel)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(q, k, v, kernel=kernel)
    assert torch.equal(out, expected)


def test_merged_parts_are_the_whole_with_gradients():
    q, k, v = qkv(S=7)
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
        for mine, theirs in zip(gradients_of(loss[0], q, k, v), gradients_of(loss[1], q, k, v), strict=True):
            torch.testing.assert_close(mine, theirs)


def test_no_part_with_a_key_merges_to_nothing():
    out, lse = merge_attention([torch.zeros(1, 2, 3)] * 2, [torch.full((1, 2), -math.inf, requires_grad=True)] * 2)
    assert not out.any()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("kernel", ["dense", "blockwise", "auto"])
def test_a_huge_sink_takes_everything_and_one_of_minus_infinity_nothing(kernel):
    q, k, v = qkv(H=4, G=4)
    sinks = torch.tensor([1e4, -1e4, -math.inf, 0.0], dtype=torch.float64).requires_grad_()
    out, lse = attention_with_lse(q, k, v, sinks=sinks, kv_lengths=torch.tensor([7, 0]), kernel=kernel)
    plain = attention(q, k, v, kernel="dense")
    assert not out[0, 0].any()
    assert (lse[0, 0] == 1e4).all()
    torch.testing.assert_close(out[0, 1:3], plain[0, 1:3])
    assert torch.equal(lse[1], sinks[:, None].expand(4, 5))
    assert not any(g.isnan().any() for g in gradients_of(out.square().sum(), q, k, v, sinks))


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
