"""Equinox: its MultiheadAttention, LayerNorm, Linear and Embedding, mapped over the batch with `jax.vmap`."""

from __future__ import annotations

import operator
from typing import Any

from ..task import Task
from .base import Contestant, Running


def build(task: Task) -> Running:
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    import numpy as np

    from ._jax import running

    config, given = task.model, task.params()

    norm, linear, attention = _makers(task)

    class Block(eqx.Module):
        norm1: Any
        attention: Any
        norm2: Any
        up: Any
        down: Any

        def __init__(self, at: str) -> None:
            self.norm1, self.norm2 = norm(f"{at}norm1"), norm(f"{at}norm2")
            self.attention = attention(f"{at}attention")
            self.up, self.down = linear(f"{at}ffn.up"), linear(f"{at}ffn.down")

        def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
            y = jax.vmap(self.norm1)(x)
            x = x + self.attention(y, y, y, mask)
            y = jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.norm2)(x)), approximate=False)
            return x + jax.vmap(self.down)(y)

    class Decoder(eqx.Module):
        embedding: Any
        positions: Any
        blocks: list[Any]
        norm: Any
        head: Any

        def __init__(self) -> None:
            self.embedding = eqx.nn.Embedding(weight=jnp.asarray(given["embedding.weight"]))
            self.positions = eqx.nn.Embedding(weight=jnp.asarray(given["positions.weight"]))
            self.blocks = [Block(f"blocks.{i}.") for i in range(config.layers)]
            self.norm, self.head = norm("norm"), linear("head")

        def __call__(self, tokens: jax.Array) -> jax.Array:
            T = len(tokens)
            x = jax.vmap(self.embedding)(tokens) + self.positions.weight[:T]
            mask = jnp.asarray(np.tri(T, dtype=bool))
            for block in self.blocks:
                x = block(x, mask)
            return jax.vmap(self.head)(jax.vmap(self.norm)(x))

    params, static = eqx.partition(Decoder(), eqx.is_inexact_array)
    return running(params, lambda params, tokens: jax.vmap(eqx.combine(params, static))(tokens), task)


def _makers(task: Task) -> tuple[Any, Any, Any]:
    """name -> layer norm, linear layer, attention with the task's weights of that name."""
    import equinox as eqx
    import jax

    config, given, some = task.model, task.params(), jax.random.key(0)

    def norm(name: str) -> Any:
        made = eqx.nn.LayerNorm(config.width, eps=config.norm_eps)
        return _filled(made, given[f"{name}.weight"], given[f"{name}.bias"])

    def linear(name: str) -> Any:
        weight, bias = given[f"{name}.weight"].T, given.get(f"{name}.bias")
        made = eqx.nn.Linear(weight.shape[1], weight.shape[0], use_bias=bias is not None, key=some)
        return _filled(made, weight, bias)

    def attention(name: str) -> Any:
        made = eqx.nn.MultiheadAttention(
            config.heads, config.width, use_query_bias=True, use_key_bias=True, use_value_bias=True,
            use_output_bias=True, key=some,
        )  # fmt: skip
        for theirs in ("query", "key", "value", "output"):
            own = linear(f"{name}.{theirs}")
            made = eqx.tree_at(operator.attrgetter(f"{theirs}_proj"), made, own)
        return made

    return norm, linear, attention


def _filled(module: Any, weight: Any, bias: Any) -> Any:
    """The module with these in the place of its own."""
    import equinox as eqx
    import jax.numpy as jnp

    module = eqx.tree_at(lambda m: m.weight, module, jnp.asarray(weight))
    return module if bias is None else eqx.tree_at(lambda m: m.bias, module, jnp.asarray(bias))


CONTESTANTS = [Contestant("equinox", build, ("jax", "equinox", "optax"), "Equinox, vmap, optax, jit", "jax", True)]
