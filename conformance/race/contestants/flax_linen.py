"""`flax.linen`: its Embed, MultiHeadDotProductAttention, LayerNorm and Dense."""

from __future__ import annotations

from typing import Any

from ..task import Task
from .base import Contestant, Running


def build(task: Task) -> Running:
    import jax
    from flax import linen

    from ._jax import compute_dtype, heads_apart, running

    config, dtype = task.model, compute_dtype(task)

    class Block(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
            # use_fast_variance would compute E[x^2] - E[x]^2.
            y = linen.LayerNorm(config.norm_eps, dtype, use_fast_variance=False, name="norm1")(x)
            x = x + linen.MultiHeadDotProductAttention(config.heads, dtype, name="attention")(y, mask=mask)
            y = linen.LayerNorm(config.norm_eps, dtype, use_fast_variance=False, name="norm2")(x)
            y = linen.Dense(config.hidden_size, dtype=dtype, name="up")(y)
            return x + linen.Dense(config.width, dtype=dtype, name="down")(linen.gelu(y, approximate=False))

    class Decoder(linen.Module):
        @linen.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = linen.Embed(config.vocab, config.width, dtype=dtype, name="embedding")(tokens)
            x = x + self.param("positions", linen.initializers.zeros, (config.max_length, config.width))[: x.shape[1]]
            mask = linen.make_causal_mask(tokens)
            for i in range(config.layers):
                x = Block(name=f"block{i}")(x.astype(dtype), mask)
            x = linen.LayerNorm(config.norm_eps, dtype, use_fast_variance=False, name="norm")(x)
            return linen.Dense(config.vocab, use_bias=False, dtype=dtype, name="head")(x)

    given = task.params()

    def norm(name: str) -> dict[str, Any]:
        return {"scale": given[f"{name}.weight"], "bias": given[f"{name}.bias"]}

    def dense(name: str) -> dict[str, Any]:
        return {"kernel": given[f"{name}.weight"], "bias": given[f"{name}.bias"]}

    params: dict[str, Any] = {"embedding": {"embedding": given["embedding.weight"]},
                              "positions": given["positions.weight"], "norm": norm("norm"),
                              "head": {"kernel": given["head.weight"]}}  # fmt: skip
    for i in range(config.layers):
        at = f"blocks.{i}."
        params[f"block{i}"] = {
            "norm1": norm(f"{at}norm1"), "norm2": norm(f"{at}norm2"),
            "attention": heads_apart(given, f"{at}attention.", task),
            "up": dense(f"{at}ffn.up"), "down": dense(f"{at}ffn.down"),
        }  # fmt: skip
    model = Decoder()

    def logits(params: Any, tokens: jax.Array) -> Any:
        return model.apply(params, tokens)

    return running({"params": params}, logits, task)


CONTESTANTS = [
    Contestant("flax-linen", build, ("jax", "flax", "optax"), "flax.linen, optax, jit", "jax", True,
               offers=frozenset({"bfloat16"})),
]  # fmt: skip
