"""`conformance.bounds`: the oracle with its bounds for inputs of one's own."""

import subprocess
import sys

import numpy as np
import pytest

import conformance
from conformance import oracle
from conformance.inputs import DTYPES, widened
from core_numpy import attention, attention_with_lse, rms_norm
from core_numpy.gradients import attention_vjp, attention_with_lse_vjp

DRAW = np.random.default_rng(3)


def inputs(dtype="float32"):
    shapes = {"q": (2, 4, 3, 8), "k": (2, 2, 5, 8), "v": (2, 2, 5, 6)}
    return {name: DRAW.standard_normal(shape).astype(DTYPES[dtype]) for name, shape in shapes.items()}


def seen():
    mask = np.ones((3, 5), bool)
    mask[1], mask[2, 3:] = False, False
    return mask


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_right_answer_is_within_its_bounds_and_a_wrong_one_is_not(dtype):
    given = inputs(dtype) | {"mask": seen()}
    want = conformance.bounds("attention", given, wrt=["q", "k", "v"])
    arrays = [given[name] for name in "qkv"]
    got = attention(*arrays, mask=given["mask"])
    grads = attention_vjp(want.cotangents["out"], *arrays, mask=given["mask"])
    shares = want.check(got, grads)
    assert list(shares) == ["out", "gradient of q", "gradient of k", "gradient of v"] and max(shares.values()) < 1
    assert want.dtype == dtype and str(want.cotangents["out"].dtype) == dtype
    wrong = np.array(got)
    wrong[1, 2, 2, 4] += np.asarray(1, wrong.dtype)
    due, bound = (float(x["out"][1, 2, 2, 4]) for x in (want.values, want.bounds))
    said = f"attention in {dtype}: out\\[1, 2, 2, 4\\] is off by .* must be {due!r} within {bound:.3g}; got "
    with pytest.raises(AssertionError, match=said):
        want.check(wrong)
    grads = {name: np.array(x) for name, x in grads.items()}
    grads["k"][0, 1, 2, 3] += np.asarray(2, wrong.dtype)
    with pytest.raises(AssertionError, match=r"gradient of k\[0, 1, 2, 3\] is off by .* \(1 of 160 are over\)"):
        want.check(got, grads)


def test_the_numbers_are_the_suites():
    given = inputs()
    exact = {name: widened(x) for name, x in given.items()}
    suite = oracle.expected("own inputs", "attention_with_lse", exact, ["v"], "float32")
    own = conformance.bounds("attention_with_lse", given, wrt="v")
    for mine, theirs in ((own.values, suite.results), (own.bounds, suite.bounds),
                         (own.gradient_bounds, suite.gradient_bounds)):  # fmt: skip
        assert list(mine) == list(theirs)
        for name, x in mine.items():
            assert np.array_equal(x, theirs[name])
    assert own.cotangents["lse"].dtype == np.float32


def test_ones_own_cotangents_are_pulled_back():
    given = inputs("float64") | {"mask": seen()}
    grads = {"out": DRAW.standard_normal((2, 4, 3, 6)), "lse": DRAW.standard_normal((2, 4, 3))}
    with pytest.raises(ValueError, match="must be 0 where a query may attend to no key"):
        conformance.bounds("attention_with_lse", given, wrt=["q"], cotangents=grads)
    grads["lse"][..., 1] = 0
    want = conformance.bounds("attention_with_lse", given, wrt=["q"], cotangents=grads)
    arrays = [given[name] for name in "qkv"]
    got = attention_with_lse_vjp(grads["out"], grads["lse"], *arrays, mask=given["mask"])
    assert want.check(attention_with_lse(*arrays, mask=given["mask"]), {"q": got["q"]})["gradient of q"] < 1
    twice = conformance.bounds("attention_with_lse", given, wrt=["q"], cotangents={k: 2 * x for k, x in grads.items()})
    assert np.allclose(twice.gradients["q"], 2 * want.gradients["q"])


def test_a_half_type_that_is_cut_and_not_rounded_shows_in_all_elements_together():
    x = DRAW.standard_normal((40, 64)).astype(DTYPES["bfloat16"])
    weight = np.ones(64, DTYPES["bfloat16"])
    want = conformance.bounds("rms_norm", {"x": x, "weight": weight, "eps": 1e-6})
    assert want.check(rms_norm(x, weight, eps=1e-6))["out"] < 1
    exact = want.values["out"].astype(np.float32)
    cut = (exact.view(np.uint32) & 0xFFFF0000).view(np.float32).astype(DTYPES["bfloat16"])
    with pytest.raises(AssertionError, match="over all elements is off by"):
        want.check(cut)


def test_arrays_of_torch_and_jax_are_taken_as_they_are():
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    given = {name: torch.randn(2, 5, 4, dtype=torch.bfloat16, requires_grad=True) for name in ("q", "k", "v")}
    want = conformance.bounds("attention", given, wrt=["q"])
    out = torch.nn.functional.scaled_dot_product_attention(*given.values())
    assert want.dtype == "bfloat16" and want.check(out)["out"] < 1
    given = {name: jax.numpy.asarray(x) for name, x in inputs().items()}
    want = conformance.bounds("attention", given)
    assert want.check(jax.numpy.asarray(attention(*map(np.asarray, given.values()))))["out"] < 1


@pytest.mark.parametrize(
    ("function", "changes", "more", "kind", "said"),
    [
        ("atention", {}, {}, ValueError, "got 'atention'; did you mean attention\\?"),
        ("attention", {"q": np.zeros((3, 8))}, {"dtype": "float32"}, TypeError, "q must be float32, as .* float64"),
        ("attention", {"k": np.zeros((2, 2, 5, 8))}, {}, TypeError, "k must be float32"),
        ("attention", {}, {"dtype": "float8"}, ValueError, "dtype must be one of .*; got 'float8'"),
        ("attention", {}, {"wrt": ["bias"]}, ValueError, "wrt must name given arguments of q, k, v; got bias"),
        ("attention", {"k": np.zeros((2, 3, 5, 8), np.float32)}, {}, ValueError, "heads"),
        ("attention", {"mask": 1.0}, {}, TypeError, "mask"),
        ("attention", {}, {"cotangents": {}}, ValueError, "cotangents are for gradients"),
        ("attention", {}, {"wrt": ["q"], "cotangents": {}}, ValueError, "cotangents must have out; got none"),
        ("attention", {}, {"wrt": ["q"], "cotangents": {"out": np.zeros((2, 4, 3, 6))}}, TypeError, "must be float32"),
        ("attention", {}, {"wrt": ["q"], "cotangents": {"out": np.zeros(3, np.float32)}}, ValueError, "have shape"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_one_sentence(function, changes, more, kind, said):
    with pytest.raises(kind, match=said):
        conformance.bounds(function, inputs() | changes, **more)


def test_an_answer_of_another_kind_is_refused():
    given = inputs()
    want = conformance.bounds("attention", given)
    out = attention(*given.values())
    with pytest.raises(AssertionError, match="out must have dtype float32; got float64"):
        want.check(out.astype(np.float64))
    with pytest.raises(AssertionError, match=r"out must have shape \(2, 4, 3, 6\)"):
        want.check(out[0])
    with pytest.raises(AssertionError, match="out must come back as an array; got str"):
        want.check("out")
    with pytest.raises(ValueError, match="got must be 1 arrays"):
        want.check((out, out))
    with pytest.raises(ValueError, match="must have the results out; has o"):
        want.check({"o": out})
    with pytest.raises(ValueError, match=r"that were asked for \(none: bounds"):
        want.check(out, {"q": given["q"]})
    with pytest.raises(ValueError, match="dtype must be given"):
        conformance.bounds("causal_mask", {"T": 3, "S": 4, "q_offset": 0})
    assert conformance.bounds("causal_mask", {"T": 3, "S": 4, "q_offset": 0}, dtype="float32").check(
        np.tri(3, 4, 0, bool)
    )


def test_the_package_stays_cheap_to_import():
    code = (
        "import sys, conformance; assert 'numpy' not in sys.modules; conformance.bounds; assert 'numpy' in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
