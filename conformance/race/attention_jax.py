"""JAX attention alone: `kernel="auto"` against jax.nn.dot_product_attention and a plain einsum.

    python -m conformance.race.attention_jax [lengths ...] [--case TEXT] [--json FILE]

Each contestant is one compiled program, forward or loss and gradients. `jax.nn` is handed its own layout as it likes
it: the transposes count, for its users have them too where heads stand before the length.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from .alone import HEADS, MODES, OURS, SIZE, Row, command, run, take_turns

WINDOW = 256
# einsum and jax.nn hold all scores: above this length they would need gigabytes.
QUADRATIC = 4096


@dataclass(frozen=True)
class Case:
    """What attention is asked, by length: fixed arguments and arrays. learned: arrays with a gradient."""

    fixed: dict[str, Any] = field(default_factory=dict)
    arrays: Callable[[int], dict[str, np.ndarray]] = lambda length: {}
    learned: tuple[str, ...] = ()
    kv_heads: int = HEADS
    queries: int | None = None
    shortest: int = 1

    @property
    def modes(self) -> tuple[str, ...]:
        return MODES if self.queries is None else MODES[:1]


def _kept(length: int) -> np.ndarray:
    return np.arange(length)[None, None, None] < length * 3 // 4


def _bias(length: int) -> dict[str, np.ndarray]:
    return {"bias": np.random.default_rng(1).standard_normal((1, HEADS, length, length), dtype=np.float32)}


def _lengths(length: int) -> dict[str, np.ndarray]:
    return {"kv_lengths": np.array([length * 3 // 4], np.int32)}


CASES = {
    "full": Case(),
    "causal": Case({"causal": True}),
    "causal, grouped 8:2": Case({"causal": True}, kv_heads=2),
    "padding mask": Case(arrays=lambda n: {"mask": _kept(n)}),
    "kv_lengths": Case(arrays=_lengths),
    "bias": Case(arrays=_bias),
    "learned bias": Case(arrays=_bias, learned=("bias",)),
    f"window {WINDOW}": Case({"causal": True, "window": (WINDOW, 0)}),
    "soft cap, causal": Case({"causal": True, "softcap": 30.0}),
    "sinks, causal": Case({"causal": True}, lambda n: {"sinks": np.linspace(-1, 1, HEADS, dtype=np.float32)}),
    "decode": Case(queries=1, shortest=256),
    "decode, grouped 8:2": Case(kv_heads=2, queries=1, shortest=256),
}


def einsum(q: Any, k: Any, v: Any, *, causal: bool = False, softcap: float | None = None, **more: Any) -> Any:
    """The plain formula, as a careful user would write it."""
    import jax
    import jax.numpy as jnp

    B, H, T, D = q.shape
    G, S = k.shape[1:3]
    q = q.reshape(B, G, H // G, T, D)
    s = jnp.einsum("bgrtd,bgsd->bgrts", q, k).reshape(B, H, T, S) / math.sqrt(D)
    if softcap is not None:
        s = softcap * jnp.tanh(s / softcap)
    if "bias" in more:
        s = s + more["bias"]
    i, j = jnp.arange(T)[:, None], jnp.arange(S)
    seen = []
    if causal:
        seen.append(j <= i)
    if "window" in more:
        seen.append(j >= i - more["window"][0])
    if "kv_lengths" in more:
        seen.append(j < more["kv_lengths"][:, None, None, None])
    if "mask" in more:
        seen.append(more["mask"])
    for shown in seen:
        s = jnp.where(shown, s, -1e30)
    if "sinks" in more:
        s = jnp.concatenate([s, jnp.broadcast_to(more["sinks"][:, None, None], (B, H, T, 1))], -1)
    p = jax.nn.softmax(s, -1)[..., :S].reshape(B, G, H // G, T, S)
    return jnp.einsum("bgrts,bgsd->bgrtd", p, v).reshape(B, H, T, -1)


def library(
    q: Any, k: Any, v: Any, *, causal: bool = False, window: Any = None, kv_lengths: Any = None, bias: Any = None,
    mask: Any = None,
) -> Any:  # fmt: skip
    """jax.nn.dot_product_attention on (B, H, T, D)."""
    import jax
    import jax.numpy as jnp

    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    out = jax.nn.dot_product_attention(
        q, k, v, is_causal=causal, local_window_size=window, bias=bias, mask=mask, key_value_seq_lengths=kv_lengths
    )
    return jnp.swapaxes(out, 1, 2)


def contestants(case: Case) -> dict[str, Callable[..., Any]]:
    """Name -> function of (q, k, v, ...); ours first."""
    import backend_jax

    found: dict[str, Callable[..., Any]] = {OURS: backend_jax.attention, "einsum": einsum}
    if "softcap" not in case.fixed and "sinks" not in case.arrays(1):
        found["jax.nn"] = library
    return found


def chosen(lengths: list[int], texts: list[str] | None) -> list[tuple[str, int, str]]:
    """(case, length, mode) of what is asked."""
    return [
        (name, length, mode)
        for length in lengths
        for name, case in CASES.items()
        if case.shortest <= length <= QUADRATIC and (not texts or any(text in name for text in texts))
        for mode in case.modes
    ]


def _program(f: Callable[..., Any], case: Case, mode: str) -> Callable[..., Any]:
    """One compiled program of q, k, v, the arrays that have a gradient, those that have none, and dloss/dout.

    All are its arguments: what a program closes over is a constant to XLA, which it would fold when it compiles.
    """
    import jax

    def out(q: Any, k: Any, v: Any, learned: dict[str, Any], arrays: dict[str, Any], w: Any) -> Any:
        return f(q, k, v, **(arrays | learned), **case.fixed)

    if mode == "forward":
        return jax.jit(out)
    return jax.jit(jax.value_and_grad(lambda *given: (out(*given) * given[-1]).sum(), argnums=(0, 1, 2, 3)))


def measure(name: str, length: int, mode: str, seconds: float) -> Row:
    """Time one case, after the results have been seen to agree."""
    import jax
    import jax.numpy as jnp

    case, rng = CASES[name], np.random.default_rng(0)
    sizes = [(case.queries or length, HEADS), (length, case.kv_heads), (length, case.kv_heads)]
    leaves = [jnp.asarray(rng.standard_normal((1, heads, n, SIZE), dtype=np.float32)) for n, heads in sizes]
    w = jnp.asarray(rng.standard_normal(leaves[0].shape, dtype=np.float32))
    arrays = {key: jnp.asarray(x) for key, x in case.arrays(length).items()}
    learned = {key: arrays.pop(key) for key in case.learned}
    given = (*leaves, learned, arrays, w)
    programs = {way: _program(f, case, mode) for way, f in contestants(case).items()}
    expected = jax.tree.leaves(programs[OURS](*given))
    for way, program in programs.items():
        for mine, theirs in zip(expected, jax.tree.leaves(program(*given)), strict=True):
            off = float(jnp.abs(mine - theirs).max() / jnp.maximum(1.0, jnp.abs(mine).max()))
            if not off <= 1e-4:
                raise ValueError(f"{name}: {way} is off by {off:.2g}, so it is not the same work")
    calls = {way: partial(_finish, program, *given) for way, program in programs.items()}
    medians, turns = take_turns(calls, seconds)
    return Row(name, length, mode, medians, turns)


def _finish(program: Callable[..., Any], *arguments: Any) -> Any:
    import jax

    return jax.block_until_ready(program(*arguments))


def rows(asked: Any) -> Iterator[Row]:
    """Measurements, as they are made."""
    for name, length, mode in chosen(asked.lengths, asked.case):
        yield measure(name, length, mode, asked.seconds)


def main(arguments: list[str] | None = None) -> int:
    """Print the table of ratios."""
    asked = command(__doc__, "attention_jax", CASES, arguments)
    if asked.threads == 1:  # before JAX is imported; with more it takes what the process may use
        os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    return run(rows(asked), len(chosen(asked.lengths, asked.case)), asked, "JAX")


if __name__ == "__main__":
    raise SystemExit(main())
