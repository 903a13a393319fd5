"""Inputs, ways of cutting the work and the comparison that the tests of JAX's attention share."""

from __future__ import annotations

import contextlib
import importlib

import jax
import jax.numpy as jnp
import numpy as np

import backend_jax
import core_numpy
from conformance.tests.inputs_attention import check_close, normal
from core_numpy.gradients import attention_with_lse_vjp

module = importlib.import_module("backend_jax.attention")
blocks = importlib.import_module("backend_jax.blocks")
OWN = ("blockwise", "dense")
# Weights kept, of all rows and heads at once or of two rows and one head; and blocks so small that a few keys need
# every way of cutting: whole rows unrolled, one range per block under a window, chunks with a running maximum; one head
# and batch element per step. The last blocks overlap those before.
SMALL = {
    "whole": {},
    "grouped": {"KEPT_SCORES": 1, "KEPT_ROWS": 2},
    "unrolled": {"WHOLE": 0, "FEWEST_ROWS": 1, "ROWS": 3, "UNROLLED": 8, "ROWS_LONGEST": 99, "CACHED_SCORES": 30},
    "looped": {"WHOLE": 0, "FEWEST_ROWS": 1, "ROWS": 2, "UNROLLED": 0, "CHUNK": 4, "CACHED_SCORES": 1},
    "chunks": {
        "WHOLE": 0,
        "FEWEST_ROWS": 1,
        "ROWS": 1,
        "UNROLLED": 0,
        "SLAB_LONGEST": 0,
        "CHUNK": 3,
        "CACHED_SCORES": 20,
    },
}
NAN, INF = np.nan, np.inf
KEY = np.array([3, 4], dtype=np.uint32)


@contextlib.contextmanager
def cut(way, monkeypatch):
    """Small blocks, in float64, and nothing compiled kept from before or for later."""
    for name, value in SMALL.get(way, {}).items():
        monkeypatch.setattr(blocks, name, value)
    with jax.enable_x64(True):
        module._run.clear_cache()
        yield
        module._run.clear_cache()


def inputs(*, B=2, H=4, G=2, T=3, S=5, D=6, Dv=7, seed=0, dtype=np.float32):
    q, k, v = normal(B, H, T, D, seed=seed), normal(B, G, S, D, seed=seed), normal(B, G, S, Dv, seed=seed)
    return q.astype(dtype), k.astype(dtype), v.astype(dtype)


def arrays(**sizes):
    """`inputs` as JAX's own arrays."""
    return tuple(jnp.asarray(x) for x in inputs(**sizes))


def check_agreement(x, keywords, kernel, tolerance=1e-12):
    """Output, lse, and the gradients of all that is differentiable, lse's cotangent included."""
    out, lse = core_numpy.attention_with_lse(**x, **keywords)
    douts, dlse = normal(*out.shape, seed=1), normal(*lse.shape, seed=2)
    want = attention_with_lse_vjp(douts, dlse, **x, **keywords)
    smooth = x | {name: keywords[name] for name in ("bias", "sinks") if name in keywords}
    rest = {name: value for name, value in keywords.items() if name not in smooth}

    @jax.jit
    def both(smooth):
        f = lambda smooth: backend_jax.attention_with_lse(**smooth, **rest, kernel=kernel)  # noqa: E731
        found, back = jax.vjp(f, smooth)
        return found, back((jnp.asarray(douts), jnp.asarray(dlse)))[0]

    (got, got_lse), gradients = both(smooth)
    check_close(got, out, tolerance)
    check_close(got_lse, lse, tolerance)
    assert gradients.keys() == want.keys()
    for name in want:
        check_close(gradients[name], want[name], 10 * tolerance)
