"""Self-attention whose queries and keys are spread over the context axis: each device has some pieces of every row.

Keys and values go round by `ppermute`, and each device adds what its queries find in them:

    out, lse = merge(attention_with_lse(q_a, k_b, v_b) for every piece b)
    d out_b = w_b d out,   d lse_b = w_b (d out . out_b - d out . out),   w_b = exp(lse_b - lse)

The backward pass lets the keys go round once more and computes each block again, so that no device ever keeps another
one's keys. Where causality or a window hides one device's keys from another, nothing is sent: with a window only
neighbours talk. Source: Liu et al. 2023 (arXiv:2310.01889); pieces c and 2 C - 1 - c of zigzag rings, so that causal
work is even.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from core_numpy.contract.config import ModelConfig
from core_numpy.contract.parallel import context_pieces

from . import encodings, place
from .attention import attention_with_lse, merge_attention
from .blockwise_scores import accumulation

Arrays = dict[str, Any]


@dataclass(frozen=True)
class Distances:
    """A bias by distance, made block by block: ALiBi's, or that of a table (buckets, H)."""

    config: ModelConfig
    table: jax.Array | None


@dataclass(frozen=True)
class Ring:
    """What is static of one call. length: of whole rows. options: those of `attention` that are no arrays."""

    count: int
    length: int
    heads: int
    causal: bool
    window: tuple[int | None, int | None] | None
    options: tuple[tuple[str, Any], ...]
    config: ModelConfig | None

    @property
    def pieces(self) -> int:
        """How many each device has."""
        return context_pieces(self.count, self.causal) // self.count

    @property
    def size(self) -> int:
        return self.length // (self.count * self.pieces)

    def start(self, device: Any, piece: int) -> Any:
        """Where piece 0 or 1 of a device begins; the device may be traced."""
        return (device if piece == 0 else 2 * self.count - 1 - device) * self.size

    def sees(self, query: Any, key: Any) -> Any:
        """Whether a query of the piece that begins at `query` may attend to a key of the one that begins at `key`."""
        left, right = self.window or (None, None)
        if self.causal:
            right = 0 if right is None else min(right, 0)
        last, seen = self.size - 1, True
        if right is not None:
            seen = seen & (key <= query + last + right)
        return seen if left is None else seen & (key + last >= query - left)

    def pairs(self, step: int) -> list[tuple[int, int]]:
        """Pieces (a here, b of the device `step` places back) that on some device have something to see."""
        return [
            (a, b) for a in range(self.pieces) for b in range(self.pieces)
            if any(self.sees(self.start(c, a), self.start((c - step) % self.count, b)) for c in range(self.count))
        ]  # fmt: skip

    def routes(self, step: int) -> list[tuple[int, int]]:
        """(from, to) of the devices whose keys are needed `step` places on."""
        found = []
        for c in range(self.count):
            other = (c - step) % self.count
            starts = [(self.start(c, a), self.start(other, b)) for a in range(self.pieces) for b in range(self.pieces)]
            if any(self.sees(q, k) for q, k in starts):
                found.append((other, c))
        return found


def ring_attention(q: jax.Array, k: jax.Array, v: jax.Array, arguments: Arrays) -> jax.Array:
    """(B, H, T, Dv) of q (B, H, T, D), k (B, G, T, D), v (B, G, T, Dv) whose columns are in the order of `place.order`.

    arguments: those of `attention`, bias a `Distances` or None, kv_lengths (B,) and segments (B, T) of whole rows in
    the order of positions.
    """
    mesh = place.mesh()
    assert mesh is not None  # the caller has asked `place.ringed`
    bias, causal = arguments["bias"], arguments["causal"]
    static = {name: arguments[name] for name in ("scale", "softcap", "dropout_rate")}
    ring = Ring(
        mesh.shape["context"], q.shape[2], q.shape[1], causal, arguments["window"], tuple(static.items()),
        None if bias is None else bias.config,
    )  # fmt: skip
    spread, rows = PartitionSpec(place.ROWS, "tensor", "context", None), PartitionSpec(place.ROWS)
    arrays = {
        "q": (q, spread), "k": (k, spread), "v": (v, spread),
        "sinks": (arguments["sinks"], PartitionSpec("tensor")),
        "table": (None if bias is None else bias.table, PartitionSpec(None, "tensor")),
        "lengths": (arguments["kv_lengths"], rows), "segments": (arguments["q_segments"], rows),
        "key": (arguments["dropout_key"], PartitionSpec()),
    }  # fmt: skip
    given = {name: x for name, (x, _) in arrays.items() if x is not None}
    specs = {name: arrays[name][1] for name in given}
    run = jax.shard_map(partial(_run, ring), mesh=mesh, in_specs=(specs,), out_specs=spread, check_vma=False)
    return run(given)


def _run(ring: Ring, given: Arrays) -> jax.Array:
    whole = {name: given.pop(name) for name in ("lengths", "segments", "key") if name in given}
    return _ring(ring, given, whole, lax.axis_index("context"))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(ring: Ring, own: Arrays, whole: Arrays, here: jax.Array) -> jax.Array:
    return _forward(ring, own, whole, here)[0]


def _forward(ring: Ring, own: Arrays, whole: Arrays, here: jax.Array) -> tuple[jax.Array, Any]:
    acc = accumulation(own["q"].dtype)
    found: dict[int, tuple[jax.Array, jax.Array]] = {}
    (B, H), q, v = own["q"].shape[:2], own["q"], own["v"]
    blank = (jnp.zeros((B, H, ring.size, v.shape[-1]), q.dtype), jnp.full((B, H, ring.size), -jnp.inf, acc))
    for step, keys in _visits(ring, own):
        for a, b in ring.pairs(step):
            work = partial(_block, ring, whole, own, keys, a, b)
            out, lse = _seen(ring, here, step, a, b, work, lambda: blank)
            new = (out.astype(acc), lse)
            found[a] = new if a not in found else merge_attention(*zip(found[a], new, strict=True))
    out, lse = (jnp.concatenate(parts, 2) for parts in zip(*(found[a] for a in range(ring.pieces)), strict=True))
    return out.astype(own["q"].dtype), (own, whole, here, out, lse)


def _backward(ring: Ring, saved: Any, grad: jax.Array) -> tuple[Any, ...]:
    own, whole, here, out, lse = saved
    acc, grad = out.dtype, grad.astype(out.dtype)
    delta, lse = (grad * out).sum(-1), jnp.where(lse == -jnp.inf, 0, lse)
    totals = _zeros(own, acc)
    for step, keys in _visits(ring, own, again=True):
        sent = {name: jnp.zeros(x.shape, acc) for name, x in keys.items()}
        blank = _zeros((own, keys), acc)
        for a, b in ring.pairs(step):
            rows = slice(a * ring.size, (a + 1) * ring.size)
            cotangents = grad[:, :, rows], delta[:, :, rows], lse[:, :, rows]
            work = partial(_derivative, ring, whole, own, keys, a, b, cotangents)
            mine, theirs = _seen(ring, here, step, a, b, work, lambda blank=blank: blank)  # type: ignore[misc]
            totals = jax.tree.map(jnp.add, totals, mine)
            sent = jax.tree.map(jnp.add, sent, theirs)
        back = [(to, origin) for origin, to in ring.routes(step)]
        for name, x in sent.items():
            totals[name] += x if step == 0 else lax.ppermute(x, "context", back)
    grads = {name: totals[name].astype(x.dtype) for name, x in own.items()}
    return grads, jax.tree.map(lambda x: None, whole), None


_ring.defvjp(_forward, _backward)


def _zeros(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), tree)


def _derivative(
    ring: Ring, whole: Arrays, own: Arrays, keys: Arrays, a: int, b: int, cotangents: Any, first: Any, key: Any
) -> Any:
    """What one block adds to the gradients of this device's arrays, and to those of the keys that are here."""
    grad, delta, lse = cotangents
    (part, log), pull = jax.vjp(lambda own, keys: _block(ring, whole, own, keys, a, b, first, key), own, keys)
    share = jnp.exp(log - lse)
    g = grad * share[..., None]
    g_lse = (g * part.astype(g.dtype)).sum(-1) - share * delta
    return jax.tree.map(lambda x: x.astype(g.dtype), pull((g.astype(part.dtype), g_lse)))


def _visits(ring: Ring, own: Arrays, *, again: bool = False) -> Iterator[tuple[int, Arrays]]:
    """(step, the keys and values of the device that many places back); zeros where they are not needed.

    again: in the backward pass keys and values travel as one array. XLA would see the forward pass's messages in them
    else, and keep everybody's keys until now instead; a barrier against that does not hold on a CPU.
    """
    keys = {"k": own["k"], "v": own["v"]}
    size = own["k"].shape[-1]
    for step in range(ring.count):
        routes = ring.routes(step)
        if step == 0:
            yield step, keys
        elif routes and again:
            both = lax.ppermute(jnp.concatenate([own["k"], own["v"]], -1), "context", routes)
            yield step, {"k": both[..., :size], "v": both[..., size:]}
        elif routes:
            yield step, {name: lax.ppermute(x, "context", routes) for name, x in keys.items()}


def _seen(
    ring: Ring, here: jax.Array, step: int, a: int, b: int, work: Callable[[Any, Any], Any], nothing: Callable[[], Any]
) -> Any:
    """work(first, key) where this device's piece a sees piece b of the device `step` places back, else `nothing()`."""
    first, key = ring.start(here, a), ring.start((here - step) % ring.count, b)
    if all(ring.sees(ring.start(c, a), ring.start((c - step) % ring.count, b)) for c in range(ring.count)):
        return work(first, key)
    return lax.cond(ring.sees(first, key), work, lambda first, key: nothing(), first, key)


def _block(ring: Ring, whole: Arrays, own: Arrays, keys: Arrays, a: int, b: int, first: Any, key: Any) -> Any:
    """Out and lse of the queries of piece a, from position `first` on, and the keys of piece b, from `key` on."""
    size = ring.size
    q = own["q"][:, :, a * size : (a + 1) * size]
    k, v = (keys[name][:, :, b * size : (b + 1) * size] for name in ("k", "v"))
    B, H = q.shape[:2]
    segments = whole.get("segments")
    cut = None if segments is None else [lax.dynamic_slice_in_dim(segments, at, size, 1) for at in (first, key)]
    corner = (lax.axis_index(place.ROWS) * B, lax.axis_index("tensor") * H, first, key)
    options: Arrays = dict(ring.options)
    with place.corner(corner, (ring.heads, ring.length, ring.length)):
        return attention_with_lse(
            q, k, v, causal=ring.causal, window=ring.window,
            q_offset=jnp.broadcast_to(jnp.asarray(first - key, jnp.int32), (B,)),
            kv_lengths=None if "lengths" not in whole else jnp.clip(whole["lengths"] - key, 0, size),
            q_segments=None if cut is None else cut[0], kv_segments=None if cut is None else cut[1],
            # A sink belongs to one part of the keys: the query's own.
            sinks=None if "sinks" not in own else jnp.where(first == key, own["sinks"], -jnp.inf),
            bias=_distances(ring, own, first - key, H), dropout_key=whole.get("key"), **options,
        )  # fmt: skip


def _distances(ring: Ring, own: Arrays, offset: Any, H: int) -> jax.Array | None:
    """The bias of a block, (1, H, size, size), whose queries stand `offset` after its keys."""
    if ring.config is None:
        return None
    config, size = ring.config, ring.size
    away = jnp.arange(size) - (offset + jnp.arange(size))[:, None]
    if "table" not in own:
        slopes = encodings.alibi_slopes(config.heads, dtype=accumulation(own["q"].dtype).name)
        slopes = lax.dynamic_slice_in_dim(slopes, lax.axis_index("tensor") * H, H)
        return (-slopes[:, None, None] * jnp.abs(away))[None]
    longest = ring.length
    row = encodings.relative_bias(
        own["table"], 1, 2 * longest - 1, q_offset=longest - 1, buckets=config.relative_buckets,
        max_distance=config.relative_max_distance, bidirectional=not config.is_causal,
    )  # fmt: skip
    return row[None, :, 0, away + (longest - 1)]
