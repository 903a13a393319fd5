"""Attention in blocks: memory grows with T + S, blocks that the structure empties are skipped.

    m_i = max_j s_ij,  l_i = sum_j exp(s_ij - m_i),  o_i = sum_j exp(s_ij - m_i) v_j / l_i,  lse_i = m_i + log l_i
    P_ij = exp(s_ij - m_i) / l_i,  delta_i = dO_i . O_i - dlse_i,  dS_ij = P_ij (dO_i . v_j - delta_i)
    dq_i = scale sum_j dS_ij k_j,  dk_j = scale sum_i dS_ij q_i,  dv_j = sum_i P_ij dO_i

Derivatives are written by hand, because XLA fuses neither the automatic ones nor keeps them small. The backward pass
is given m and l, not lse: of scores of 1e9 it would have no digits left for log l. It holds scores with the keys
first: three of its products then need no transpose. Source: Rabe and Staats 2021 (arXiv:2112.05682), Dao et al. 2022
(arXiv:2205.14135).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from .blocks import Layout, Spec, Terms, keeps_weights, layout, one_pass, row_starts, start, take, visit
from .blockwise_gradients import backward
from .blockwise_scores import accumulation, dropped, keys_of, product, scores
from .blockwise_whole import whole
from .visibility import Block

State = tuple[jax.Array, jax.Array, jax.Array]


def blockwise(spec: Spec, q: jax.Array, k: jax.Array, v: jax.Array, terms: Terms) -> tuple[jax.Array, jax.Array]:
    """q (B, G, r, T, D), k (B, G, S, D), v (B, G, S, Dv) -> out (B, G, r, T, Dv) in q's dtype, lse (B, G, r, T).

    terms: q_offset (B,), kv_lengths (B,), q_segments (B, T), kv_segments (B, S), mask and bias with five axes,
    sinks (G, r), dropout_key (2,), those that are given. Few scores are taken whole, more of them in blocks.
    """
    return whole(spec, q, k, v, terms) if keeps_weights(spec) else _many(spec, q, k, v, terms)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _many(spec: Spec, q: jax.Array, k: jax.Array, v: jax.Array, terms: Terms) -> tuple[jax.Array, jax.Array]:
    out, m, l = _forward(spec, q, k, v, terms)
    return out, _log(m, l)


def _forward(
    spec: Spec, q: jax.Array, k: jax.Array, v: jax.Array, terms: Terms
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """out in q's dtype, m and l (B, G, r, T), sinks included; m is finite, l is 0 where there is nothing to sum."""
    acc = accumulation(q.dtype)
    if 0 in (spec.B, spec.T, spec.S):
        return _without_scores(spec, q, terms, acc)
    plan = layout(spec, frozenset(terms))

    def group(u: jax.Array | int) -> tuple[jax.Array, jax.Array, jax.Array]:
        b, g = start(spec, plan, u)
        keys, values = (take(x, (b, g, 0, 0), (plan.nb, plan.ng, *x.shape[2:])) for x in (k, v))

        def rows(i: jax.Array | int, span: tuple[int, int] | None, count: int) -> State:
            queries = take(q, (b, g, 0, i, 0), (plan.nb, plan.ng, spec.r, count, spec.D)).astype(acc)
            flat = queries.reshape(plan.nb, plan.ng, spec.r * count, spec.D)

            def step(j: jax.Array | int, width: int, first, masked: bool, state: State) -> State:
                block = Block(b, g, i, j, plan.nb, plan.ng, count, width)
                before = None if one_pass(spec, plan) else state
                return _absorb(spec, terms, block, (flat, keys, values), first, masked, before)

            state = visit(spec, plan, terms, (b, g, i, count), span, step, _empty(spec, plan, count, acc))
            sink = None if "sinks" not in terms else take(terms["sinks"], (g, 0), (plan.ng, spec.r)).astype(acc)
            out, m, l = _finish(state, sink)
            return out.astype(q.dtype), m, l

        return _over_rows(spec, plan, rows)

    out, m, l = _over_groups(spec, plan, group)
    shape = (spec.B, spec.G, spec.r, spec.T)
    return out.reshape(*shape, spec.Dv), m.reshape(shape), l.reshape(shape)


def _log(m: jax.Array, l: jax.Array) -> jax.Array:
    """lse, -inf where there is nothing to sum."""
    return jnp.where(l == 0, -jnp.inf, m + jnp.log(jnp.where(l == 0, 1, l)))


def _without_scores(spec: Spec, q: jax.Array, terms: Terms, acc: jnp.dtype) -> State:
    """An axis is empty. Without keys every query is dead: output 0, lse -inf or the sink."""
    shape = (spec.B, spec.G, spec.r, spec.T)
    m = l = jnp.zeros(shape, acc)
    if spec.S == 0 and "sinks" in terms:
        sinks = jnp.broadcast_to(terms["sinks"].astype(acc)[..., None], shape)
        m, l = jnp.where(sinks == -jnp.inf, 0, sinks), jnp.where(sinks == -jnp.inf, 0, 1).astype(acc)
    return jnp.zeros((*shape, spec.Dv), q.dtype), m, l


def _over_groups(spec: Spec, plan: Layout, group):
    """Run the groups one after the other and put their results together; one group needs no loop."""
    count = (spec.B // plan.nb) * (spec.G // plan.ng)
    return group(0) if count == 1 else lax.map(group, jnp.arange(count, dtype=jnp.int32))


def _over_rows(spec: Spec, plan: Layout, rows) -> State:
    """All blocks of queries of a group. The last block of a loop is moved back to end at T: its first rows are
    computed twice, which costs less than padding."""
    starts = row_starts(spec, plan)
    if plan.ranges is not None:
        parts = [rows(i, span, min(plan.rows, spec.T - i)) for i, span in zip(starts, plan.ranges, strict=True)]
        out, m, l = (jnp.concatenate(x, axis=3) if len(x) > 1 else x[0] for x in zip(*parts, strict=True))
        return out, m, l
    if len(starts) == 1:
        return rows(0, None, plan.rows)
    out, m, l = lax.map(
        lambda i: rows(jnp.minimum(i, spec.T - plan.rows), None, plan.rows), jnp.asarray(starts, jnp.int32)
    )
    return _join(out, spec.T), _join(m[..., None], spec.T)[..., 0], _join(l[..., None], spec.T)[..., 0]


def _join(x: jax.Array, T: int) -> jax.Array:
    """(blocks, nb, ng, r, rows, n) -> (nb, ng, r, T, n), where the last block ends at T."""
    blocks, nb, ng, r, rows, n = x.shape
    whole = jnp.moveaxis(x[:-1], 0, 3).reshape(nb, ng, r, (blocks - 1) * rows, n)
    return jnp.concatenate([whole, x[-1][..., blocks * rows - T :, :]], axis=3)


def _empty(spec: Spec, plan: Layout, count: int, acc: jnp.dtype) -> State:
    shape = (plan.nb, plan.ng, spec.r, count)
    return jnp.full(shape, -jnp.inf, acc), jnp.zeros(shape, acc), jnp.zeros((*shape, spec.Dv), acc)


def _absorb(spec: Spec, terms: Terms, block: Block, arrays, first, masked: bool, state: State | None) -> State:
    """Add one block of keys to the running maximum, sum of exponentials and weighted sum of values."""
    flat, keys, values = arrays
    shape = (block.nb, block.ng, spec.r, block.rows, block.width)
    k, v = keys_of(spec, terms, block, masked, (keys, values), flat.dtype)
    s, _ = scores(spec, terms, block, product(spec, "bgqd,bgkd->bgqk", flat, k).reshape(shape), first, masked)
    m = s.max(-1) if state is None else jnp.maximum(state[0], s.max(-1))
    finite = jnp.where(m == -jnp.inf, 0, m)
    p = jnp.exp(s - finite[..., None])
    l = p.sum(-1)
    p = dropped(spec, terms, block, p)
    o = product(spec, "bgqk,bgkd->bgqd", p.reshape(*shape[:2], -1, block.width), v).reshape(*shape[:4], spec.Dv)
    if state is None:
        return m, l, o
    shrink = jnp.exp(state[0] - finite)
    return m, state[1] * shrink + l, state[2] * shrink[..., None] + o


def _finish(state: State, sink: jax.Array | None) -> State:
    """out, m and l. Sinks join the denominator; a row without any key gets output 0, and l = 0 (or 1 and its sink)."""
    m, l, o = state
    top = m if sink is None else jnp.maximum(m, sink[..., None])
    finite = jnp.where(top == -jnp.inf, 0, top)
    if sink is not None:
        shrink = jnp.exp(m - finite)
        l, o = l * shrink + jnp.exp(sink[..., None] - finite), o * shrink[..., None]
    return o / jnp.where(l == 0, 1, l)[..., None], finite, l


def _save(spec: Spec, q: jax.Array, k: jax.Array, v: jax.Array, terms: Terms):
    out, m, l = _forward(spec, q, k, v, terms)
    return (out, _log(m, l)), (q, k, v, terms, out, m, l)


def _gradients(spec: Spec, saved, cotangents):
    return backward(spec, saved, cotangents)


_many.defvjp(_save, _gradients)
