"""The JAX modules against the reference in float64, in other people's loops, and what is native about them."""

from __future__ import annotations

import math

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

import jax.numpy as jnp  # noqa: E402
from flax import nnx  # noqa: E402

import backend_jax as B  # noqa: E402
import core_numpy as C  # noqa: E402
from backend_jax.cache import LayerCache  # noqa: E402
from core_numpy.contract.parameters import model_parameters  # noqa: E402

from mix_model import CONFIGS, batch_of, call_of, config_of, moved  # noqa: E402

IDS = list(CONFIGS)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def pair_of(config, dtype="float64"):
    """The same model in NumPy and JAX."""
    reference, model = C.Transformer(config, seed=3, dtype=dtype), B.Transformer(config, seed=3, dtype=dtype)
    params = moved(C.get_params(reference))
    C.set_params(reference, params)
    B.set_params(model, params)
    return reference, model


def close(got, want, tolerance):
    """Relative to the largest number of the array."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape and got.dtype == want.dtype
    assert np.isfinite(want).all()
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * max(np.abs(want).max(initial=0.0), 1e-3))


def eager(model, batch, key, options):
    """Loss and gradients operation by operation: for small shapes quicker than compiling each configuration."""
    graph, state = nnx.split(model)

    def loss(state):
        logits = nnx.merge(graph, state)(batch["tokens"], **call_of(batch), dropout_key=key)
        return B.cross_entropy(logits, jnp.asarray(batch["targets"]), **options)

    value, grads = jax.value_and_grad(loss)(state)
    return value, {".".join(map(str, path)): g[...] for path, g in nnx.to_flat_state(grads)}


@pytest.mark.parametrize("name", IDS)
def test_output_and_gradients_are_the_reference(name, x64):
    config = config_of(name, dropout=0.25)
    reference, model = pair_of(config)
    free = batch_of(config, lengths=False)
    close(model(free["tokens"], **call_of(free)), reference(free["tokens"], **call_of(free)), 1e-12)
    batch = batch_of(config, segments=config.kind == "decoder")
    close(model(batch["tokens"], **call_of(batch)), reference(batch["tokens"], **call_of(batch)), 1e-12)
    if config.head == "none":
        return
    options = {"label_smoothing": 0.1, "z_loss": 0.01}
    want_loss, want = C.loss_and_gradients(reference, batch, dropout_key=C.key(5), **options)
    loss, got = eager(model, batch, B.key(5), options)
    assert float(loss) == pytest.approx(want_loss, rel=1e-12)
    assert set(got) == set(want)
    for parameter, gradient in got.items():
        close(gradient, want[parameter], 1e-11)
