"""The formula as it stands: every score at once, differentiable any number of times."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from .blocks import Spec, Terms
from .blockwise_scores import accumulation, dropped, product
from .visibility import Block, all_of, allowed, living


def dense(
    spec: Spec, q: jax.Array, k: jax.Array, v: jax.Array | None, terms: Terms
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(out, lse, weights); memory B * H * T * S. Shapes and terms as in `blockwise`; out is the weights without v.

    out has q's dtype; lse and weights have the accumulation dtype.

        s = scale * q.k;  s = softcap * tanh(s / softcap);  s += bias
        w = exp(s - m) / (sum exp(s - m) + exp(sink - m))

    Keys that no query may attend to, and queries that may attend to no key, are taken out before the products: masked
    scores are replaced, never multiplied away.
    """
    dtype, acc = q.dtype, accumulation(q.dtype)
    block = Block(0, 0, 0, 0, spec.B, spec.G, spec.T, spec.S)
    conditions = allowed(spec, terms, block, None)
    q, k = q.astype(acc), k.astype(acc)
    if conditions:
        alive = living(spec, terms, block)
        visible = all_of(conditions)
        q = jnp.where(visible.any(-1, keepdims=True), q, 0)
        if alive is not None:
            k = jnp.where(alive[..., None], k, 0)
            v = v if v is None else jnp.where(alive[..., None], v, 0)
    flat = q.reshape(spec.B, spec.G, spec.r * spec.T, spec.D)
    s = product(spec, "bgqd,bgkd->bgqk", flat, k).reshape(spec.B, spec.G, spec.r, spec.T, spec.S) * spec.scale
    if spec.softcap is not None:
        s = spec.softcap * jnp.tanh(s / spec.softcap)
    if "bias" in terms:
        s = s + terms["bias"].astype(acc)
    if conditions:
        s = jnp.where(visible, s, -jnp.inf)
    weights, lse = _softmax(s, terms["sinks"].astype(acc)[:, :, None, None] if "sinks" in terms else None)
    if v is None:
        return weights, lse, weights
    used = dropped(spec, terms, block, weights).reshape(*flat.shape[:3], spec.S)
    out = product(spec, "bgqk,bgkd->bgqd", used, v.astype(acc))
    return out.reshape(*q.shape[:4], spec.Dv).astype(dtype), lse, weights


def _softmax(s: jax.Array, sink: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Weights and log-sum-exp over the last axis; a row of -inf alone has weights 0 and lse -inf, gradients 0."""
    m = lax.stop_gradient(s.max(-1, keepdims=True, initial=-jnp.inf))
    if sink is not None:
        m = jnp.maximum(m, lax.stop_gradient(sink))
    m = jnp.where(m == -jnp.inf, 0, m)
    e = jnp.exp(s - m)
    total = e.sum(-1, keepdims=True)
    if sink is not None:
        total = total + jnp.exp(sink - m)
    # The selection stands before the division and the logarithm, whose derivatives at 0 would be NaN.
    dead = total == 0
    total = jnp.where(dead, 1, total)
    return e / total, jnp.where(dead, -jnp.inf, m + jnp.log(total))[..., 0]
