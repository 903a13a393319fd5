"""What is native in torch's layers: wide arithmetic, one rounding, gradients where the formula has none."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import backend_torch as B  # noqa: E402
import core_numpy as C  # noqa: E402
from backend_torch.arrays import from_numpy, to_numpy  # noqa: E402


def test_norms_use_two_passes_and_eps_inside_the_root():
    row = torch.tensor([1.0, -1.0, 2.0, -2.0], dtype=torch.float64) * 1e-3
    assert B.layer_norm(row, None, None, eps=1e-5)[0].item() == pytest.approx(0.28284, abs=1e-5)
    assert B.layer_norm(row, None, None, eps=1e-6)[0].item() == pytest.approx(0.53452, abs=1e-5)
    assert B.rms_norm(torch.full((5,), 1e-3), None, eps=1e-6)[0].item() == pytest.approx(0.70711, abs=1e-5)
    for mean, bound in ((100.0, 2e-3), (1000.0, 2e-2)):
        x = mean + torch.arange(16) * 1e-3
        assert x.dtype == torch.float32
        want = C.layer_norm(x.numpy().astype(np.float64), None, None, eps=1e-5)
        assert np.abs(B.layer_norm(x, None, None, eps=1e-5).numpy() - want).max() < bound


def test_a_zero_weight_with_unit_offset_is_no_weight():
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(B.rms_norm(x, torch.zeros(5), eps=1e-6, unit_offset=True), B.rms_norm(x, None, eps=1e-6))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_norms_apply_the_weight_before_the_one_rounding(dtype):
    rng = np.random.default_rng(0)
    x, w, b = (from_numpy(rng.standard_normal(s) * 2, dtype=dtype) for s in ((40, 33), (33,), (33,)))
    third = w.float() / 3
    for got, want in (
        (B.layer_norm(x, w, b, eps=1e-5), C.layer_norm(to_numpy(x), to_numpy(w), to_numpy(b), eps=1e-5)),
        (B.layer_norm(x, third, None, eps=1e-5), C.layer_norm(to_numpy(x), to_numpy(third), None, eps=1e-5)),
        (B.rms_norm(x, w, eps=1e-5), C.rms_norm(to_numpy(x), to_numpy(w), eps=1e-5)),
        (
            B.rms_norm(x, w, eps=1e-5, unit_offset=True),
            C.rms_norm(to_numpy(x), to_numpy(w), eps=1e-5, unit_offset=True),
        ),
        (B.softmax(x, axis=0), C.softmax(to_numpy(x), axis=0)),
        (B.silu(x), C.silu(to_numpy(x))),
        (B.cross_entropy(x, torch.arange(40) % 33), C.cross_entropy(to_numpy(x), np.arange(40) % 33)),
    ):  # fmt: skip
        assert to_numpy(got).dtype == want.dtype
        # float32 inside: a rounding differs where the exact value lies within 1e-6 of a tie, one in 1000 at most.
        wrong = to_numpy(got).astype(np.float64) != want.astype(np.float64)
        assert wrong.mean() < 0.002 or got.dtype == torch.float32


def test_gelu_is_exact_unless_asked():
    x = torch.tensor([-2.699], dtype=torch.float64)
    gap = (B.gelu(x) - B.gelu(x, approximate="tanh")).abs().item()
    assert gap == pytest.approx(4.73e-4, abs=2e-6)
    assert B.gelu(x).item() == pytest.approx(C.gelu(x.numpy())[0], rel=1e-14)


def test_softmax_over_nothing_is_zero_and_so_is_its_gradient():
    x = torch.tensor([[-torch.inf, -torch.inf], [0.0, -torch.inf]], requires_grad=True)
    y = B.softmax(x)
    assert y.tolist() == [[0.0, 0.0], [1.0, 0.0]]
    (y * torch.tensor([1.0, 3.0])).sum().backward()
    assert x.grad.tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_dropout_is_the_references_mask_and_rate_one_is_zero():
    x = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[0, 0] = torch.nan
    for rate in (0.2, 0.5, 0.99):
        got = B.dropout(x, rate, B.key(4)).numpy()
        np.testing.assert_allclose(got, C.dropout(x.numpy(), rate, C.key(4)), rtol=1e-15)
    x.requires_grad_()
    y = B.dropout(x, 1.0, B.key(0))
    y.sum().backward()
    assert not y.any() and not x.grad.any()
    ones = B.dropout(torch.ones(999), 0.2, B.key(0)).unique().tolist()
    assert ones == [0.0, 1.25]
    with pytest.raises(ValueError, match="key must be given"):
        B.dropout(torch.ones(3), 0.5, None)


def test_cross_entropy_ignores_what_is_not_counted_even_where_it_is_nan():
    poisoned = torch.zeros(3, 4)
    poisoned[2] = torch.nan
    poisoned.requires_grad_()
    loss = B.cross_entropy(poisoned, torch.tensor([1, 2, -100]), z_loss=0.5)
    loss.backward()
    assert loss.item() == pytest.approx(np.log(4) + 0.5 * np.log(4) ** 2, rel=1e-6)
    assert torch.isfinite(poisoned.grad).all() and not poisoned.grad[2].any()
    nothing = B.cross_entropy(poisoned, torch.full((3,), -100))
    assert nothing.item() == 0.0


def test_cross_entropy_is_the_reference():
    rng = np.random.default_rng(0)
    logits, targets = 3 * rng.standard_normal((2, 5, 7)), rng.integers(0, 7, (2, 5))
    targets[0, :2] = 3
    for options in ({}, {"ignore_index": 3}, {"label_smoothing": 0.2, "z_loss": 0.1, "ignore_index": 3}):
        got = B.cross_entropy(from_numpy(logits), from_numpy(targets), **options)
        assert got.item() == pytest.approx(float(C.cross_entropy(logits, targets, **options)), rel=1e-13)
