"""backend_jax's attention under jit, vmap, grad, checkpoint and export, and what it costs in calls and memory."""

from __future__ import annotations

import importlib
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import backend_jax  # noqa: E402
import core_numpy  # noqa: E402
from conformance.tests.inputs_attention import check_close  # noqa: E402
from conformance.tests.jax_attention import arrays  # noqa: E402

module = importlib.import_module("backend_jax.attention")
ROOT = Path(__file__).resolve().parents[2]


def test_vmap_over_everything_is_the_batch_axis():
    q, k, v = arrays()
    lengths, offsets = jnp.array([2, 5]), jnp.array([1, -1])
    bias = jnp.asarray(np.random.default_rng(1).normal(size=(2, 4, 3, 5)), jnp.float32)

    def one(q, k, v, lengths, offset, bias):
        return backend_jax.attention(q, k, v, kv_lengths=lengths, q_offset=offset, bias=bias, causal=True)

    want = core_numpy.attention(
        *map(np.asarray, (q, k, v)),
        kv_lengths=np.array([2, 5]),
        q_offset=np.array([1, -1]),
        bias=np.asarray(bias),
        causal=True,
    )
    check_close(jax.vmap(one)(q, k, v, lengths, offsets, bias), want, 1e-6)
    back = jax.vmap(jax.grad(lambda *x: (one(*x) ** 2).sum(), argnums=(0, 5)))(q, k, v, lengths, offsets, bias)
    whole = jax.grad(
        lambda q, bias: (
            backend_jax.attention(q, k, v, kv_lengths=lengths, q_offset=offsets, bias=bias, causal=True, kernel="dense")
            ** 2
        ).sum(),
        argnums=(0, 1),
    )(q, bias)
    for got, expected in zip(back, whole, strict=True):
        check_close(got, expected, 1e-5)


def test_checkpoint_inside_jit_changes_no_gradient():
    q, k, v = arrays()
    loss = lambda q, k, v: (backend_jax.attention(q, k, v, kernel="blockwise") ** 2).sum()  # noqa: E731
    plain = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    again = jax.jit(jax.grad(jax.checkpoint(loss), argnums=(0, 1, 2)))(q, k, v)
    for a, b in zip(plain, again, strict=True):
        check_close(a, b, 1e-6)


def test_the_formula_has_second_derivatives_and_the_blocks_say_where_to_find_them():
    q, k, v = (x[0, 0] for x in arrays(T=2, S=2, D=2, Dv=1))

    def loss(q, kernel):
        return (backend_jax.attention(q, k, v, causal=True, kernel=kernel) ** 2).sum()

    hessian = jax.hessian(partial(loss, kernel="dense"))(q)
    step = 1e-2
    gradient = jax.jit(jax.grad(partial(loss, kernel="blockwise")))
    moved = jnp.zeros_like(q).at[1, 0].set(step)
    check_close(hessian[:, :, 1, 0], (gradient(q + moved) - gradient(q - moved)) / (2 * step), 1e-3)
    for twice in (jax.hessian, lambda f: jax.grad(lambda q: jax.grad(f)(q).sum())):
        with pytest.raises(ValueError, match="kernel='dense'"):
            twice(partial(loss, kernel="blockwise"))(q)


def test_available_kernels_say_which_can_be_differentiated_twice():
    found = backend_jax.available_kernels()
    assert {name: kernel.twice for name, kernel in found.items()} == {
        "cudnn": False,
        "xla": True,
        "blockwise": False,
        "dense": True,
    }
    assert {kernel.shields for kernel in found.values()} == {"keys"}


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_a_gradient_step_lowers_for_each_platform(platform):
    q, k, v = arrays(T=700, S=700)

    def loss(q, k, v, lengths):
        return backend_jax.attention(q, k, v, kv_lengths=lengths, causal=True, kernel="blockwise").sum()

    step = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    exported = jax.export.export(step, platforms=[platform])(q, k, v, jnp.array([3, 700]))
    assert exported.platforms == (platform,)
    again = jax.export.deserialize(exported.serialize())
    if platform == "cpu":
        got, want = again.call(q, k, v, jnp.array([3, 700])), step(q, k, v, jnp.array([3, 700]))
        for a, b in zip(got, want, strict=True):
            check_close(a, b, 1e-6)


def test_float32_products_are_exact_on_every_platform_unless_the_caller_says_otherwise():
    q, k, v = arrays()
    text = lambda: jax.jit(partial(backend_jax.attention, causal=True, q_offset=2)).lower(q, k, v).as_text()  # noqa: E731
    assert text().count("HIGHEST") >= 2
    with jax.default_matmul_precision("bfloat16"):
        assert "HIGHEST" not in text()


def test_an_eager_call_is_one_compiled_one_and_a_growing_offset_compiles_once():
    q, k, v = arrays(T=1, S=9)
    module._run.clear_cache()
    for offset in range(9):
        got = backend_jax.attention(q, k, v, causal=True, q_offset=offset)
        want = core_numpy.attention(*map(np.asarray, (q, k, v)), causal=True, q_offset=offset)
        check_close(got, want, 1e-6)
    assert module._run._cache_size() <= 2  # 0 is static, all others one


def test_arguments_are_never_written_to_and_numpy_arrays_are_taken():
    q, k, v = (np.array(x) for x in arrays())
    copies = [x.copy() for x in (q, k, v)]
    got = backend_jax.attention(q, k, v)
    assert isinstance(got, jax.Array)
    for x, copy in zip((q, k, v), copies, strict=True):
        np.testing.assert_array_equal(x, copy)


def test_values_are_not_looked_at_under_a_trace_and_shapes_are():
    q, k, v = arrays()
    run = jax.jit(lambda lengths: backend_jax.attention(q, k, v, kv_lengths=lengths))
    assert run(jnp.array([3, 5])).shape == (2, 4, 3, 7)
    with pytest.raises(ValueError, match="kv_lengths"):
        run(jnp.array([3, 5, 1]))
    with pytest.raises(ValueError, match="kv_lengths"):
        backend_jax.attention(q, k, v, kv_lengths=jnp.array([3, 6]))


ids = np.sort(np.random.default_rng(0).integers(0, 8, (1, 65_536)), -1).astype(np.int32)
LONG = {
    "causal": lambda T: {"causal": True},
    "window": lambda T: {"window": (256, 0)},
    "kv_lengths": lambda T: {"kv_lengths": np.array([T * 3 // 4])},
    "segments": lambda T: {"q_segments": ids[:, :T], "kv_segments": ids[:, :T]},
}


@pytest.mark.parametrize("kind", LONG)
def test_memory_grows_with_the_length_and_not_with_its_square(kind):
    """Forward and backward at 32,768 within 1.5 GB above the inputs; per element at 65,536 at most 5 % more."""
    taken = {}
    for T in (32_768, 65_536):
        x = jax.ShapeDtypeStruct((1, 8, T, 64), jnp.float32)
        f = lambda q, k, v, w, T=T: (backend_jax.attention(q, k, v, **LONG[kind](T)) * w).sum()  # noqa: E731
        needs = jax.jit(jax.grad(f, argnums=(0, 1, 2))).lower(x, x, x, x).compile().memory_analysis()
        taken[T] = needs.temp_size_in_bytes + needs.output_size_in_bytes
    assert taken[32_768] < 1.5e9
    assert taken[65_536] / taken[32_768] < 2 * 1.05


MEASURE = """
import sys, threading, time
import jax, jax.numpy as jnp, numpy as np
import backend_jax
random = np.random.default_rng(0)
q, k, v, w = (jnp.asarray(random.standard_normal((1, 8, 32_768, 64), dtype=np.float32)) for _ in range(4))
f = lambda q, k, v: (backend_jax.attention(q, k, v, window=(256, 0)) * w).sum()
run = jax.jit(jax.grad(f, argnums=(0, 1, 2))).lower(q, k, v).compile()
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * 4096
base = most = resident()
def watch():
    global most
    while True:
        most = max(most, resident())
        time.sleep(0.01)
threading.Thread(target=watch, daemon=True).start()
jax.block_until_ready(run(q, k, v))
print(most - base)
"""


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's own figures")
def test_a_run_takes_no_more_than_the_compiler_says():
    run = subprocess.run([sys.executable, "-c", MEASURE], cwd=ROOT, capture_output=True, text=True, check=True)
    assert 0.3e9 < int(run.stdout) < 0.7e9  # 278 MB for the blocks and their sums, 192 MB for the gradients
