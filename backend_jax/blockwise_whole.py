"""The blockwise kernel where scores are few: whole rows, whose weights are kept for the backward pass.

    P_ij = exp(s_ij - lse_i),  delta_i = dO_i . O_i - dlse_i,  dS_ij = P_ij (f_ij dO_i . v_j - delta_i)

With P at hand nothing is masked, multiplied or exponentiated twice, which is what a short row pays for. Query heads
that share keys are merged with the queries before the first product: XLA on CPUs puts scale, bias, maximum and
exponential into that product's loop, and all of dS into one, as long as no reshape or selection stands in between.
f is dropout's factor; a soft cap multiplies dS by 1 - tanh^2, as in the backward pass of many blocks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .blocks import Spec, Terms, every_key_is_seen, every_query_sees
from .blockwise_gradients import refuse_twice, sum_to, term_cotangents
from .blockwise_scores import accumulation, product, thinned
from .visibility import Block, all_of, allowed, kept, living

# Weights, tanh of the soft cap, dropout's choice, each (B, G, r T, S); which queries see no key, their last axis 1;
# which keys some query sees, (B, G, S) with axes of size 1.
Kept = tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None, jax.Array | None]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def whole(spec: Spec, q: jax.Array, k: jax.Array, v: jax.Array, terms: Terms) -> tuple[jax.Array, jax.Array]:
    """Shapes and terms as in `blockwise`; no axis but Dv is empty."""
    return _forward(spec, q, k, v, terms)[0]


def _forward(
    spec: Spec, q: jax.Array, k: jax.Array, v: jax.Array, terms: Terms
) -> tuple[tuple[jax.Array, jax.Array], Kept]:
    acc, block = accumulation(q.dtype), _everything(spec)
    alive = None if every_key_is_seen(spec, terms) else living(spec, terms, block)
    keys, values = _seen(alive, k, acc), _seen(alive, v, acc)
    s, bent = product(spec, "bgqd,bgkd->bgqk", _lines(spec, q, acc), keys) * spec.scale, None
    if spec.softcap is not None:
        bent = jnp.tanh(s / spec.softcap)
        s = bent * spec.softcap
    if "bias" in terms:
        s = s + _merged(spec, terms["bias"].astype(acc))
    conditions = allowed(spec, terms, block, None)
    dead = None
    if conditions:
        visible = _merged(spec, all_of(conditions))
        # Finite, so that a row without keys needs no selection between its maximum and its exponentials.
        s = jnp.where(visible, s, jnp.finfo(acc).min)
    m = s.max(-1, keepdims=True)
    if conditions and not every_query_sees(spec, terms):
        dead = m == jnp.finfo(acc).min
    sink = _per_line(spec, terms["sinks"].astype(acc)) if "sinks" in terms else None
    if sink is not None:
        m = jnp.maximum(m, sink)
    p = jnp.exp(s - m)
    l = p.sum(-1, keepdims=True)
    if sink is not None:
        l = l + jnp.exp(sink - m)
    lse, share = m + jnp.log(l), 1 / l
    if dead is not None:
        lse, share = jnp.where(dead, -jnp.inf if sink is None else sink, lse), jnp.where(dead, 0, share)
    p = p * share
    choice = kept(spec, terms, block).reshape(s.shape) if spec.dropout > 0.0 else None
    out = product(spec, "bgqk,bgkd->bgqd", thinned(spec, choice, p), values)
    shape = (spec.B, spec.G, spec.r, spec.T)
    return (out.reshape(*shape, spec.Dv).astype(q.dtype), lse.reshape(shape)), (p, bent, choice, dead, alive)


def _everything(spec: Spec) -> Block:
    return Block(0, 0, 0, 0, spec.B, spec.G, spec.T, spec.S)


def _seen(alive: jax.Array | None, x: jax.Array, acc: jnp.dtype) -> jax.Array:
    """Keys or values, zero where no query may attend: 0 * NaN is NaN."""
    return x.astype(acc) if alive is None else jnp.where(alive[..., None], x.astype(acc), 0)


def _lines(spec: Spec, x: jax.Array, acc: jnp.dtype) -> jax.Array:
    """(B, G, r, T) or (B, G, r, T, n) -> (B, G, r T, 1 or n)."""
    return x.astype(acc).reshape(spec.B, spec.G, spec.r * spec.T, x.shape[4] if x.ndim == 5 else 1)


def _merged(spec: Spec, x: jax.Array) -> jax.Array:
    """(B, G, r, T, S) -> (B, G, r T, S), each axis its size or 1."""
    if x.shape[2] != 1 or (spec.r > 1 and x.shape[3] != 1):
        x = jnp.broadcast_to(x, (*x.shape[:2], spec.r, spec.T, x.shape[4]))
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], x.shape[4])


def _per_line(spec: Spec, sinks: jax.Array) -> jax.Array:
    """(G, r) -> (1, G, r T, 1)."""
    return jnp.repeat(sinks, spec.T, axis=1)[None, :, :, None]


def _save(spec: Spec, q: jax.Array, k: jax.Array, v: jax.Array, terms: Terms):
    (out, lse), rest = _forward(spec, q, k, v, terms)
    return (out, lse), (q, k, v, terms, out, lse, rest)


def _gradients(spec: Spec, saved, cotangents):
    return _backward(spec, saved, cotangents)


whole.defvjp(_save, _gradients)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _backward(spec: Spec, saved, cotangents: tuple[jax.Array, jax.Array]):
    """Cotangents of (q, k, v, terms)."""
    q, k, v, terms, out, lse, (p, bent, choice, dead, alive) = saved
    acc = accumulation(q.dtype)
    keys, values = _seen(alive, k, acc), _seen(alive, v, acc)
    queries, douts, dlse = (_lines(spec, x, acc) for x in (q, *cotangents))
    if dead is not None:
        # Whatever stands in a dead query, or in what comes back for it, has no effect: 0 * NaN would.
        queries, douts = (jnp.where(dead, 0, x) for x in (queries, douts))
        dlse = dlse if "sinks" in terms else jnp.where(dead, 0, dlse)
        bent = bent if bent is None else jnp.where(dead, 0, bent)
    delta = (douts * _lines(spec, out, acc)).sum(-1, keepdims=True) - dlse
    found: dict[str, Any] = {}
    if "sinks" in terms:
        lse = _lines(spec, jnp.where(lse == -jnp.inf, jnp.inf, lse), acc)  # no key and a sink of -inf: a share of 0
        share = jnp.exp(_per_line(spec, terms["sinks"].astype(acc)) - lse)
        found["sinks"] = -(share * delta).reshape(spec.B, spec.G, spec.r, spec.T).sum((0, 3))
    ds = p * (thinned(spec, choice, product(spec, "bgqd,bgkd->bgqk", douts, values)) - delta)
    if "bias" in terms:
        found["bias"] = sum_to(ds.reshape(spec.B, spec.G, spec.r, spec.T, spec.S), terms["bias"].shape)
    ds = ds * spec.scale
    if bent is not None:
        ds = ds * (1 - bent * bent)
    dv = product(spec, "bgqk,bgqd->bgkd", thinned(spec, choice, p), douts)
    dk = product(spec, "bgqk,bgqd->bgkd", ds, queries)
    dq = product(spec, "bgqk,bgkd->bgqd", ds, keys).reshape(q.shape)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), term_cotangents(terms, found)


_backward.defvjp(refuse_twice, lambda spec, saved, cotangents: cotangents)
