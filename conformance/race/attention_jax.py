"""Attention in JAX, raced: every kernel of backend_jax beside jax.nn.dot_product_attention and a plain einsum.

    python -m conformance.race.attention_jax [case] [longest T]

Forward, and forward with backward. Contestants take turns; medians of their times, as a ratio to the best of the
row. Figures of one machine mean nothing on another, the ratios often do.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

LENGTHS = (128, 512, 2048, 8192)
# einsum and jax.nn hold all scores: above this length they would need gigabytes.
QUADRATIC = 4096
# One turn lasts about this long, so that the short cases are timed over many calls.
SECONDS = 0.1
TURNS = 7


@dataclass(frozen=True)
class Case:
    """One row of the table: sizes and what attention is asked."""

    name: str
    T: int
    heads: int = 8
    groups: int = 8
    size: int = 64
    arguments: dict[str, Any] = field(default_factory=dict)


def cases() -> list[Case]:
    """B 1, H 8, D 64, float32: each restriction at each length."""
    found = []
    for T in LENGTHS:
        lengths = np.array([T * 3 // 4], np.int32)
        found += [
            Case("full", T),
            Case("causal", T, arguments={"causal": True}),
            Case("padding", T, arguments={"kv_lengths": lengths}),
            Case("grouped 8:2", T, groups=2, arguments={"causal": True}),
            Case("window 256", T, arguments={"causal": True, "window": (256, 0)}),
            Case("softcap", T, arguments={"causal": True, "softcap": 30.0}),
            Case("sinks", T, arguments={"causal": True, "sinks": np.zeros(8, np.float32)}),
        ]
        if T <= QUADRATIC:
            bias = np.random.default_rng(1).standard_normal((8, T, T), dtype=np.float32)[None]
            found.append(Case("bias", T, arguments={"bias": bias}))
    return found


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
    seen = jnp.ones((T, S), bool)
    if causal:
        seen = seen & (j <= i)
    if "window" in more:
        seen = seen & (j >= i - more["window"][0])
    if "kv_lengths" in more:
        seen = seen & (j < more["kv_lengths"][:, None, None, None])
    s = jnp.where(seen, s, -1e30)
    if "sinks" in more:
        s = jnp.concatenate([s, jnp.broadcast_to(more["sinks"][:, None, None], (B, H, T, 1))], -1)
    p = jax.nn.softmax(s, -1)[..., :S].reshape(B, G, H // G, T, S)
    return jnp.einsum("bgrts,bgsd->bgrtd", p, v).reshape(B, H, T, -1)


def library(
    q: Any, k: Any, v: Any, *, causal: bool = False, window: Any = None, kv_lengths: Any = None, bias: Any = None
) -> Any:
    """jax.nn.dot_product_attention, handed its own layout as it likes it: the transposes count, for its users have them
    too where heads stand before the length."""
    import jax
    import jax.numpy as jnp

    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    out = jax.nn.dot_product_attention(
        q, k, v, is_causal=causal, local_window_size=window, bias=bias, key_value_seq_lengths=kv_lengths
    )
    return jnp.swapaxes(out, 1, 2)


def contestants(case: Case) -> dict[str, Callable[..., Any]]:
    """Name -> function of (q, k, v, arrays). The first, "auto", is what is judged."""
    import backend_jax

    def ours(kernel: str) -> Callable[..., Any]:
        return lambda q, k, v, **more: backend_jax.attention(q, k, v, **more, kernel=kernel)

    found = {name: ours(name) for name in ("auto", "blockwise", "dense")}
    found["einsum"] = einsum
    if not case.arguments.keys() & {"softcap", "sinks"}:
        found["jax.nn"] = library
    if case.T > QUADRATIC:
        found = {name: f for name, f in found.items() if name in ("auto", "blockwise")}
    return found


def _prepared(case: Case, f: Callable[..., Any], backward: bool) -> Callable[[], Any]:
    import jax
    import jax.numpy as jnp

    rng = np.random.default_rng(0)
    shapes = [(1, heads, case.T, case.size) for heads in (case.heads, case.groups, case.groups)]
    q, k, v = (jnp.asarray(rng.standard_normal(shape, dtype=np.float32)) for shape in shapes)
    arrays = {name: jnp.asarray(x) for name, x in case.arguments.items() if isinstance(x, np.ndarray)}
    rest = {name: x for name, x in case.arguments.items() if name not in arrays}
    w = jnp.asarray(rng.standard_normal(shapes[0], dtype=np.float32))

    def loss(q: Any, k: Any, v: Any, floats: dict[str, Any]) -> Any:
        return (f(q, k, v, **(arrays | floats), **rest) * w).sum()

    floats = {name: x for name, x in arrays.items() if x.dtype == jnp.float32}
    if backward:
        run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))
    else:
        run = jax.jit(lambda q, k, v, floats: f(q, k, v, **(arrays | floats), **rest))
    return lambda: jax.block_until_ready(run(q, k, v, floats))


def measure(case: Case, backward: bool) -> dict[str, float]:
    """Seconds per call of each contestant: median over turns, taken in alternation."""
    calls = {name: _prepared(case, f, backward) for name, f in contestants(case).items()}
    repeats = {}
    for name, call in calls.items():
        call()
        started = time.perf_counter()
        call()
        repeats[name] = max(1, int(SECONDS / (time.perf_counter() - started)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(TURNS):
        order = list(calls) if turn % 2 == 0 else list(calls)[::-1]
        for name in order:
            started = time.perf_counter()
            for _ in range(repeats[name]):
                calls[name]()
            times[name].append((time.perf_counter() - started) / repeats[name])
    return {name: statistics.median(found) for name, found in times.items()}


def rows(chosen: str = "", longest: int = LENGTHS[-1]) -> Iterator[tuple[Case, bool, dict[str, float]]]:
    """Measurements, as they are made."""
    for case in cases():
        if chosen not in case.name or longest < case.T:
            continue
        for backward in (False, True):
            yield case, backward, measure(case, backward)


def main(arguments: list[str] | None = None) -> int:
    """Print the table of ratios."""
    arguments = sys.argv[1:] if arguments is None else arguments
    chosen = arguments[0] if arguments else ""
    longest = int(arguments[1]) if len(arguments) > 1 else LENGTHS[-1]
    for case, backward, found in rows(chosen, longest):
        best = min(found.values())
        ratios = "  ".join(f"{name} {seconds / best:.2f}" for name, seconds in found.items())
        kind = "forward + backward" if backward else "forward"
        print(f"{case.name:12} T {case.T:5} {kind:18} best {best * 1e3:9.3f} ms  {ratios}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
