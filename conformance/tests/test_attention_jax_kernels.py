"""backend_jax's attention: refusals, and what each kernel serves."""

from __future__ import annotations

import sys

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import backend_jax  # noqa: E402
import core_numpy  # noqa: E402
from backend_jax import blocks  # noqa: E402
from conformance.tests.inputs_attention import check_close  # noqa: E402
from conformance.tests.jax_attention import arrays  # noqa: E402
from conformance.tests.refusals_attention import ROWS as REFUSALS  # noqa: E402
from conformance.tests.refusals_attention import valid  # noqa: E402

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
    q, k, _ = arrays()
    with pytest.raises(ValueError, match="never holds the weights"):
        backend_jax.attention_weights(q, k, kernel="blockwise")
    check_close(backend_jax.attention_weights(q, k), core_numpy.attention_weights(q, k), 1e-6)


@pytest.mark.parametrize("more", [{}, {"causal": True}, {"window": (2, 1)}, {"causal": True, "window": (1, None)}])
def test_the_library_s_kernel_is_right_where_it_serves(more):
    q, k, v = arrays(T=6, S=6, D=8, Dv=8)
    check_close(backend_jax.attention(q, k, v, **more, kernel="xla"), core_numpy.attention(q, k, v, **more), 1e-6)


def test_each_kernel_is_explained_and_one_is_chosen():
    text = backend_jax.explain_kernel(**valid()).splitlines()
    assert [line.split(":")[0] for line in text] == list(backend_jax.available_kernels())
    assert ["chosen" in line for line in text].count(True) == 1
    assert "it needs an NVIDIA GPU" in text[0]


def test_weights_are_kept_in_one_step_up_to_512_rows_and_keys_but_never_more_of_them_than_said():
    def spec(T=512, S=512, B=1, r=1, band=None, on_cpu=True):
        return blocks.Spec(B, 8 // r, r, T, S, 64, 64, 0.125, None, band, 0.0, True, on_cpu)

    step = blocks.kept_layout(spec(), frozenset())
    assert blocks.keeps_weights(spec()) and (step.nb, step.ng, step.rows, step.ranges) == (1, 8, 512, ((0, 512),))
    assert blocks.keeps_weights(spec(r=4))
    for other in ({"T": 513}, {"T": 16, "S": 513}, {"B": 2}, {"band": (None, 0)}, {"on_cpu": False}):
        assert not blocks.keeps_weights(spec(**other)), other
    for short in ({"B": 4}, {"B": 99, "band": (None, 0)}, {"on_cpu": False}):
        assert blocks.keeps_weights(spec(256, 256, **short)), short
    assert blocks.kept_layout(spec(256, 256, B=4), frozenset()).nb == 1  # steps that the cache holds


@pytest.mark.parametrize("more", [{}, {"kv_lengths": np.array([5, 2])}, {"softcap": 1.5}], ids=str)
def test_more_weights_than_one_step_of_the_cache_mean_the_same(more, monkeypatch):
    monkeypatch.setattr(blocks, "WHOLE", 8)
    monkeypatch.setattr(blocks, "KEPT_SCORES", 1)
    sys.modules["backend_jax.attention"]._run.clear_cache()
    q, k, v = arrays()
    bias = np.random.default_rng(1).normal(size=(4, 3, 5)).astype(np.float32)[None]
    given = {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in more.items()}

    def loss(*arrays, kernel="auto"):
        return jnp.sin(backend_jax.attention(*arrays[:3], bias=arrays[3], **given, kernel=kernel)).sum()

    found = [
        jax.grad(loss, argnums=range(4))(q, k, v, jnp.asarray(bias), kernel=kernel) for kernel in ("auto", "dense")
    ]
    for mine, theirs in zip(*found, strict=True):
        check_close(mine, theirs, 1e-5)
    sys.modules["backend_jax.attention"]._run.clear_cache()
