"""The backward pass of the blockwise kernel: the block's weights again from m and l, then five products.

    e_ij = exp(s_ij - m_i),  g_i = dO_i / l_i,  delta_i = g_i . O_i - dlse_i / l_i
    dS_ij = e_ij (f_ij g_i . v_j - delta_i)
    dq_i = scale sum_j dS_ij k_j,  dk_j = scale sum_i dS_ij q_i,  dv_j = sum_i f_ij e_ij g_i,  dbias_ij = dS_ij
    dsink = -sum_i exp(sink - m_i) delta_i

The weights are e / l, but a row is divided sooner than its weights. f is dropout's factor; under a soft cap dS is
multiplied by 1 - tanh^2 for q and k. Scores stand keys first here, so that three of the five products need no
transpose.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import dtypes, lax

from .blocks import Layout, Spec, Terms, indices, layout, row_starts, start, take, visit
from .blockwise_scores import accumulation, dropped, keys_of, product, scores
from .visibility import Block

Saved = tuple[jax.Array, jax.Array, jax.Array, Terms, jax.Array, jax.Array, jax.Array]
Sums = dict[str, jax.Array]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def backward(spec: Spec, saved: Saved, cotangents: tuple[jax.Array, jax.Array]):
    """Cotangents of (q, k, v, terms) from what the forward pass saved and the cotangents of out and lse."""
    q, k, v, terms = saved[:4]
    if 0 in (spec.B, spec.T, spec.S):
        return _without_scores(spec, saved, cotangents)
    acc, plan = accumulation(q.dtype), layout(spec, frozenset(terms))
    shared: Sums = {name: jnp.zeros(terms[name].shape, acc) for name in ("bias", "sinks") if name in terms}

    def group(shared: Sums, u: jax.Array | int) -> tuple[Sums, tuple[jax.Array, jax.Array, jax.Array]]:
        where = start(spec, plan, u)
        keys, values = (take(x, (*where, 0, 0), (plan.nb, plan.ng, *x.shape[2:])) for x in (k, v))
        sums = shared | {
            "q": jnp.zeros((plan.nb, plan.ng, spec.r, spec.T, spec.D), acc),
            "k": jnp.zeros(keys.shape, acc),
            "v": jnp.zeros(values.shape, acc),
        }
        sums = _over_rows(spec, plan, saved, cotangents, where, (keys, values), sums)
        own = (sums.pop("q").astype(q.dtype), sums.pop("k").astype(k.dtype), sums.pop("v").astype(v.dtype))
        return sums, own

    count = (spec.B // plan.nb) * (spec.G // plan.ng)
    if count == 1:
        shared, own = group(shared, 0)
    else:
        shared, own = lax.scan(group, shared, jnp.arange(count, dtype=jnp.int32))
    dq, dk, dv = (x.reshape(like.shape) for x, like in zip(own, (q, k, v), strict=True))
    return dq, dk, dv, term_cotangents(terms, shared)


def refuse_twice(spec: Spec, saved: Saved, cotangents: Any):
    raise ValueError(
        "kernel='blockwise' can be differentiated once; kernel='dense' can be differentiated any number of times"
    )


backward.defvjp(refuse_twice, lambda spec, saved, cotangents: cotangents)


def term_cotangents(terms: Terms, found: Sums) -> dict[str, Any]:
    """Sums in the term's own dtype; integers and booleans have the empty cotangent that JAX asks for."""
    return {
        name: found[name].astype(x.dtype) if name in found else np.zeros(x.shape, dtypes.float0)
        for name, x in terms.items()
    }


def _without_scores(spec: Spec, saved: Saved, cotangents: tuple[jax.Array, jax.Array]):
    """No pairs, no gradients, except that lse is the sink where there are no keys."""
    q, k, v, terms = saved[:4]
    found: Sums = {name: jnp.zeros(terms[name].shape) for name in ("bias", "sinks") if name in terms}
    if "sinks" in terms and spec.S == 0:
        found["sinks"] = cotangents[1].sum((0, 3))
    return jnp.zeros_like(q), jnp.zeros_like(k), jnp.zeros_like(v), term_cotangents(terms, found)


def _over_rows(spec: Spec, plan: Layout, saved: Saved, cotangents, where, arrays, sums: Sums) -> Sums:
    """All blocks of queries of one group."""
    if plan.ranges is not None:
        for i, span in zip(row_starts(spec, plan), plan.ranges, strict=True):
            sums = _rows(spec, plan, saved, cotangents, (*where, i, min(plan.rows, spec.T - i)), span, arrays, i, sums)
        return sums
    starts = row_starts(spec, plan)
    if len(starts) == 1:
        return _rows(spec, plan, saved, cotangents, (*where, 0, plan.rows), None, arrays, 0, sums)

    def body(n: jax.Array, sums: Sums) -> Sums:
        first = n * plan.rows
        i = jnp.minimum(first, spec.T - plan.rows)
        return _rows(spec, plan, saved, cotangents, (*where, i, plan.rows), None, arrays, first, sums)

    return lax.fori_loop(np.int32(0), np.int32(len(starts)), body, sums)


def _rows(spec: Spec, plan: Layout, saved: Saved, cotangents, where, span, arrays, first_row, sums: Sums) -> Sums:
    """One block of queries, against all the keys that it may see."""
    b, g, i, count = where
    q, _, _, terms, out, m, l = saved
    acc = accumulation(q.dtype)

    def cut(x: jax.Array) -> jax.Array:
        shape = (plan.nb, plan.ng, spec.r, count, *x.shape[4:])
        return take(x, (b, g, 0, i, 0)[: x.ndim], shape).astype(acc)

    queries, douts, m, l = cut(q), cut(cotangents[0]), cut(m), cut(l)
    # Whatever stands in a dead query, or in what comes back for it, has no effect: 0 * NaN would.
    unused = l == 0
    if not isinstance(first_row, int) and spec.T % plan.rows:  # rows that the block before has done
        unused = unused | (i + jnp.arange(count, dtype=jnp.int32) < first_row)
    share = 1 / jnp.where(l == 0, 1, l)
    queries, douts = (jnp.where(unused[..., None], 0, x) for x in (queries, douts * share[..., None]))
    delta = jnp.where(unused, 0, (douts * cut(out)).sum(-1) - cut(cotangents[1]) * share)
    if "sinks" in terms:
        sink = take(terms["sinks"], (g, 0), (plan.ng, spec.r)).astype(acc)
        dsink = -jnp.where(unused, 0, jnp.exp(sink[..., None] - m) * delta).sum((0, 3))
        sums = sums | {"sinks": add(sums["sinks"], dsink, (g, 0))}
    flat = (plan.nb, plan.ng, spec.r * count)
    queries, douts = queries.reshape(*flat, spec.D), douts.reshape(*flat, spec.Dv)

    def step(j: jax.Array | int, width: int, first, masked: bool, sums: Sums) -> Sums:
        block = Block(b, g, i, j, plan.nb, plan.ng, count, width, keys_first=True)
        return _pair(spec, terms, block, (queries, douts, m, delta), arrays, first, masked, sums)

    own = {"rows": jnp.zeros((*flat, spec.D), acc)}
    sums = visit(spec, plan, terms, where, span, step, sums | own)
    dq = sums.pop("rows").reshape(plan.nb, plan.ng, spec.r, count, spec.D) * spec.scale
    return sums | {"q": add(sums["q"], dq, (0, 0, 0, i, 0))}


def _pair(spec: Spec, terms: Terms, block: Block, rows, arrays, first, masked: bool, sums: Sums) -> Sums:
    """Add what one block of scores gives to the sums."""
    queries, douts, m, delta = rows
    shape = (block.nb, block.ng, block.width, spec.r, block.rows)
    k, v = keys_of(spec, terms, block, masked, arrays, queries.dtype)
    plain = product(spec, "bgkd,bgqd->bgkq", k, queries).reshape(shape)
    s, bent = scores(spec, terms, block, plain, first, masked)
    p = jnp.exp(s - m[:, :, None])
    dp = product(spec, "bgkd,bgqd->bgkq", v, douts).reshape(shape)
    ds = p * (dropped(spec, terms, block, dp) - delta[:, :, None])
    p = dropped(spec, terms, block, p)
    new = {"v": add(sums["v"], product(spec, "bgkq,bgqd->bgkd", _flat(p), douts), (0, 0, block.j, 0))}
    if "bias" in terms:
        new["bias"] = add_bias(sums["bias"], jnp.moveaxis(ds, 2, -1), block)
    if bent is not None:
        ds = ds * (1 - bent * bent)
    ds = _flat(ds)
    dk = product(spec, "bgkq,bgqd->bgkd", ds, queries) * spec.scale
    new["k"] = add(sums["k"], dk, (0, 0, block.j, 0))
    new["rows"] = sums["rows"] + product(spec, "bgkq,bgkd->bgqd", ds, k)
    return sums | new


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:3], -1)


def add(total: jax.Array, part: jax.Array, starts: tuple) -> jax.Array:
    """total[starts:] += part, in place where XLA may."""
    if total.shape == part.shape:
        return total + part
    starts = indices(starts)
    return lax.dynamic_update_slice(total, lax.dynamic_slice(total, starts, part.shape) + part, starts)


def add_bias(total: jax.Array, ds: jax.Array, block: Block) -> jax.Array:
    """A bias of size 1 along an axis collects the sum over that axis."""
    ds = sum_to(ds, total.shape)
    starts = (block.b, block.g, 0, block.i, block.j)
    return add(total, ds, tuple(0 if total.shape[n] == 1 else s for n, s in enumerate(starts)))


def sum_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The sum of x over the axes that have size 1 in shape."""
    return x.sum(axis=tuple(n for n in range(x.ndim) if shape[n] == 1), keepdims=True)
