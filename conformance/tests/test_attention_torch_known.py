"""Attention in torch, calls like earlier ones: remembered forms lose no check, no mask and no gradient."""

from __future__ import annotations

import math
import re
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import core_numpy  # noqa: E402
from backend_torch import attention, attention_with_lse, known  # noqa: E402
from backend_torch.arrays import to_numpy  # noqa: E402
from conformance.tests import mix_attention as mix  # noqa: E402
from conformance.tests import refusals_attention as refusals  # noqa: E402
from conformance.tests.torch_attention import as_tensors  # noqa: E402


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(known, "_known", {})
    monkeypatch.setattr(known, "_bare", set())


def _qkv(T=5, S=5, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, 4, T, 6), (2, 2, S, 6), (2, 2, S, 6))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


# --- checks ---

# Each pair is equal to Python, with equal hashes, and the second of it is wrong.
ALIKE = {
    "causal": ({"causal": True}, {"causal": 1}),
    "causal off": ({"causal": False}, {"causal": 0.0}),
    "window": ({"window": (1, 0)}, {"window": (True, False)}),
    "window of fractions": ({"window": (1, 0)}, {"window": (1.0, 0.0)}),
    "offset": ({"causal": True, "q_offset": 1}, {"causal": True, "q_offset": True}),
    "offset, a fraction": ({"causal": True, "q_offset": 1}, {"causal": True, "q_offset": 1.0}),
    "scale": ({"scale": 1.0}, {"scale": True}),
    "soft cap": ({"softcap": 1.0}, {"softcap": True}),
    "dropout": ({"dropout_rate": 0.0}, {"dropout_rate": False}),
}


@pytest.mark.parametrize("name", ALIKE)
def test_what_only_looks_like_a_right_argument_is_refused_after_it(name):
    right, wrong = ALIKE[name]
    q, k, v = _qkv()
    for _ in range(2):
        assert attention(q, k, v, **right).shape == q.shape
    with pytest.raises(TypeError, match=r"must be"):
        attention(q, k, v, **wrong)


# With each argument right once, what is wrong with it is looked for in calls that are known but for that.
RIGHT = (
    {},
    {"causal": True, "q_offset": 0},
    {"mask": np.ones((3, 5), bool)},
    {"bias": np.zeros((3, 5), np.float32)},
    {"bias": np.zeros((2, 4, 3, 5), np.float32)},
    {"window": (1, 1), "q_offset": np.array([0, 1])},
    {"kv_lengths": np.array([5, 2])},
    {"q_segments": np.zeros((2, 3), np.int64), "kv_segments": np.zeros((2, 5), np.int64)},
    {"sinks": np.zeros(4, np.float32)},
    {"scale": 1.0, "softcap": 1.0},
)


@pytest.mark.parametrize("row", refusals.ROWS, ids=[row[0] for row in refusals.ROWS])
def test_what_is_refused_is_refused_again_and_after_right_calls(row):
    _, arguments, exception, phrase = row
    for times in range(3):
        keywords = as_tensors(arguments())
        with pytest.raises(exception, match=re.escape(phrase)):
            attention(keywords.pop("q"), keywords.pop("k"), keywords.pop("v"), **keywords)
        for changes in RIGHT:
            assert attention(**as_tensors(refusals.valid() | changes)).shape == (2, 4, 3, 7), times


def test_the_values_of_a_remembered_form_are_looked_at():
    q, k, v = _qkv()
    nan = torch.full((5, 5), math.nan)
    for right, wrong, phrase in (
        ({"kv_lengths": torch.tensor([5, 2])}, {"kv_lengths": torch.tensor([5, 6])}, "from 0 to the key length 5"),
        ({"kv_lengths": torch.tensor([5, 2])}, {"kv_lengths": torch.tensor([-1, 5])}, "from 0 to the key length 5"),
        ({"sinks": torch.zeros(4)}, {"sinks": torch.full((4,), math.nan)}, "sinks must not hold NaN"),
        ({"bias": torch.zeros(5, 5)}, {"bias": nan}, "bias must not hold NaN"),
    ):
        for call in (attention, attention_with_lse):
            for _ in range(2):
                call(q, k, v, **right)
            with pytest.raises(ValueError, match=phrase):
                call(q, k, v, **wrong)


def test_another_dtype_or_shape_is_another_form():
    q, k, v = _qkv()
    for _ in range(2):
        attention(q, k, v, causal=True)
    for wrong, exception in (
        ((q, k, v.float()), TypeError),
        ((q, k.float(), v), TypeError),
        ((q.float(), k, v), TypeError),
        ((q, k, v[:, :1]), ValueError),
        ((q, k[:, :, :4], v), ValueError),
        ((q[:, :3], k, v), ValueError),
    ):
        with pytest.raises(exception, match="must"):
            attention(*wrong, causal=True)
    with pytest.raises(ValueError, match="q_offset must be given"):
        attention(q[:, :, :4], k, v, causal=True)


# --- meaning ---


@pytest.mark.parametrize("row", mix.ROWS, ids=mix.identity)
def test_the_second_call_means_what_the_first_means(row):
    arrays, keywords = mix.arguments(row)
    expected = core_numpy.attention_with_lse(**arrays, **keywords)
    ours = as_tensors(arrays | keywords)
    for _ in range(2):
        found = attention(**ours), *attention_with_lse(**ours)
        for mine, theirs in zip(found, (expected[0], *expected), strict=True):
            np.testing.assert_allclose(to_numpy(mine), theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"causal": True},
        {"window": (2, 1)},
        {"mask": torch.arange(5).reshape(1, 1, 1, 5) < 3},
        {"mask": torch.arange(5).reshape(1, 1, 1, 5) != 2},
        {"kv_lengths": torch.tensor([3, 3])},
        {"kv_lengths": torch.tensor([3, 1]), "causal": True},
        {"bias": torch.linspace(-1, 1, 25, dtype=torch.float64).reshape(5, 5)},
        {"softcap": 2.0, "causal": True},
        {"sinks": torch.linspace(-1, 1, 4, dtype=torch.float64), "window": (1, 0)},
    ],
    ids=str,
)
def test_remembered_calls_have_the_gradients_of_the_formula(keywords):
    results = []
    for kernel in ("dense", "auto", "auto"):
        leaves = [x.requires_grad_() for x in _qkv(seed=1)]
        if kernel == "dense":  # written out for a whole mask, which no short cut takes
            shown = torch.ones(2, 4, 5, 5, dtype=torch.bool)
            out = attention(*leaves, **{"mask": shown} | keywords, kernel=kernel)
        else:
            out = attention(*leaves, **keywords)
        results.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
    for mine in results[1:]:
        for a, b in zip(mine, results[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_bias_gets_its_gradient_and_its_kernel_after_calls_that_wanted_none(monkeypatch):
    q, k, v = _qkv()
    bias = torch.zeros(5, 5, dtype=torch.float64)
    for _ in range(2):
        attention(q, k, v, bias=bias)
    learned = bias.clone().requires_grad_()
    with torch.no_grad():
        attention(q, k, v, bias=learned)
    # Torch's fused kernels have no gradient for a bias: quietly it would take its quadratic one.
    monkeypatch.setattr(sys.modules["backend_torch.attention"], "sdpa", None)
    (found,) = torch.autograd.grad(attention(q, k, v, bias=learned).square().sum(), learned)
    assert found.abs().min() > 0


def test_a_band_made_in_inference_mode_serves_training():
    leaves = [x.requires_grad_() for x in _qkv(T=9, S=9)]
    with torch.inference_mode():
        attention(*leaves, window=(3, 2))
    gradients = torch.autograd.grad(attention(*leaves, window=(3, 2)).sum(), leaves[2])
    torch.testing.assert_close(gradients[0].sum((0, 2, 3)), torch.full((2,), 2.0 * 2 * 9 * 6, dtype=torch.float64))


def test_a_band_restricts_up_to_its_last_pair():
    q, k, v = _qkv()
    far = torch.arange(5) - torch.arange(5)[:, None]
    for left in range(7):
        for offset in (-1, 0, 2):
            for window in ((left, None), (None, left), (left, 1)):
                ends = [math.inf if side is None else side for side in window]
                shown = (far - offset >= -ends[0]) & (far - offset <= ends[1])
                expected = attention(q, k, v, mask=shown, kernel="dense")
                torch.testing.assert_close(attention(q, k, v, window=window, q_offset=offset), expected)


def test_two_bands_of_one_size_are_two():
    q, k, v = _qkv()
    outs = [
        attention(q, k, v, window=window, q_offset=offset)
        for window, offset in (((1, 0), 0), ((0, 1), 0), ((1, 1), 0), ((1, 0), 2), ((1, 0), -1))
        for _ in range(2)
    ]
    for n, out in enumerate(outs):
        for m, other in enumerate(outs):
            assert torch.equal(out, other) == (n // 2 == m // 2)


def test_no_argument_is_lost_after_plain_calls():
    q, k, v = _qkv()
    for _ in range(2):
        plain = [attention(q, k, v, causal=causal) for causal in (False, True)]
    assert not torch.equal(*plain)
    ids = torch.tensor([[0, 0, 1, 1, 1]] * 2)
    for keywords in (
        {"mask": torch.arange(5).reshape(1, 1, 1, 5) < 3},
        {"bias": torch.linspace(-1, 1, 25, dtype=torch.float64).reshape(5, 5)},
        {"window": (1, 0)},
        {"q_offset": 2},
        {"kv_lengths": torch.tensor([3, 1])},
        {"q_segments": ids, "kv_segments": ids},
        {"sinks": torch.ones(4, dtype=torch.float64)},
        {"scale": 2.0},
        {"softcap": 0.5},
        {"dropout_rate": 0.5, "dropout_key": torch.tensor([0, 1])},
    ):
        for causal, without in zip((False, True), plain, strict=True):
            out = attention(q, k, v, causal=causal, **keywords)
            torch.testing.assert_close(out, attention(q, k, v, causal=causal, **keywords, kernel="dense"))
            assert torch.equal(out, without) == (keywords == {"q_offset": 2} and not causal)
    with pytest.raises(ValueError, match="kernel='flex' cannot serve"):
        attention(q, k, v, kernel="flex")


def test_a_plain_call_with_another_offset_is_another_call():
    q, k, v = _qkv()
    for offset in (0, 3, -1, None, 0, 3, -1, None):
        shown = torch.ones(5, 5, dtype=torch.bool).tril(offset or 0)
        expected = attention(q, k, v, mask=shown, kernel="dense")
        torch.testing.assert_close(attention(q, k, v, causal=True, q_offset=offset), expected)
    with pytest.raises(TypeError, match="q_offset must be an integer"):
        attention(q, k, v, causal=True, q_offset=False)


def test_autocast_and_strides_do_not_reach_a_remembered_call():
    q, k, v = _qkv(dtype=torch.float32)
    expected = [attention(q, k, v) for _ in range(2)][1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attention(q, k, v), expected)
    strided = [x.mT.contiguous().mT for x in (q, k, v)]
    torch.testing.assert_close(attention(*strided), expected)


def test_a_bare_call_is_torchs_kernel_alone_where_it_can_be(monkeypatch):
    """Its memory as the kernel reads it, its second derivative refused by name, and torch's own choice left to it."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernel, calls = known.FLASH, []
    monkeypatch.setattr(known, "FLASH", lambda *given: calls.append(given) or kernel(*given))
    for causal in (False, True):
        q, k, v = _qkv()
        expected = attention(q, k, v, causal=causal, kernel="dense")
        before = len(calls)
        for _ in range(3):
            torch.testing.assert_close(attention(q, k, v, causal=causal), expected)
        assert len(calls) == before + 2
        strided = [x.mT.contiguous().mT for x in (q, k, v)]
        torch.testing.assert_close(attention(*strided, causal=causal), expected)
        for n in range(3):
            mixed = [strided[n] if n == m else x for m, x in enumerate((q, k, v))]
            torch.testing.assert_close(attention(*mixed, causal=causal), expected)
        with sdpa_kernel(SDPBackend.MATH):
            torch.testing.assert_close(attention(q, k, v, causal=causal), expected)
        with torch.no_grad():
            torch.testing.assert_close(attention(q, k, v[:, :, :, :5], causal=causal), expected[..., :5])
        assert len(calls) == before + 2
        with pytest.raises(RuntimeError, match="kernel='sdpa' has no second derivative"):
            _twice(lambda q: attention(q, k, v, causal=causal), q)  # noqa: B023 - called at once
        assert len(calls) == before + 3
    # What torch's kernel takes of strided queries alone is not what it takes of others.
    q, k, v = (torch.randn(1, 8, 65, 3, dtype=torch.float64) for _ in range(3))
    strided = q.transpose(1, 2).contiguous().transpose(1, 2)
    for _ in range(2):
        torch.testing.assert_close(attention(strided, k, v), attention(q, k, v, kernel="dense"))
        assert _twice(lambda q: attention(q, k, v), q).isfinite().all()


def test_vmap_after_calls_of_the_same_shape_sees_its_own_batch():
    q, k, v = _qkv()
    for _ in range(2):
        attention(q, k, v, causal=True)
    stacked = [torch.stack([x, 2 * x, -x]) for x in (q, k, v)]
    mine = torch.func.vmap(lambda q, k, v: attention(q, k, v, causal=True))(*stacked)
    for n in range(3):
        torch.testing.assert_close(mine[n], attention(*(x[n] for x in stacked), causal=True))


def test_no_more_forms_are_kept_than_said(monkeypatch):
    monkeypatch.setattr(known, "MOST", 3)
    for length in range(1, 9):
        q, k, v = _qkv(T=length, S=length)
        assert attention(q, k, v).shape == q.shape
        attention(q, k, v, scale=1.0)
        assert 1 <= len(known._known) <= 3


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("scale", (0.5, 2.0, 0.0, -1.0)),
        ("softcap", (0.5, 3.0)),
        ("window", ((1, 0), (2, 0), (0, 1), (None, 1), (1, None))),
        ("q_offset", (0, 1, -2)),
        ("causal", (False, True)),
    ],
)
def test_two_numbers_of_one_type_are_two_forms(name, values):
    q, k, v = _qkv()
    arrays = [to_numpy(x) for x in (q, k, v)]
    more = {"causal": True} if name == "q_offset" else {}
    for _ in range(2):
        for value in values:
            for call, reference in (
                (attention, core_numpy.attention),
                (
                    lambda *x, **more: attention_with_lse(*x, **more)[1],
                    lambda *x, **more: core_numpy.attention_with_lse(*x, **more)[1],
                ),
            ):
                found = call(q, k, v, **more, **{name: value})
                expected = reference(*arrays, **more, **{name: value})
                np.testing.assert_allclose(to_numpy(found), expected, rtol=1e-12, atol=1e-12)


def test_a_kernel_and_what_is_asked_of_it_are_part_of_a_form():
    q, k, v = _qkv()
    with pytest.raises(RuntimeError, match="kernel='sdpa' has no second derivative"):
        _twice(lambda q: attention(q, k, v), q)
    for _ in range(2):
        attention(q, k, v, kernel="sdpa")
        assert _twice(lambda q: attention(q, k, v, kernel="dense"), q).isfinite().all()
        out, lse = attention_with_lse(q, k, v)
        assert torch.equal(out, attention_with_lse(q, k, v)[0]) and lse.shape == (2, 4, 5)
        with pytest.raises(ValueError, match="kernel='flex' cannot serve"):
            attention(q, k, v, kernel="flex")
        with pytest.raises(ValueError, match="kernel must be"):
            attention(q, k, v, kernel="none")


def _twice(f, x):
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(f(x).square().sum(), x, create_graph=True)
    return torch.autograd.grad(first.square().sum(), x)[0]
