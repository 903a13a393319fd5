"""Half types in torch on a CPU: what is promised in float32 is right in float32, and float16 is rounded once."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import core_numpy  # noqa: E402
from backend_torch.arrays import to_numpy  # noqa: E402
from backend_torch.attention import attention, attention_with_lse  # noqa: E402

HALVES = [torch.float16, torch.bfloat16]
RESTRICTIONS = [{}, {"causal": True, "q_offset": 4}, {"window": (9, 3), "q_offset": 2}, {"scale": -0.3}]


def qkv(dtype, T=37, S=41, D=16, requires_grad=False):
    generator = torch.Generator().manual_seed(5)
    shapes = ((2, 4, T, D), (2, 2, S, D), (2, 2, S, D))
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_(requires_grad) for s in shapes]


def exact(call, tensors, **given):
    return call(*(to_numpy(x.detach()).astype(np.float64) for x in tensors), **given)


@pytest.mark.parametrize("kernel", ["blockwise", "dense", "auto"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("given", RESTRICTIONS)
def test_lse_of_half_inputs_is_right_to_float32(given, dtype, kernel):
    tensors = qkv(dtype)
    out, lse = attention_with_lse(*tensors, **given, kernel=kernel)
    want, want_lse = exact(core_numpy.attention_with_lse, tensors, **given)
    assert out.dtype == dtype and lse.dtype == torch.float32
    # 3e-6 is three units in the last place of an lse near 8; the exponential for half types is off by 2e-5.
    np.testing.assert_allclose(to_numpy(lse), want_lse, rtol=0, atol=3e-6)
    np.testing.assert_allclose(to_numpy(out).astype(np.float64), want, rtol=0, atol=0.02)


@pytest.mark.parametrize("kernel", ["sdpa", "blockwise", "dense", "auto"])
@pytest.mark.parametrize("given", RESTRICTIONS)
def test_float16_is_rounded_once(given, kernel):
    tensors = qkv(torch.float16)
    out = to_numpy(attention(*tensors, **given, kernel=kernel))
    want = exact(core_numpy.attention, tensors, **given)
    half_a_unit = 0.5 * np.spacing(np.abs(want).astype(np.float16)).astype(np.float64)
    # 1e-6: float32's own error before, on values near 1. Weights kept in float16 cost 1e-4.
    assert (np.abs(out.astype(np.float64) - want) <= half_a_unit + 1e-6).all()


@pytest.mark.parametrize("kernel", ["sdpa", "blockwise"])
def test_float16_gradients_come_back_in_float16_and_are_those_of_the_formula(kernel):
    tensors = qkv(torch.float16, requires_grad=True)
    grads = torch.autograd.grad(attention(*tensors, kernel=kernel).float().square().sum(), tensors)
    formula = torch.autograd.grad(attention(*tensors, kernel="dense").float().square().sum(), tensors)
    for got, want in zip(grads, formula, strict=True):
        assert got.dtype == torch.float16
        torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3 * float(want.abs().max()))
