"""Rows whose scores are all far off, by a bias of the least number or of 1e9: right outputs, lse and gradients.

Programs write such a bias for "masked", and a padded query then has nothing else. Its weights are 1 / S, and an lse of
1e9 has no digits left for log S: who makes weights again from lse finds 1.
"""

from __future__ import annotations

import numpy as np
import pytest

import core_numpy
from conformance.tests.inputs_attention import check_close, normal
from core_numpy.gradients import attention_vjp, attention_with_lse_vjp

LEAST = float(np.finfo("float32").min)
FAR = (LEAST, -1e9, 1e9, float(np.finfo("float16").min))
# No sink, sinks as far off, and one of no weight beside an ordinary one.
SINKS = {"none": None, "far": (0.5, 1.0), "near": (-np.inf, 0.25)}
NAMES = ("q", "k", "v", "bias", "sinks")


def problem(far, sinks, *, T=6, S=5, D=4, seed=0):
    """q, k, v, bias, sinks: far rows 1 and 4, a row with far keys and masked ones, one with masked ones alone.

    The queries of the far rows are 0, so that float32 rounds no score and the reference in float64 says the same.
    """
    q, k, v = (normal(1, 2, n, D, seed=seed).astype("float32") for n in (T, S, S))
    bias = normal(1, 2, T, S, seed=seed + 1).astype("float32")
    q[:, :, [1, 4]] = 0.0
    bias[:, :, [1, 4]] = far
    bias[:, :, 2, ::2], bias[:, :, 2, 1] = -abs(far), -np.inf
    bias[:, :, 3] = -np.inf
    found = None
    if SINKS[sinks] is not None:
        found = np.array([far * x if sinks == "far" else x for x in SINKS[sinks]], "float32")
    return {"q": q, "k": k, "v": v, "bias": bias, "sinks": found}


def expected(given, grad, grad_lse):
    """out, lse, and their gradients by the reference."""
    arrays, terms = [given[name] for name in "qkv"], {name: given[name] for name in ("bias", "sinks")}
    out, lse = core_numpy.attention_with_lse(*arrays, **terms)
    if grad_lse is None:
        return out, lse, attention_vjp(grad, *arrays, **terms)
    return out, lse, attention_with_lse_vjp(grad, grad_lse, *arrays, **terms)


def check_all(mine, wanted, tolerance=2e-5):
    """out, lse (None for not asked for) and the gradients that are there."""
    check_close(mine[0], wanted[0], tolerance)
    if mine[1] is not None:
        assert (np.isinf(mine[1]) == np.isinf(wanted[1])).all()
        finite = np.isfinite(wanted[1])
        np.testing.assert_allclose(mine[1][finite], wanted[1][finite], rtol=1e-6, atol=2e-6)
    assert {"q", "k", "v"} <= set(mine[2])
    for name, gradient in mine[2].items():
        # Relative to the largest: what a row adds up is rounded as its largest terms are.
        check_close(gradient, wanted[2][name], tolerance * max(1.0, np.abs(wanted[2][name]).max()))


def cotangents(T, Dv, with_lse):
    grad = normal(1, 2, T, Dv, seed=7).astype("float32")
    return grad, normal(1, 2, T, seed=8).astype("float32") if with_lse else None


def by_hand(given, grad, grad_lse):
    """The same by long double and differences from each row's largest score, without an lse."""
    wide = {name: None if x is None else x.astype(np.longdouble) for name, x in given.items()}
    s = wide["q"] @ wide["k"].swapaxes(-1, -2) / np.sqrt(np.longdouble(given["q"].shape[-1])) + wide["bias"]
    if wide["sinks"] is not None:
        s = np.concatenate([s, np.broadcast_to(wide["sinks"][:, None, None], (*s.shape[:-1], 1))], -1)
    m = s.max(-1, keepdims=True)
    e = np.exp(s - np.where(np.isinf(m), 0, m))
    total = e.sum(-1, keepdims=True)
    P = e / np.where(total == 0, 1, total)
    values = wide["v"] if wide["sinks"] is None else np.pad(wide["v"], ((0, 0), (0, 0), (0, 1), (0, 0)))
    dP = grad.astype(np.longdouble) @ values.swapaxes(-1, -2)
    ds = P * (dP - (P * dP).sum(-1, keepdims=True) + (0 if grad_lse is None else grad_lse[..., None]))
    S = given["k"].shape[2]
    gradients = {"bias": ds[..., :S], "v": (P[..., :S].swapaxes(-1, -2) @ grad)}
    if wide["sinks"] is not None:
        gradients["sinks"] = ds[..., S].sum((0, 2))
    return P @ values, gradients


@pytest.mark.parametrize("sinks", SINKS)
@pytest.mark.parametrize("far", FAR)
def test_the_reference_is_the_formula(far, sinks):
    given = problem(far, sinks)
    for with_lse in (False, True):
        grad, grad_lse = cotangents(6, 4, with_lse)
        out, gradients = by_hand(given, grad, grad_lse)
        check_all((out, None, gradients | {n: expected(given, grad, grad_lse)[2][n] for n in "qk"}),
                  expected(given, grad, grad_lse), 1e-6)  # fmt: skip


@pytest.mark.parametrize("with_lse", [False, True], ids=["out", "lse"])
@pytest.mark.parametrize("sinks", SINKS)
@pytest.mark.parametrize("far", FAR)
@pytest.mark.parametrize("kernel", ["auto", "sdpa", "blockwise", "dense"])
def test_torch_has_the_gradients_of_rows_far_off(kernel, far, sinks, with_lse):
    torch = pytest.importorskip("torch")
    import backend_torch

    given = problem(far, sinks)
    grad, grad_lse = cotangents(6, 4, with_lse)
    wanted = expected(given, grad, grad_lse)
    for to_bias in (True, False):  # torch's fused kernel has no gradient for a bias, and takes it where none is asked
        leaves = {name: torch.tensor(x) for name, x in given.items() if x is not None}
        for name, x in leaves.items():
            x.requires_grad_(name != "bias" or to_bias)
        arguments = dict(leaves)
        arrays = [arguments.pop(name) for name in "qkv"]
        call = backend_torch.attention_with_lse if with_lse else backend_torch.attention
        try:
            found = call(*arrays, **arguments, kernel=kernel)
        except ValueError as error:
            assert kernel == "sdpa" and "cannot serve" in str(error)
            continue
        out, lse = found if with_lse else (found, None)
        loss = [out] if lse is None else [out, lse]
        cotangent = [torch.tensor(x) for x in (grad, grad_lse) if x is not None]
        wants = {name: x for name, x in leaves.items() if x.requires_grad}
        gradients = torch.autograd.grad(loss, list(wants.values()), cotangent)
        mine = {name: g.numpy() for name, g in zip(wants, gradients, strict=True)}
        check_all((out.detach().numpy(), None if lse is None else lse.detach().numpy(), mine), wanted)


def test_torch_compiled_has_the_gradients_of_rows_far_off():
    torch = pytest.importorskip("torch")
    import backend_torch

    given = problem(LEAST, "none")
    q, k, v = (torch.tensor(given[name]).requires_grad_() for name in "qkv")
    grad, _ = cotangents(6, 4, False)
    call = torch.compile(backend_torch.attention, backend="aot_eager", fullgraph=True)
    out = call(q, k, v, bias=torch.tensor(given["bias"]))
    found = torch.autograd.grad(out, (q, k, v), torch.tensor(grad))
    mine = {name: g.numpy() for name, g in zip("qkv", found, strict=True)}
    check_all((out.detach().numpy(), None, mine), expected(given, grad, None))


def test_torch_has_the_gradients_of_scores_that_are_all_far_off_by_themselves():
    """Nothing but q and k: the shortest way of all, and sinks."""
    torch = pytest.importorskip("torch")
    import backend_torch

    q, k, v = (normal(1, 2, n, 4, seed=1).astype("float32") for n in (6, 5, 5))
    q[..., 0], k[..., 0] = -(2.0**20), 2.0**10  # exact: a power of two, beside which nothing else of the sum is seen
    for sinks in (None, np.array([-(2.0**30), 0.0], "float32")):
        arguments = {} if sinks is None else {"sinks": torch.tensor(sinks)}
        dense, auto = [], []
        for kernel, found in (("dense", dense), ("auto", auto), ("auto", auto)):
            leaves = [torch.tensor(x).requires_grad_() for x in (q, k, v)]
            out = backend_torch.attention(*leaves, **arguments, scale=1.0 if sinks is not None else None, kernel=kernel)
            found[:] = [out, *torch.autograd.grad(out.square().sum(), leaves)]
        for a, b in zip(auto, dense, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * b.detach().abs().max().item())


@pytest.mark.parametrize(("way", "far"), [("whole", LEAST), ("unrolled", LEAST), ("chunks", 1e9)])
def test_jax_has_the_gradients_of_rows_far_off(way, far, monkeypatch):
    jax = pytest.importorskip("jax")
    import backend_jax
    from conformance.tests.jax_attention import cut

    with cut(way, monkeypatch):
        for sinks in ("far", "near"):
            given = problem(far, sinks)
            grad, grad_lse = cotangents(6, 4, True)
            wanted = expected(given, grad, grad_lse)
            leaves = {name: x for name, x in given.items() if x is not None}

            def call(leaves):
                rest = dict(leaves)
                arrays = [rest.pop(name) for name in "qkv"]
                return backend_jax.attention_with_lse(*arrays, **rest, kernel="blockwise")

            (out, lse), pull = jax.vjp(call, leaves)
            mine = {name: np.asarray(x) for name, x in pull((grad, grad_lse))[0].items()}
            check_all((np.asarray(out), np.asarray(lse), mine), wanted)
