"""Self-attention whose queries and keys are spread over the context axis: each device has some pieces of every row.

Keys and values go round by `ppermute`, and each device adds what its queries find in them:

    out, lse = merge(attention_with_lse(q_a, k_b, v_b) for every part b of the keys)
    d out_b = w_b d out,   d lse_b = w_b (d out . out_b - d out . out),   w_b = exp(lse_b - lse)

They go from neighbour to neighbour in a loop, because XLA would run messages ahead that stand side by side, and share
by share, so that a device holds little more than its own queries, keys and gradients, however long the row. The
backward pass lets the keys go round once more and computes each block again; their gradients go with them. Where
causality or a window hides one device's keys from another, nothing is sent. Source: Liu et al. 2023 (arXiv:2310.01889);
pieces c and 2 C - 1 - c of zigzag rings, so that causal work is even.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from core_numpy.contract.config import ModelConfig
from core_numpy.contract.parallel import context_pieces

from . import encodings, place
from .attention import attention_with_lse, merge_attention
from .blockwise_scores import accumulation

Arrays = dict[str, Any]

# Keys travel in so many shares at most, of so many positions of each piece at least.
SHARES, LEAST = 8, 2048


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
    def shares(self) -> int:
        """In how many equal shares the keys of a device travel. Each is of all pieces: causal work on it is even."""
        size = self.length // (self.count * self.pieces)
        return next(n for n in range(min(SHARES, max(size // LEAST, 1)), 0, -1) if size % n == 0)

    @property
    def size(self) -> int:
        """Positions of a block: of one share of one piece."""
        return self.length // (self.count * self.pieces * self.shares)

    def start(self, device: Any, piece: Any, share: Any) -> Any:
        """Where a share of piece 0 or 1 of a device begins; all of them may be traced."""
        return ((device + piece * (2 * self.count - 1 - 2 * device)) * self.shares + share) * self.size

    def query(self, device: Any, a: Any) -> Any:
        """Where block a of a device's queries begins."""
        return self.start(device, a // self.shares, a % self.shares)

    def sees(self, query: Any, key: Any) -> Any:
        """Whether a query of the block that begins at `query` may attend to a key of the one that begins at `key`."""
        left, right = self.window or (None, None)
        if self.causal:
            right = 0 if right is None else min(right, 0)
        last, seen = self.size - 1, True
        if right is not None:
            seen = seen & (key <= query + last + right)
        return seen if left is None else seen & (key + last >= query - left)

    def seen(self, steps: Sequence[int]) -> np.ndarray:
        """Whether something is seen: (steps, blocks of queries here, pieces there, devices, shares there) of bool.

        There is the device so many places back.
        """
        sizes = (len(steps), self.pieces * self.shares, self.pieces, self.count, self.shares)
        step, a, b, here, share = np.ix_(np.array(steps), *map(np.arange, sizes[1:]))
        seen = self.sees(self.query(here, a), self.start((here - step) % self.count, b, share))
        return np.broadcast_to(seen, sizes)

    def routes(self, step: int) -> list[tuple[int, int]]:
        """(from, to) of the devices whose keys are needed `step` places on."""
        wanted = np.asarray(self.seen([step]).any((0, 1, 2, 4)))
        return [((c - step) % self.count, c) for c in range(self.count) if wanted[c]]

    def legs(self) -> list[tuple[int, int]]:
        """(direction, how many steps that way) in which keys come to all that need them: 1 onwards, -1 back.

        Steps that nobody needs are left out where they are most in a row; with causal pieces and a window both
        directions are needed.
        """
        wanted = [step for step in range(1, self.count) if self.routes(step)]
        if len(wanted) == self.count - 1:  # all the way round
            return [(1, len(wanted))]
        ends = [0, *wanted, self.count]
        gap = max(range(len(ends) - 1), key=lambda i: ends[i + 1] - ends[i])
        return [leg for leg in ((1, ends[gap]), (-1, self.count - ends[gap + 1])) if leg[1]]


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
    (B, H, T), q, v, width = own["q"].shape[:3], own["q"], own["v"], own["k"].shape[-1]

    def visit(seen: Any, a: Any, b: Any, keys: Arrays, sent: Arrays, state: Arrays) -> tuple[Arrays, Arrays]:
        cut = _cut(ring, own, {"k": keys["kv"][..., :width], "v": keys["kv"][..., width:]}, a, b)
        blank = (jnp.zeros((B, H, ring.size, v.shape[-1]), q.dtype), jnp.full((B, H, ring.size), -jnp.inf, acc))
        out, lse = seen(partial(_block, ring, whole, cut), blank)
        before = _block_of(ring, state["out"], a), _block_of(ring, state["lse"], a)
        merged = merge_attention(*zip(before, (out.astype(acc), lse), strict=True))
        return sent, {name: _put(ring, state[name], a, x) for name, x in zip(("out", "lse"), merged, strict=True)}

    # One array here and two in the backward pass: XLA would see the same first message in both, and keep its keys.
    def keys(share: Any) -> Arrays:
        return {"kv": jnp.concatenate([_share(ring, own[name], share) for name in ("k", "v")], -1)}

    state = {"out": jnp.zeros((B, H, T, v.shape[-1]), acc), "lse": jnp.full((B, H, T), -jnp.inf, acc)}
    state = _by_shares(ring, keys, partial(_visit, ring, here, visit), state)
    return state["out"].astype(q.dtype), (own, whole, here, state["out"], state["lse"])


def _backward(ring: Ring, saved: Any, grad: jax.Array) -> tuple[Any, ...]:
    own, whole, here, out, lse = saved
    acc, grad = out.dtype, grad.astype(out.dtype)
    delta, lse = (grad * out).sum(-1), jnp.where(lse == -jnp.inf, 0, lse)

    def visit(seen: Any, a: Any, b: Any, keys: Arrays, sent: Arrays, state: Arrays) -> tuple[Arrays, Arrays]:
        cut = _cut(ring, own, keys, a, b)
        cotangents = tuple(_block_of(ring, x, a) for x in (grad, delta, lse))
        found = seen(partial(_derivative, ring, whole, cut, cotangents), _zeros(cut, acc))
        sent = {name: _put(ring, x, b, _block_of(ring, x, b) + found[name]) for name, x in sent.items()}
        state = state | {"q": _put(ring, state["q"], a, _block_of(ring, state["q"], a) + found["q"])}
        state |= {name: state[name] + found[name] for name in ("sinks", "table") if name in state}
        return sent, state

    def keys(share: Any) -> Arrays:
        return {name: _share(ring, own[name], share) for name in ("k", "v")}

    totals = _by_shares(ring, keys, partial(_visit, ring, here, visit), _zeros(own, acc))
    grads = {name: totals[name].astype(x.dtype) for name, x in own.items()}
    return grads, jax.tree.map(lambda x: None, whole), None


_ring.defvjp(_forward, _backward)


def _by_shares(ring: Ring, keys: Callable[[Any], Arrays], visit: Callable[..., Any], state: Arrays) -> Arrays:
    """`state` after a visit of everybody's keys, share by share. keys(share): those here.

    Where `state` has totals of keys, what visits of them give is added to those of the device whose keys they are.
    """

    def one(state: Arrays, share: Any) -> tuple[Arrays, None]:
        given = keys(share)
        totals = {name: state[name] for name in given if name in state}
        blank = {name: jnp.zeros(given[name].shape, x.dtype) for name, x in totals.items()}
        others = {name: x for name, x in state.items() if name not in totals}
        others, found = _travel(ring, given, blank, partial(visit, share), others)
        return others | {name: _add_share(ring, x, share, found[name]) for name, x in totals.items()}, None

    if ring.shares == 1:
        return one(state, 0)[0]
    return lax.scan(one, state, jnp.arange(ring.shares, dtype=jnp.int32))[0]


def _travel(ring: Ring, keys: Arrays, blank: Arrays, visit: Callable[..., Any], state: Arrays) -> tuple[Arrays, Arrays]:
    """`state` after a visit of everybody's share of keys, own first; and what came back of what visits added to `sent`.

    visit(steps, step, keys, sent, state) gives sent, `blank` before, and state; `step`, one of `steps`, may be traced.
    """
    totals, state = visit([0], 0, keys, blank, state)
    for direction, count in ring.legs():
        steps = [direction * (i + 1) for i in range(count)]
        routes = [(c, (c + direction) % ring.count) for c in range(ring.count)]
        home = [(c, (c - steps[-1]) % ring.count) for c in range(ring.count)]
        if count == 1:  # no one passes anything on
            routes = ring.routes(direction)
            home = [(to, origin) for origin, to in routes]
        coming, sent = _moved(keys, routes), blank
        if count > 1:

            def body(carry: Any, step: Any, steps: Any = steps, routes: Any = routes) -> tuple[Any, None]:
                coming, sent, state = carry
                following = _moved(coming, routes)
                sent, state = visit(steps[:-1], step, coming, sent, state)
                return (following, _moved(sent, routes), state), None

            (coming, sent, state), _ = lax.scan(body, (coming, sent, state), jnp.array(steps[:-1], jnp.int32))
        sent, state = visit(steps[-1:], steps[-1], coming, sent, state)
        totals = {name: totals[name] + x for name, x in _moved(sent, home).items()}
    return state, totals


def _moved(arrays: Arrays, routes: list[tuple[int, int]]) -> Arrays:
    return {name: lax.ppermute(x, "context", routes) for name, x in arrays.items()}


def _zeros(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), tree)


def _block_of(ring: Ring, x: jax.Array, block: Any) -> jax.Array:
    """One block of x (B, heads, blocks of positions, ...)."""
    return lax.dynamic_slice_in_dim(x, block * ring.size, ring.size, 2)


def _put(ring: Ring, x: jax.Array, block: Any, new: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(x, new, block * ring.size, 2)


def _share(ring: Ring, x: jax.Array, share: Any) -> jax.Array:
    """One share of each piece: (B, G, pieces x size, D) of x (B, G, T here, D)."""
    B, G, T, D = x.shape
    cut = lax.dynamic_index_in_dim(x.reshape(B, G, ring.pieces, ring.shares, ring.size, D), share, 3, keepdims=False)
    return cut.reshape(B, G, T // ring.shares, D)


def _add_share(ring: Ring, x: jax.Array, share: Any, new: jax.Array) -> jax.Array:
    """x with `new` added to one of its shares."""
    cut = x.reshape(*x.shape[:2], ring.pieces, ring.shares, ring.size, x.shape[-1])
    new = new.reshape(*x.shape[:2], ring.pieces, 1, ring.size, x.shape[-1])
    new = new + lax.dynamic_slice_in_dim(cut, share, 1, 3)
    return lax.dynamic_update_slice_in_dim(cut, new, share, 3).reshape(x.shape)


def _cut(ring: Ring, own: Arrays, keys: Arrays, a: Any, b: Any) -> Arrays:
    """Block a of the queries here, and the keys and values of block b; what is not by position as it is."""
    return own | {"q": _block_of(ring, own["q"], a), **{name: _block_of(ring, keys[name], b) for name in ("k", "v")}}


def _visit(
    ring: Ring, here: jax.Array, visit: Callable[..., Any], share: Any, steps: Sequence[int], step: Any, keys: Arrays,
    sent: Arrays, state: Arrays,
) -> tuple[Arrays, Arrays]:  # fmt: skip
    """sent and state after each block here with each of one device's share, the one `step` places back, one of `steps`.

    visit(seen, a, b, keys, sent, state): seen(work, nothing) is work(first, key) where this device's block a sees block
    b, else `nothing`. One pair after another: XLA works on those that stand side by side at once, in memory for all.
    """
    possible = ring.seen(steps)
    pairs = np.argwhere(possible.any((0, 3, 4))).astype(np.int32)
    always = all(possible[:, a, b].all() for a, b in pairs)

    def one(carry: Any, pair: Any) -> tuple[Any, None]:
        a, b = pair
        first, key = ring.query(here, a), ring.start((here - step) % ring.count, b, share)

        def seen(work: Any, nothing: Any) -> Any:
            if always:
                return work(first, key)
            return lax.cond(ring.sees(first, key), work, lambda first, key: nothing, first, key)

        return visit(seen, a, b, keys, *carry), None

    if len(pairs) == 1:
        return one((sent, state), pairs[0].tolist())[0]
    return lax.scan(one, (sent, state), tuple(jnp.asarray(pairs.T)))[0]


def _derivative(ring: Ring, whole: Arrays, cut: Arrays, cotangents: Any, first: Any, key: Any) -> Arrays:
    """What one block adds to the gradients of what it is computed from."""
    grad, delta, lse = cotangents
    (part, log), pull = jax.vjp(lambda cut: _block(ring, whole, cut, first, key), cut)
    share = jnp.exp(log - lse)
    g = grad * share[..., None]
    g_lse = (g * part.astype(g.dtype)).sum(-1) - share * delta
    return jax.tree.map(lambda x: x.astype(g.dtype), pull((g.astype(part.dtype), g_lse))[0])


def _block(ring: Ring, whole: Arrays, own: Arrays, first: Any, key: Any) -> Any:
    """Out and lse of one block's queries, from position `first` on, and one's keys, from `key` on (see `_cut`)."""
    size, q, k, v = ring.size, own["q"], own["k"], own["v"]
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
