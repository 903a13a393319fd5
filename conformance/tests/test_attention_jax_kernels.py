"""backend_jax's attention: refusals, and what each kernel serves."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import backend_jax  # noqa: E402
import core_numpy  # noqa: E402
from conformance.tests.refusals_attention import ROWS as REFUSALS  # noqa: E402
from conformance.tests.refusals_attention import valid  # noqa: E402


def inputs(*, B=2, H=4, G=2, T=3, S=5, D=6, Dv=7):
    random = np.random.default_rng(0)
    shapes = ((B, H, T, D), (B, G, S, D), (B, G, S, Dv))
    return tuple(jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes)


def check_close(got, want, tolerance: float = 1e-6) -> None:
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------- refusals, kernels


@pytest.mark.parametrize("row", REFUSALS, ids=[row[0] for row in REFUSALS])
def test_what_is_refused_is_refused_with_the_same_words(row):
    _, make, exception, phrase = row
    given = make()
    wide = any(isinstance(x, np.ndarray) and x.dtype == np.float64 for x in given.values())
    with jax.enable_x64(wide):
        convert = {n: jnp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in given.items()}
        with pytest.raises(exception) as caught:
            backend_jax.attention(**convert)
    assert phrase in str(caught.value)


def test_what_every_refusal_starts_from_is_not_refused():
    assert backend_jax.attention(**valid()).shape == (2, 4, 3, 7)


@pytest.mark.parametrize(
    ("kernel", "more", "why"),
    [
        ("xla", {"sinks": np.zeros(4, np.float32)}, "it has no sinks"),
        ("xla", {"mask": np.ones((3, 5), bool)}, "gets the mean, not 0"),
        ("xla", {"kv_lengths": np.array([5, 2])}, "lets NaN in padding through"),
        ("xla", {}, "values of the head size only"),
        ("cudnn", {}, "it needs an NVIDIA GPU"),
    ],
)
def test_a_kernel_asked_for_that_cannot_serve_says_why(kernel, more, why):
    with pytest.raises(ValueError, match=why):
        backend_jax.attention(**valid(), **more, kernel=kernel)


def test_weights_come_from_the_formula_alone():
    q, k, _ = inputs()
    with pytest.raises(ValueError, match="never holds the weights"):
        backend_jax.attention_weights(q, k, kernel="blockwise")
    check_close(backend_jax.attention_weights(q, k), core_numpy.attention_weights(q, k), 1e-6)


@pytest.mark.parametrize("more", [{}, {"causal": True}, {"window": (2, 1)}, {"causal": True, "window": (1, None)}])
def test_the_library_s_kernel_is_right_where_it_serves(more):
    q, k, v = inputs(T=6, S=6, D=8, Dv=8)
    check_close(backend_jax.attention(q, k, v, **more, kernel="xla"), core_numpy.attention(q, k, v, **more), 1e-6)


def test_each_kernel_is_explained_and_one_is_chosen():
    text = backend_jax.explain_kernel(**valid()).splitlines()
    assert [line.split(":")[0] for line in text] == list(backend_jax.available_kernels())
    assert ["chosen" in line for line in text].count(True) == 1
    assert "it needs an NVIDIA GPU" in text[0]
