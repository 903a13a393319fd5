"""Attention in torch, the shortest ways: they give what the formula gives, and leave what they cannot say."""

from __future__ import annotations

import inspect
import itertools
import math

import pytest

torch = pytest.importorskip("torch")

from backend_torch import attention, explain_kernel, known  # noqa: E402

# 8 heads of 65 queries and keys are 33,800 scores: few, but not too few for weights that are kept.
T = 65
FEW, MANY = 1 << 15, 1 << 18


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(known, "_known", {})
    monkeypatch.setattr(known, "_bare", set())


def _qkv(N=1, G=8, T=T, S=T, D=3, seed=0, dtype=torch.float64, gradient=True):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((N, 8, T, D), (N, G, S, D), (N, G, S, D))
    found = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return [x.requires_grad_(gradient) for x in found]


def _leaf(*shape, seed=1, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).requires_grad_()


def _way(q, k, v, **keywords) -> str | None:
    """The short way that is known for a call."""
    parameters = list(inspect.signature(attention).parameters.values())[3:]
    _, found = known.look(q, k, v, False, *(keywords.get(p.name, p.default) for p in parameters))
    assert found is not None
    return found.short and found.short.__qualname__.split(".")[0].strip("_")


def _compare(leaves, way, *, twice=True, **keywords):
    """The second and third call, which go the short way, against the formula: values, gradients, and theirs."""
    expected = attention(*leaves[:3], **keywords, kernel="dense")
    weights = torch.linspace(-1, 1, expected.numel(), dtype=expected.dtype).reshape(expected.shape)
    formula = torch.autograd.grad((expected * weights).sum(), leaves, create_graph=twice)
    for _ in range(3):
        out = attention(*leaves[:3], **keywords)
        assert _way(*leaves[:3], **keywords) == way
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
        found = torch.autograd.grad((out * weights).sum(), leaves, retain_graph=True)
        for mine, theirs in zip(found, formula, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)
        with torch.no_grad():
            torch.testing.assert_close(attention(*leaves[:3], **keywords), expected, rtol=1e-12, atol=1e-12)
    if twice:
        found = torch.autograd.grad((out * weights).sum(), leaves, create_graph=True)
        second = [
            torch.autograd.grad(sum(x.square().sum() for x in grads), leaves, allow_unused=True, materialize_grads=True)
            for grads in (found, formula)
        ]
        for mine, theirs in zip(*second, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10)


# --- few scores ---


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("N", "G"), [(1, 8), (2, 8), (1, 2), (2, 2)])
def test_few_scores_have_the_formulas_values_and_derivatives_of_both_orders(N, G, causal):
    for sunk, softcap in itertools.product((False, True), (None, 1.5)):
        sinks = _leaf(8) if sunk else None
        leaves = [*_qkv(N, G), *([sinks] if sunk else [])]
        _compare(leaves, "kept", causal=causal, sinks=sinks, softcap=softcap, scale=0.7)


@pytest.mark.parametrize("shape", [(1, 8, T, T), (T, T), (1, 1, 1, T), (1, 8, T, 1)], ids=str)
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_few_scores_with_a_learned_bias_have_the_formulas_too(shape, softcap):
    for sunk in (False, True):
        bias, sinks = _leaf(*shape), _leaf(8, seed=2) if sunk else None
        leaves = [*_qkv(), bias, *([sinks] if sunk else [])]
        _compare(leaves, "kept", bias=bias, sinks=sinks, softcap=softcap)


def test_more_scores_with_a_learned_bias_have_them_too():
    bias = _leaf(1, 8, 192, 192)
    assert bias.numel() > MANY
    _compare([*_qkv(T=192, S=192), bias], "kept", bias=bias, twice=False)


def test_more_scores_with_a_soft_cap_have_them_too():
    assert MANY < 8 * 182 * 182
    _compare(_qkv(T=182, S=182), "kept", causal=True, softcap=1.5, twice=False)
    _compare(_qkv(T=182, S=182), "kept", softcap=1.5, twice=False)


def test_queries_and_keys_of_different_lengths_too():
    _compare(_qkv(T=T, S=80), "kept", scale=-0.3)
    _compare(_qkv(T=90, S=70), "kept", causal=True, q_offset=0)
    _compare(_qkv(G=2, T=1, S=1100), "kept")
    _compare(_qkv(G=2, T=3, S=1100), "kept", softcap=2.0)


def test_a_step_of_heads_that_share_a_long_cache_is_two_products():
    for keywords, queries, taken in (({}, 1, "dense"), ({}, 4, "dense"), ({}, 5, "sdpa"), ({"G": 8}, 1, "sdpa")):
        q, k, v = _qkv(T=queries, S=1100, gradient=False, **({"G": 2} | keywords))
        assert f"{taken} is chosen" in explain_kernel(q, k, v)
        for _ in range(2):
            torch.testing.assert_close(attention(q, k, v), attention(q, k, v, kernel="dense"))


def test_which_calls_are_few_scores():
    for size, taken in ((T, "dense"), (60, "sdpa"), (182, "sdpa"), (181, "dense")):
        leaves = _qkv(T=size, S=size)
        assert (FEW <= 8 * size * size <= MANY) == (taken == "dense")
        assert f"{taken} is chosen" in explain_kernel(*leaves), size
        assert f"{taken} is chosen" in explain_kernel(*leaves, causal=True), size
    for size, taken in ((256, "dense"), (257, "sdpa")):  # a bias costs torch's kernel more
        bias = torch.zeros(size, size, dtype=torch.float64)
        assert f"{taken} is chosen" in explain_kernel(*_qkv(T=size, S=size), bias=bias), size
        assert "dense is chosen" in explain_kernel(*_qkv(T=size, S=size), bias=bias.requires_grad_()), size
    for gradient, taken in ((True, "dense"), (False, "blockwise")):  # forward alone sinks rescale what torch's gives
        assert f"{taken} is chosen" in explain_kernel(*_qkv(gradient=gradient), sinks=torch.zeros(8))
    halves = [x.bfloat16() for x in _qkv()]
    assert "sdpa is chosen" in explain_kernel(*halves)


def test_strided_arrays_are_few_scores_with_sinks_and_torchs_own_without():
    leaves = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in _qkv(2, 2)]
    assert not leaves[0].is_contiguous()
    _compare(leaves, "kept", causal=True, sinks=_leaf(8).detach())
    _compare([x.detach().mT.contiguous().mT.requires_grad_() for x in _qkv()], "kept", sinks=_leaf(8).detach())
    for strided in (leaves, [x.detach() for x in leaves]):
        assert "few scores" not in explain_kernel(*strided, causal=True)
        assert "few scores" in explain_kernel(*(x.contiguous() for x in strided), causal=True)
    # A form of contiguous arrays that is remembered is not taken for that of strided ones.
    close = [x.detach().contiguous() for x in leaves]
    torch.testing.assert_close(attention(*close, causal=True), attention(*(x.detach() for x in leaves), causal=True))


# --- sinks beside torch's kernel ---


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("N", "G"), [(1, 8), (2, 2)])
def test_sinks_beside_torchs_kernel_have_the_formulas_values_and_gradients(N, G, causal):
    sinks = _leaf(8)
    leaves = [*_qkv(N, G, T=17, S=17), sinks]
    _compare(leaves, "sinks", causal=causal, sinks=sinks, scale=0.4, twice=False)
    _compare(leaves[:3], "sinks", causal=causal, sinks=sinks.detach().float(), twice=False)
    strided = [x.detach().mT.contiguous().mT.requires_grad_() for x in leaves[:3]]
    _compare([*strided, sinks], "sinks", causal=causal, sinks=sinks, twice=False)
    out = attention(*leaves[:3], sinks=sinks)
    (gradient,) = torch.autograd.grad(out.sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="kernel='blockwise' has no second derivative; kernel='dense' has"):
        gradient.sum().backward()


def test_a_sink_of_minus_infinity_is_none_and_one_that_is_no_number_is_refused():
    for size in (17, T):
        q, k, v = _qkv(T=size, S=size)
        plain = attention(q, k, v, kernel="dense")
        for _ in range(2):
            out = attention(q, k, v, sinks=torch.full((8,), -math.inf, dtype=torch.float64))
            torch.testing.assert_close(out, plain)
            for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
                assert gradient.isfinite().all()
            # All the weight is the sink's: nothing is left, and nothing is NaN.
            assert not attention(q, k, v, sinks=torch.full((8,), math.inf, dtype=torch.float64)).isinf().any()
            with pytest.raises(ValueError, match="sinks must not hold NaN"):
                attention(q, k, v, sinks=torch.full((8,), math.nan, dtype=torch.float64))


# --- keys that are cut off, biases that are looked through ---


@pytest.mark.parametrize("causal", [False, True])
def test_padding_of_every_form_means_what_the_formula_means(causal):
    q, k, v = leaves = _qkv(2, 2, T=9, S=7)
    keywords = {"causal": causal, "q_offset": 0}
    shapes = ((1, 1, 1, 7), (1, 1, 1, 7)) if causal else ((1, 1, 1, 7), (1, 7))
    for shown in itertools.product((False, True), repeat=7):
        for shape in shapes:
            mask = torch.tensor(shown).reshape(shape)
            if shape == (1, 7):
                mask = mask.expand(9, 7)
            expected = attention(*leaves, mask=mask, **keywords, kernel="dense")
            torch.testing.assert_close(attention(*leaves, mask=mask, **keywords), expected)
    bad = torch.tensor([[[[1, 1, 1, 0, 0, 0, 0]]]], dtype=torch.bool)
    with torch.no_grad():
        k[:, :, 3:], v[:, :, 3:] = math.nan, math.inf
    for _ in range(2):
        out = attention(q, k, v, mask=bad, **keywords)
        assert out.isfinite().all() and _way(q, k, v, mask=bad, **keywords) == "padding"
        for gradient in torch.autograd.grad(out.sum(), leaves):
            assert gradient.isfinite().all()


def test_one_length_of_every_value_means_what_the_formula_means():
    q, k, v = leaves = _qkv(T=9, S=7)
    with torch.no_grad():
        k[:, :, 6:], v[:, :, 6:] = math.nan, math.inf
    for causal in (False, True):
        for length in (0, 1, 3, 6, 0, 6):
            lengths = torch.tensor([length])
            keywords = {"kv_lengths": lengths, "causal": causal, "q_offset": 0}
            out = attention(q, k, v, **keywords)
            torch.testing.assert_close(out, attention(q, k, v, **keywords, kernel="dense"))
            assert _way(q, k, v, **keywords) == "padding"
            for gradient in torch.autograd.grad(out.sum(), leaves):
                assert gradient.isfinite().all()
        for length in (8, -1):
            with pytest.raises(ValueError, match="kv_lengths must be from 0 to the key length 7"):
                attention(q, k, v, kv_lengths=torch.tensor([length]), causal=causal, q_offset=0)


@pytest.mark.parametrize(
    ("size", "ways"),
    [(20, ("biased", "kept")), (64, ("kept", "kept")), (T, ("kept", "kept")), (260, ("biased", "kept"))],
)
@pytest.mark.parametrize("learned", [False, True])
def test_a_bias_that_hides_keys_or_empties_rows_goes_the_long_way(size, ways, learned):
    leaves = q, k, v = _qkv(T=size, S=size, D=2)
    bias = _leaf(1, 8, size, size).detach()
    hides, empties, keeps_last = bias.clone(), bias.clone(), bias.clone()
    hides[..., 3] = -math.inf
    empties[:, 5, 2] = -math.inf
    keeps_last[..., :-1, 3] = -math.inf
    few = 8 * size * size >= FEW
    # Hidden: NaN and inf, and what is a number in the output and none in the gradient.
    for hidden in ((math.nan, math.inf), (1.0, 1.7e308)):
        for given in (bias, empties, keeps_last, hides):
            term = given.clone().requires_grad_(learned)
            if given is hides:
                leaves = [x.detach().clone() for x in (q, k, v)]
                leaves[1][:, :, 3], leaves[2][:, :, 3] = hidden
                leaves = [x.requires_grad_() for x in leaves]
            out = attention(*leaves, bias=term)
            if few or not learned:
                assert _way(*leaves, bias=term) == ways[learned]
            expected = attention(*leaves, bias=term, kernel="dense")
            assert out.isfinite().all()
            torch.testing.assert_close(out, expected)
            with torch.no_grad():  # where NaN shows, and what is a number is right
                torch.testing.assert_close(attention(*leaves, bias=term), expected)
            wanted = [*leaves, *([term] if learned else [])]
            for mine, theirs in zip(
                torch.autograd.grad(out.square().sum(), wanted),
                torch.autograd.grad(expected.square().sum(), wanted),
                strict=True,
            ):
                assert mine.isfinite().all()
                torch.testing.assert_close(mine, theirs)
            leaves = q, k, v


def test_a_short_way_is_not_taken_where_tensors_have_no_values_or_autocast_is_on():
    from torch._subclasses.fake_tensor import FakeTensorMode

    q, k, v = _qkv(dtype=torch.float32, gradient=False)
    arguments = {"kv_lengths": torch.tensor([40])}
    expected = [attention(q, k, v, **arguments) for _ in range(2)][1]
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert attention(q, k, v, **arguments).shape == q.shape
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attention(q, k, v, **arguments), expected)
        assert attention(q, k, v).dtype == torch.float32
        torch.testing.assert_close(attention(q, k, v), attention(q, k, v, kernel="dense"), rtol=1e-5, atol=1e-6)


def test_a_future_made_in_inference_mode_serves_training():
    from backend_torch import few

    few.future.cache_clear()
    with torch.inference_mode():
        q, k, v = (x.detach() for x in _qkv())
        for _ in range(2):
            attention(q, k, v, causal=True)
    _compare(_qkv(), "kept", causal=True)


@pytest.mark.parametrize("change", [{}, {"kv_lengths": torch.tensor([70])}, {"sinks": torch.zeros(8)}], ids=str)
def test_a_call_is_recomputed_as_it_was_the_first_of_its_form_too(change):
    from torch.utils.checkpoint import checkpoint

    # A head size that no other test has: the form is new.
    given = [torch.randn(1, 8, 93, 11, requires_grad=True) for _ in range(3)]
    plain = torch.autograd.grad(attention(*given, causal=True, kernel="dense", **change).sum(), given)
    out = checkpoint(attention, *given, causal=True, use_reentrant=False, **change)
    for x, y in zip(torch.autograd.grad(out.sum(), given), plain, strict=True):
        torch.testing.assert_close(x, y)


def test_keys_after_the_last_query_stay_hidden_in_every_call():
    for queries, keys in ((5, 7), (T, 80)):
        for sinks in (None, _leaf(8)):
            q, k, v = _qkv(T=queries, S=keys)
            with torch.no_grad():
                k[:, :, queries:], v[:, :, queries:] = math.nan, math.inf
            for _ in range(3):
                out = attention(q, k, v, causal=True, q_offset=0, sinks=sinks)
                assert out.isfinite().all()
                for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
                    assert gradient.isfinite().all()
                with torch.no_grad():
                    assert attention(q, k, v, causal=True, q_offset=0, sinks=sinks).isfinite().all()


# Torch's own forward mode scripts functions when it is first used.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("size", [17, T])
def test_few_scores_have_forward_mode(size):
    q, k, v = _qkv(T=size, S=size, gradient=False)
    step = torch.linspace(-1, 1, q.numel(), dtype=q.dtype).reshape(q.shape)
    ways = [{"kernel": "dense"}, {"softcap": 2.0}, {"sinks": torch.zeros(8, dtype=q.dtype)}]
    for more in [*ways, *([{}] if size == T else [])]:
        for _ in range(2):
            attention(q, k, v, causal=True, **more)
            with torch.autograd.forward_ad.dual_level():
                dual = torch.autograd.forward_ad.make_dual(q, step)
                out = attention(dual, k, v, causal=True, **more)
                found = torch.autograd.forward_ad.unpack_dual(out).tangent
            ahead, behind = (attention(q + e * step, k, v, causal=True, **more) for e in (1e-6, -1e-6))
            torch.testing.assert_close(found, (ahead - behind) / 2e-6, rtol=1e-6, atol=1e-8)
