"""Attention and feed-forward with their parameters, and the block. Rules: core_numpy.block.

All are `flax.nnx.Module`s: they split and merge, and train in anybody's loop with optax or `nnx.Optimizer`. Their
parameters are `nnx.Param`s whose paths are the canonical names, linear weights (in, out). `__call__` checks and calls
`run`, which is what the model and its compiled loops call.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from core_numpy.contract import parameters as contract
from core_numpy.contract.checks import model as checks
from core_numpy.contract.config import BlockConfig, ModelConfig

from . import encodings, place, random
from .arrays import require_arrays, values
from .attention import attention, attention_weights
from .cache import close_cache, open_cache
from .frequencies import scaled_frequencies
from .modules import Initial, Linear, Norm, activate, drop, heads_first, matmul

Rotary = tuple[jax.Array, jax.Array]

# Below this many rows a product reads the weights more than it computes, and joining three weights would double that.
FUSED_ROWS = 128


class MultiHeadAttention(nnx.Module):
    """Projections, optional q/k norm and rotation, attention, output projection. Rules: core_numpy.block.

    x (B, T, W) -> (B, T, W); with context (B, S, W) the keys and values are the context's.
    """

    parameter_table = staticmethod(contract.attention_parameters)

    def __init__(self, config: BlockConfig, *, seed: int | Initial = 0, dtype: str = "float32", device: Any = None):
        initial = Initial.of(seed, config, self.parameter_table, dtype, device)
        self.config = config
        self.causal = config.is_causal if isinstance(config, ModelConfig) else bool(config.causal)
        self.rotary_layout = config.rotary_layout if isinstance(config, ModelConfig) else "half"
        self.query = Linear(initial.at("query"))
        self.key = Linear(initial.at("key"))
        self.value = Linear(initial.at("value"))
        self.output = Linear(initial.at("output"))
        self.query_norm = Norm(config, initial.at("query_norm"), kind="rms") if config.qk_norm else None
        self.key_norm = Norm(config, initial.at("key_norm"), kind="rms") if config.qk_norm else None
        self.sinks = initial.optional("sinks")

    def __call__(
        self, x: jax.Array, *, mask=None, bias=None, kv_lengths=None, segments=None, positions=None, rotary=None,
        cache=None, dropout_key=None, context=None, context_lengths=None,
    ) -> jax.Array:  # fmt: skip
        require_arrays(
            x=x, mask=mask, bias=bias, kv_lengths=kv_lengths, segments=segments, positions=positions,
            dropout_key=dropout_key, context=context, context_lengths=context_lengths,
        )  # fmt: skip
        plan = checks.check_attention_call(
            self.config, x, mask=mask, bias=bias, kv_lengths=kv_lengths, segments=segments, positions=positions,
            rotary=rotary, cache=cache, dropout_key=dropout_key, context=context, context_lengths=context_lengths,
            dtype=self.dtype, values=values,
        )  # fmt: skip
        if context is not None:
            return self.run_cross(x, self.keys_and_values(context), context_lengths, dropout_key=dropout_key)
        rotary = own_rotary(self.config, rotary, positions, plan)
        stores = open_cache(cache)
        y = self.run(
            x, mask=mask, bias=bias, kv_lengths=kv_lengths, segments=segments, rotary=rotary,
            store=stores[0] if stores else None, dropout_key=dropout_key,
        )  # fmt: skip
        close_cache(cache, stores, plan.T)
        return y

    @property
    def dtype(self) -> str:
        """The name of the parameters' dtype, which inputs must have."""
        return self.output.weight[...].dtype.name

    def run(
        self, x: jax.Array, *, mask=None, bias=None, kv_lengths=None, segments=None, rotary=None, store=None,
        dropout_key=None, maps=None,
    ) -> jax.Array:  # fmt: skip
        """Self-attention, unchecked. `store` keeps the keys and values; `maps` is a list that gets the weights."""
        q, k, v = self._project(x)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if rotary is not None:
            q, k = (encodings.apply_rotary(y, *rotary, layout=self.rotary_layout) for y in (q, k))
        arguments = {
            "mask": mask, "bias": bias, "causal": self.causal, "window": self.config.window, "q_offset": None,
            "kv_lengths": kv_lengths, "q_segments": segments, "kv_segments": segments,
        }  # fmt: skip
        sinks = {"sinks": None if self.sinks is None else self.sinks[...]}
        if maps is not None:
            maps.append(self._weights(q, k, store, arguments, sinks))
        if store is not None:
            k, v, arguments = store.extend(k, v, arguments)
        return self._attend(q, k, v, dropout_key, arguments | sinks)

    def run_cross(self, x: jax.Array, memory: Rotary, lengths, *, dropout_key=None) -> jax.Array:
        """Attention to the keys and values of a context, unchecked."""
        q = heads_first(self.query(x), self.config.heads)
        if self.query_norm is not None:
            q = self.query_norm(q)
        return self._attend(q, *memory, dropout_key, {"kv_lengths": lengths})

    def keys_and_values(self, context: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(B, S, W) -> (B, G, S, D), (B, G, S, Dv): what decoding computes once per source."""
        k, v = (heads_first(project(context), self.config.groups) for project in (self.key, self.value))
        return (k if self.key_norm is None else self.key_norm(k)), v

    def _weights(self, q, k, store, arguments, sinks) -> jax.Array:
        """The weights over all positions so far, (B, H, T, S)."""
        first = 0
        if store is not None:
            k, arguments, first = store.preview(k, arguments)
        common = {"scale": self.config.scale, "softcap": self.config.softcap, **sinks}
        return jnp.pad(attention_weights(q, k, **arguments, **common), ((0, 0), (0, 0), (0, 0), (first, 0)))

    def _attend(self, q, k, v, dropout_key, arguments) -> jax.Array:
        config = self.config
        arguments = arguments | {"scale": config.scale, "softcap": config.softcap}
        rate = 0.0 if dropout_key is None else config.dropout
        arguments |= {"dropout_rate": rate, "dropout_key": dropout_key if rate else None}
        if "causal" in arguments and place.ringed(q.shape[0], q.shape[2]):
            from .ring import ring_attention  # only where positions are spread

            out = ring_attention(q, k, v, arguments)
        else:
            out = attention(q, k, v, **arguments)
        B, H, T, Dv = out.shape
        return self.output(out.swapaxes(1, 2).reshape(B, T, H * Dv))

    def _project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries (B, H, T, D), keys (B, G, T, D), values (B, G, T, Dv)."""
        H, G, config = self.config.heads, self.config.groups, self.config
        parts: Any = (self.query, self.key, self.value)
        # Over devices, too, each product stays with the heads that are there.
        alone = place.mesh() is not None or config.value_size != config.key_size
        if alone or x.shape[0] * x.shape[1] < FUSED_ROWS:
            q, k, v = (place.by_head(heads_first(part(x), heads)) for part, heads in zip(parts, (H, G, G), strict=True))
            return q, k, v
        # One product and one transpose for all three: fewer and larger loops on every device.
        y = matmul(x, jnp.concatenate([part.weight[...] for part in parts], axis=1))
        if self.query.bias is not None:
            y = y + jnp.concatenate([part.bias[...] for part in parts])
        y = heads_first(y, H + 2 * G)
        return y[:, :H], y[:, H : H + G], y[:, H + G :]


class FeedForward(nnx.Module):
    """`down(act(up(x)))`, or `down(act(gate(x)) * up(x))` where the activation is gated. Rules: core_numpy.block.

    x (B, T, W) -> (B, T, W).
    """

    parameter_table = staticmethod(contract.feed_forward_parameters)

    def __init__(self, config: BlockConfig, *, seed: int | Initial = 0, dtype: str = "float32", device: Any = None):
        initial = Initial.of(seed, config, self.parameter_table, dtype, device)
        self.config = config
        self.up = Linear(initial.at("up"))
        self.gate = Linear(initial.at("gate")) if config.gated else None
        self.down = Linear(initial.at("down"))

    def __call__(self, x: jax.Array, *, dropout_key: jax.Array | None = None) -> jax.Array:
        require_arrays(x=x, dropout_key=dropout_key)
        checks.check_feed_forward_call(self.config, x, dropout_key=dropout_key, dtype=self.dtype)
        return drop(self.run(x), self.config.dropout, dropout_key)

    @property
    def dtype(self) -> str:
        """The name of the parameters' dtype, which inputs must have."""
        return self.down.weight[...].dtype.name

    def run(self, x: jax.Array) -> jax.Array:
        """Without check and dropout."""
        up = self.up(x)
        if self.gate is None:
            return self.down(activate(self.config.activation, up))
        return self.down(activate(self.config.activation, self.gate(x)) * up)


class Block(nnx.Module):
    """Attention, cross-attention where asked, feed-forward, and their norms. Rules: core_numpy.block.

    x (B, T, W) -> (B, T, W).
    """

    parameter_table = staticmethod(contract.block_parameters)

    def __init__(self, config: BlockConfig, *, seed: int | Initial = 0, dtype: str = "float32", device: Any = None):
        initial = Initial.of(seed, config, self.parameter_table, dtype, device)
        self.config = config
        self.attention = MultiHeadAttention(config, seed=initial.at("attention"))
        self.cross: Any = MultiHeadAttention(config, seed=initial.at("cross")) if config.cross_attention else None
        self.ffn = FeedForward(config, seed=initial.at("ffn"))
        self.norm1 = Norm(config, initial.at("norm1"))
        self.norm2: Any = None if config.shared_norm else Norm(config, initial.at("norm2"))
        self.norm3: Any = Norm(config, initial.at("norm3")) if config.cross_attention else None
        sandwich = config.norm_place == "sandwich"
        self.norm1_post: Any = Norm(config, initial.at("norm1_post")) if sandwich else None
        self.norm2_post: Any = Norm(config, initial.at("norm2_post")) if sandwich else None

    def __call__(
        self, x: jax.Array, *, mask=None, bias=None, kv_lengths=None, segments=None, positions=None, rotary=None,
        cache=None, dropout_key=None, context=None, context_lengths=None,
    ) -> jax.Array:  # fmt: skip
        require_arrays(
            x=x, mask=mask, bias=bias, kv_lengths=kv_lengths, segments=segments, positions=positions,
            dropout_key=dropout_key, context=context, context_lengths=context_lengths,
        )  # fmt: skip
        plan = checks.check_block_call(
            self.config, x, mask=mask, bias=bias, kv_lengths=kv_lengths, segments=segments, positions=positions,
            rotary=rotary, cache=cache, dropout_key=dropout_key, context=context, context_lengths=context_lengths,
            dtype=self.ffn.dtype, cross=self.cross is not None, values=values,
        )  # fmt: skip
        rotary = own_rotary(self.config, rotary, positions, plan)
        stores = open_cache(cache)
        y = self.run(
            x, dropout_key=dropout_key, memory=context, memory_lengths=context_lengths, mask=mask, bias=bias,
            kv_lengths=kv_lengths, segments=segments, rotary=rotary, store=stores[0] if stores else None,
        )  # fmt: skip
        close_cache(cache, stores, plan.T)
        return y

    def run(self, x: jax.Array, *, dropout_key=None, memory=None, memory_lengths=None, **arguments: Any) -> jax.Array:
        """Unchecked; `memory` is the context or its keys and values, `arguments` are those of the self-attention."""
        if memory is not None and not isinstance(memory, tuple):
            memory = self.cross.keys_and_values(memory)
        rate = self.config.dropout
        keys = [None] * 5 if dropout_key is None or rate == 0.0 else list(random.split(dropout_key, 5))

        def attend(y: jax.Array) -> jax.Array:
            return drop(self.attention.run(y, dropout_key=keys[0], **arguments), rate, keys[1])

        def feed(y: jax.Array) -> jax.Array:
            return drop(self.ffn.run(y), rate, keys[2])

        def cross(y: jax.Array) -> jax.Array:
            return drop(self.cross.run_cross(y, memory, memory_lengths, dropout_key=keys[3]), rate, keys[4])

        place = self.config.norm_place
        if place == "parallel":
            y = self.norm1(x)
            return x + attend(y) + feed(y if self.norm2 is None else self.norm2(x))
        if place == "sandwich":
            x = x + self.norm1_post(attend(self.norm1(x)))
            return x + self.norm2_post(feed(self.norm2(x)))
        steps = [(self.norm1, attend), (self.norm3, cross), (self.norm2, feed)]
        for norm, f in steps:
            if norm is not None:
                x = x + f(norm(x)) if place == "pre" else norm(x + f(x))
        return x


def make_rotary(config: ModelConfig, positions: jax.Array, length: int) -> Rotary:
    """The tables of a model's rotary encoding; `length` is the running length that some scalings look at."""
    # In float64 on the host: float32 frequencies would move the angle at position 1000 by 3e-5.
    frequencies, factor = scaled_frequencies(config.rotary_size, config.rotary_base, config.rotary_scaling, length)
    return encodings.rotary_tables(positions, frequencies, attention_factor=factor)


def own_rotary(config: BlockConfig, rotary: Rotary | None, positions: Any, plan: checks.CallPlan) -> Rotary | None:
    """What a part that was made from a rotary ModelConfig and is called alone makes for itself."""
    if rotary is not None or not isinstance(config, ModelConfig) or config.positions != "rotary":
        return rotary
    if positions is None:
        positions = jnp.arange(plan.past, plan.S)
    return make_rotary(config, positions, plan.S)
