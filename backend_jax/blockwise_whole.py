"""The blockwise kernel where scores are few: whole rows, whose weights are kept for the backward pass.

    P_ij = exp(s_ij - m_i) / l_i,  delta_i = dO_i . O_i - dlse_i,  dS_ij = P_ij (f_ij dO_i . v_j - delta_i)

With P at hand nothing is masked, multiplied or exponentiated twice, which is what a short row pays for. Query heads
that share keys are merged with the queries before the first product: XLA on CPUs puts scale, bias, maximum and
exponential into that product's loop, and all of dS into one, as long as no reshape or selection stands in between.
f is dropout's factor; a soft cap multiplies dS by 1 - tanh^2, as in the backward pass of many blocks.

Many heads are taken some at a time, so that their weights are still in the cache when they are used again; and under
a band some rows at a time, each with the keys that it may see.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .blocks import (
    WHOLE,
    Layout,
    Spec,
    Terms,
    every_key_is_seen,
    every_query_sees,
    kept_layout,
    row_starts,
    start,
    take,
)
from .blockwise_gradients import add, add_bias, refuse_twice, term_cotangents
from .blockwise_scores import accumulation, product, thinned
from .visibility import Block, all_of, allowed, kept, living

# Of a block: weights, tanh of the soft cap, dropout's choice, each (nb, ng, r rows, width); which queries see no key,
# and the sink's weight, their last axis 1; which keys some query sees, (nb, ng, width) with axes of size 1.
Kept = tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None, jax.Array | None, jax.Array | None]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def whole(spec: Spec, q: jax.Array, k: jax.Array, v: jax.Array, terms: Terms) -> tuple[jax.Array, jax.Array]:
    """Shapes and terms as in `blockwise`; no axis but Dv is empty."""
    return _forward(spec, q, k, v, terms)[0]


def _forward(
    spec: Spec, q: jax.Array, k: jax.Array, v: jax.Array, terms: Terms
) -> tuple[tuple[jax.Array, jax.Array], tuple[Kept, ...]]:
    plan = kept_layout(spec, frozenset(terms))

    def group(u: jax.Array | int) -> tuple[tuple[jax.Array, jax.Array], tuple[Kept, ...]]:
        queries, keys, values = _of_group(spec, plan, u, q, k, v)
        found = (_rows(spec, terms, block, queries, keys, values) for block in _blocks(spec, plan, u))
        outs, lses, rest = zip(*found, strict=True)
        return (_join(outs, 3).astype(q.dtype), _join(lses, 3)), rest

    count = _groups(spec, plan)
    (out, lse), rest = group(0) if count == 1 else lax.map(group, jnp.arange(count, dtype=jnp.int32))
    return (out.reshape(*q.shape[:4], spec.Dv), lse.reshape(q.shape[:4])), rest


def _groups(spec: Spec, plan: Layout) -> int:
    return (spec.B // plan.nb) * (spec.G // plan.ng)


def _of_group(spec: Spec, plan: Layout, u: jax.Array | int, *arrays: jax.Array) -> list[jax.Array]:
    """The part of each (B, G, ...) that belongs to group u."""
    where = start(spec, plan, u)
    return [take(x, (*where, *(0,) * (x.ndim - 2)), (plan.nb, plan.ng, *x.shape[2:])) for x in arrays]


def _blocks(spec: Spec, plan: Layout, u: jax.Array | int) -> Iterator[Block]:
    """The group's blocks of rows, each with the keys that it may see."""
    b, g = start(spec, plan, u)
    for i, (lo, hi) in zip(row_starts(spec, plan), plan.ranges or (), strict=True):
        yield Block(b, g, i, lo, plan.nb, plan.ng, min(plan.rows, spec.T - i), hi - lo)


def _join(parts: Sequence[jax.Array], axis: int) -> jax.Array:
    return jnp.concatenate(parts, axis) if len(parts) > 1 else parts[0]


def _rows(
    spec: Spec, terms: Terms, block: Block, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array, Kept]:
    """One block of rows: output (nb, ng, r, rows, Dv), lse (nb, ng, r, rows), what is kept of it."""
    acc = accumulation(q.dtype)
    alive = None if every_key_is_seen(spec, terms) else living(spec, terms, block)
    keys, values = (_seen(alive, _columns(block, x), acc) for x in (k, v))
    queries, conditions, dead = _lines(block, q, acc), allowed(spec, terms, block, None), None
    selected = conditions
    if "bias" in terms and spec.T * spec.S <= WHOLE:  # of more scores a selection costs no more
        # A query without keys may hold NaN, to which -inf is added in vain. For the others -inf hides by itself, in the
        # loop of the product: a selection of pairs, or a maximum made finite, would make several of it.
        dead = ~_merged(spec, block, all_of(conditions).any(-1, keepdims=True))
        queries = jnp.where(dead, 0, queries)
        selected = allowed(spec, {name: x for name, x in terms.items() if name != "bias"}, block, None)
    s, bent = product(spec, "bgqd,bgkd->bgqk", queries, keys) * spec.scale, None
    if spec.softcap is not None:
        bent = jnp.tanh(s / spec.softcap)
        s = bent * spec.softcap
    if "bias" in terms:
        s = s + _merged(spec, block, block.cut(terms["bias"], spec.r).astype(acc))
    if selected:
        s = jnp.where(_merged(spec, block, all_of(selected)), s, -jnp.inf)
    m = s.max(-1, keepdims=True)
    added = dead is not None
    if conditions and not added and not every_query_sees(spec, terms):
        dead = m == -jnp.inf
    sink = _sinks(spec, terms, block, acc) if "sinks" in terms else None
    if sink is not None:
        m = jnp.maximum(m, sink)
    if conditions and not added:
        # Finite, so that a row without keys needs no selection before its exponentials; they and their sum are 0.
        m = jnp.maximum(m, jnp.finfo(acc).min)
    p = jnp.exp(s - m)
    l, sunk = p.sum(-1, keepdims=True), None
    if sink is not None:
        sunk = jnp.exp(sink - m)
        l = l + sunk
    lse, share = m + jnp.log(l), 1 / l
    if dead is not None:
        lse, share = jnp.where(dead, -jnp.inf if sink is None else sink, lse), jnp.where(dead, 0, share)
    p = p * share
    if sink is not None and sunk is not None:
        # A query without keys is its sink's alone, unless that is -inf too.
        sunk = sunk * share if dead is None else jnp.where(dead, sink > -jnp.inf, sunk * share)
    choice = kept(spec, terms, block).reshape(s.shape) if spec.dropout > 0.0 else None
    out = product(spec, "bgqk,bgkd->bgqd", thinned(spec, choice, p), values)
    if added and dead is not None:  # exp(-inf - -inf)
        out, p = (jnp.where(dead, 0, x) for x in (out, p))
    shape = (block.nb, block.ng, spec.r, block.rows)
    return out.reshape(*shape, spec.Dv), lse.reshape(shape), (p, bent, choice, dead, sunk, alive)


def _seen(alive: jax.Array | None, x: jax.Array, acc: jnp.dtype) -> jax.Array:
    """Keys or values, zero where no query may attend: 0 * NaN is NaN."""
    return x.astype(acc) if alive is None else jnp.where(alive[..., None], x.astype(acc), 0)


def _columns(block: Block, x: jax.Array) -> jax.Array:
    """The block's keys or values of a group's (nb, ng, S, n)."""
    return x[:, :, block.j : block.j + block.width]


def _lines(block: Block, x: jax.Array, acc: jnp.dtype) -> jax.Array:
    """The block's rows of a group's (nb, ng, r, T) or (nb, ng, r, T, n), as (nb, ng, r rows, 1 or n)."""
    x = x[:, :, :, block.i : block.i + block.rows]
    return x.astype(acc).reshape(block.nb, block.ng, x.shape[2] * block.rows, x.shape[4] if x.ndim == 5 else 1)


def _merged(spec: Spec, block: Block, x: jax.Array) -> jax.Array:
    """(nb, ng, r, rows, width) -> (nb, ng, r rows, width), each axis its size or 1."""
    if x.shape[2] != 1 or (spec.r > 1 and x.shape[3] != 1):
        x = jnp.broadcast_to(x, (*x.shape[:2], spec.r, block.rows, x.shape[4]))
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], x.shape[4])


def _sinks(spec: Spec, terms: Terms, block: Block, acc: jnp.dtype) -> jax.Array:
    """(G, r) -> (1, ng, r rows, 1)."""
    sinks = take(terms["sinks"], (block.g, 0), (block.ng, spec.r)).astype(acc)
    return jnp.repeat(sinks, block.rows, axis=1)[None, :, :, None]


def _save(spec: Spec, q: jax.Array, k: jax.Array, v: jax.Array, terms: Terms):
    (out, lse), rest = _forward(spec, q, k, v, terms)
    return (out, lse), (q, k, v, terms, out, rest)


def _gradients(spec: Spec, saved, cotangents):
    return _backward(spec, saved, cotangents)


whole.defvjp(_save, _gradients)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _backward(spec: Spec, saved, cotangents: tuple[jax.Array, jax.Array]):
    """Cotangents of (q, k, v, terms)."""
    q, k, v, terms, out, rest = saved
    plan, acc = kept_layout(spec, frozenset(terms)), accumulation(q.dtype)
    shared: dict[str, Any] = {name: jnp.zeros(terms[name].shape, acc) for name in ("bias", "sinks") if name in terms}

    def group(shared: dict[str, Any], own):
        u, rest = own
        arrays = _of_group(spec, plan, u, q, k, v, out, *cotangents)
        dqs, dks, dvs = [], [], []
        for block, kept_of_block in zip(_blocks(spec, plan, u), rest, strict=True):
            shared, (dq, dk, dv) = _rows_back(spec, terms, block, arrays, kept_of_block, shared)
            dqs.append(dq)
            dks.append(_widened(spec, block, dk))
            dvs.append(_widened(spec, block, dv))
        dk, dv = (sum(x[1:], x[0]) for x in (dks, dvs))
        return shared, (_join(dqs, 3).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype))

    count = _groups(spec, plan)
    if count == 1:
        shared, own = group(shared, (0, rest))
    else:
        shared, own = lax.scan(group, shared, (jnp.arange(count, dtype=jnp.int32), rest))
    dq, dk, dv = (x.reshape(like.shape) for x, like in zip(own, (q, k, v), strict=True))
    return dq, dk, dv, term_cotangents(terms, shared)


def _rows_back(spec: Spec, terms: Terms, block: Block, arrays, kept_of_block: Kept, shared: dict[str, Any]):
    """What one block of rows gives: to the sums of bias and sinks; to its queries, its keys and its values."""
    q, k, v, out, dout, dlse = arrays
    p, bent, choice, dead, sunk, alive = kept_of_block
    acc = accumulation(q.dtype)
    keys, values = (_seen(alive, _columns(block, x), acc) for x in (k, v))
    queries, douts, dlse = (_lines(block, x, acc) for x in (q, dout, dlse))
    if dead is not None:
        # Whatever stands in a dead query, or in what comes back for it, has no effect: 0 * NaN would.
        queries, douts = (jnp.where(dead, 0, x) for x in (queries, douts))
        dlse = dlse if "sinks" in terms else jnp.where(dead, 0, dlse)
        bent = bent if bent is None else jnp.where(dead, 0, bent)
    delta = (douts * _lines(block, out, acc)).sum(-1, keepdims=True) - dlse
    shape = (block.nb, block.ng, spec.r, block.rows)
    if sunk is not None:
        dsink = -(sunk * delta).reshape(shape).sum((0, 3))
        shared = shared | {"sinks": add(shared["sinks"], dsink, (block.g, 0))}
    ds = p * (thinned(spec, choice, product(spec, "bgqd,bgkd->bgqk", douts, values)) - delta)
    if "bias" in terms:
        shared = shared | {"bias": add_bias(shared["bias"], ds.reshape(*shape, block.width), block)}
    ds = ds * spec.scale
    if bent is not None:
        ds = ds * (1 - bent * bent)
    dv = product(spec, "bgqk,bgqd->bgkd", thinned(spec, choice, p), douts)
    dk = product(spec, "bgqk,bgqd->bgkd", ds, queries)
    dq = product(spec, "bgqk,bgkd->bgqd", ds, keys).reshape(*shape, spec.D)
    return shared, (dq, dk, dv)


def _widened(spec: Spec, block: Block, x: jax.Array) -> jax.Array:
    """(nb, ng, width, n) at its place among S keys, zeros beside it."""
    if block.width == spec.S:
        return x
    return jnp.pad(x, ((0, 0), (0, 0), (block.j, spec.S - block.j - block.width), (0, 0)))


_backward.defvjp(refuse_twice, lambda spec, saved, cotangents: cotangents)
