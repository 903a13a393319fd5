"""Keys and values of earlier positions, and generation with them. Rules: core_numpy.cache."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from core_numpy.contract.checks.common import require_x64
from core_numpy.contract.checks.training import check_cache, check_generate
from core_numpy.contract.config import BlockConfig, ModelConfig

from .arrays import values
from .modules import find_device
from .random import categorical, fold_in

if TYPE_CHECKING:
    from .model import Transformer


class KVCache:
    """Room for `capacity` positions of keys (batch, G, capacity, D) and values (batch, G, capacity, Dv) per layer.

    The call that takes it replaces its arrays and counts in `length`. Give it to calls that are not traced: inside
    `jax.jit` or `jax.grad` the new arrays would not outlive the trace. `generate` compiles a whole loop instead.
    """

    def __init__(
        self,
        config: BlockConfig,
        batch: int,
        capacity: int | None = None,
        *,
        dtype: str = "float32",
        device: Any = None,
    ) -> None:
        self.capacity = check_cache(config, batch, capacity, dtype)
        require_x64("dtype", dtype, jax.config.jax_enable_x64)  # type: ignore[attr-defined]
        self.config, self.batch, self.dtype, self.length = config, batch, dtype, 0
        layers = config.layers if isinstance(config, ModelConfig) else 1
        shape, device = (batch, config.groups, self.capacity), find_device(device)
        self.keys = [jnp.zeros((*shape, config.key_size), dtype, device=device) for _ in range(layers)]
        self.values = [jnp.zeros((*shape, config.value_size), dtype, device=device) for _ in range(layers)]


@dataclass
class LayerCache:
    """What one layer reads and replaces during a call. `length` may be traced."""

    keys: jax.Array
    values: jax.Array
    length: int | jax.Array

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    def extend(self, k: jax.Array, v: jax.Array, kv_lengths: Any, mask: Any, bias: Any) -> tuple[Any, ...]:
        """Store k (B, G, T, D) and v (B, G, T, Dv); gives keys, values, q_offset, kv_lengths, mask and bias.

        All of the room is handed to attention, behind `kv_lengths`: shapes then stay the same from call to call, and
        nothing is compiled again.
        """
        B, _, T, _ = k.shape
        start = tuple(jnp.asarray(index, jnp.int32) for index in (0, 0, self.length, 0))
        self.keys = jax.lax.dynamic_update_slice(self.keys, k, start)
        self.values = jax.lax.dynamic_update_slice(self.values, v, start)
        q_offset = jnp.full(B, self.length, jnp.int32)
        kv_lengths = q_offset + T if kv_lengths is None else jnp.minimum(kv_lengths, q_offset + T)
        return self.keys, self.values, q_offset, kv_lengths, self._widen(mask), self._widen(bias)

    def _widen(self, x: Any) -> Any:
        """A mask or bias over the keys so far, over all of the room: what is added lies behind `kv_lengths`."""
        if x is None or x.shape[-1] in (1, self.capacity):
            return x
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, self.capacity - x.shape[-1])])


def open_cache(cache: KVCache | None) -> list[LayerCache] | None:
    """One `LayerCache` for each layer, or None."""
    if cache is None:
        return None
    return [LayerCache(k, v, cache.length) for k, v in zip(cache.keys, cache.values, strict=True)]


def close_cache(cache: KVCache | None, stores: list[LayerCache] | None, T: int) -> None:
    """Put back what the layers replaced and count T positions as written."""
    if cache is None or stores is None:
        return
    cache.keys, cache.values = [store.keys for store in stores], [store.values for store in stores]
    cache.length += T


def generate(
    model: Transformer,
    tokens: jax.Array,
    *,
    max_new: int,
    temperature: float = 0,
    top_k: int | None = None,
    top_p: float | None = None,
    key: jax.Array | None = None,
    lengths: jax.Array | None = None,
    context: jax.Array | None = None,
    context_lengths: jax.Array | None = None,
) -> jax.Array:
    """The prompt (B, T) and then `max_new` tokens in each row, (B, T + max_new). Rules: core_numpy.cache.

    Prompt and loop are one compiled program for each shape of the prompt, `max_new`, and `top_k`.
    """
    new = check_generate(
        model.config, tokens, max_new=max_new, temperature=temperature, top_k=top_k, top_p=top_p, key=key,
        lengths=lengths, context=context, context_lengths=context_lengths, dtype=model.dtype, values=values,
    )  # fmt: skip
    tokens = jnp.asarray(tokens)
    B, T = tokens.shape
    if new == 0 or B == 0:
        return jnp.pad(tokens, ((0, 0), (0, new)))
    padding = None if lengths is None else T - jnp.asarray(lengths, jnp.int32)
    sampling = None if temperature == 0 else (jnp.asarray(key), jnp.float32(temperature), top_p)
    arguments = (tokens, padding, context, context_lengths, sampling)
    if _cacheable(model.config, T + new - 1):
        graphdef, state = nnx.split(model)
        chosen = _with_cache(graphdef, state, *arguments, new=new, top_k=top_k)
    else:
        chosen = _without_cache(model, *arguments, new=new, top_k=top_k)
    return jnp.concatenate([tokens, chosen.astype(tokens.dtype)], axis=1)


def _cacheable(config: ModelConfig, length: int) -> bool:
    """Whether cached keys stay right up to this length: not where rotary frequencies change with it."""
    scaling = config.rotary_scaling if config.positions == "rotary" else None
    if scaling is None or scaling.kind not in ("dynamic", "longrope"):
        return True
    return length <= (scaling.original_max_length or 0)


@partial(jax.jit, static_argnames=("graphdef", "new", "top_k"))
def _with_cache(graphdef, state, tokens, padding, context, context_lengths, sampling, *, new, top_k):
    """The new tokens (B, new): the prompt in one pass, then a loop of single positions."""
    model = nnx.merge(graphdef, state)
    config, (B, T) = model.config, tokens.shape
    capacity, dtype = T + new - 1, model.dtype
    memory = None if context is None else model.reader.memory(model.encode(context, context_lengths))

    def advance(caches, row, length):
        stores = [LayerCache(k, v, length) for k, v in caches]
        arguments = _arguments(config, padding, length, row.shape[1], capacity)
        logits = model.reader.run(row, stores=stores, memory=memory, memory_lengths=context_lengths, **arguments)
        return [(store.keys, store.values) for store in stores], logits[:, -1]

    def step(carry, n):
        caches, logits = carry
        token = _choose(logits, sampling, top_k, n)
        # The last token is returned and never read.
        caches, logits = jax.lax.cond(
            n < new - 1, lambda: advance(caches, token[:, None], T + n), lambda: (caches, logits)
        )
        return (caches, logits), token

    shape = (B, config.groups, capacity)
    caches = [
        (jnp.zeros((*shape, config.key_size), dtype), jnp.zeros((*shape, config.value_size), dtype))
        for _ in range(config.layers)
    ]
    carry = advance(caches, _shifted(tokens, padding), jnp.int32(0))
    return jax.lax.scan(step, carry, jnp.arange(new, dtype=jnp.int32))[1].T


def _without_cache(model, tokens, padding, context, context_lengths, sampling, *, new, top_k):
    """The same where every length has its own frequencies: each token is one pass over everything before it."""
    memory = None if context is None else model.encode(context, context_lengths)
    row = _shifted(tokens, padding)
    for n in range(new):
        S = row.shape[1]
        arguments = _arguments(model.config, padding, 0, S, S)
        logits = model.reader.run(row, memory=memory, memory_lengths=context_lengths, **arguments)
        row = jnp.concatenate([row, _choose(logits[:, -1], sampling, top_k, n)[:, None].astype(row.dtype)], axis=1)
    return row[:, tokens.shape[1] :]


def _shifted(tokens: jax.Array, padding: jax.Array | None) -> jax.Array:
    """Rows moved to the right end, so that all of them end in the same column."""
    if padding is None:
        return tokens
    columns = jnp.arange(tokens.shape[1]) - padding[:, None]
    return jnp.take_along_axis(tokens, columns % tokens.shape[1], axis=1)


def _arguments(config: ModelConfig, padding: jax.Array | None, length: Any, T: int, S: int) -> dict[str, Any]:
    """What hides the padding in front of shifted rows and counts positions from each row's first token."""
    if padding is None:
        return {}
    arguments = {"mask": (jnp.arange(S) >= padding[:, None])[:, None, None, :]}
    if config.positions in ("learned", "sinusoidal", "rotary"):
        arguments["positions"] = jnp.maximum(length + jnp.arange(T) - padding[:, None], 0)
    return arguments


def _choose(logits: jax.Array, sampling: tuple | None, top_k: int | None, n: Any) -> jax.Array:
    """One token (B,) from logits (B, V); at temperature 0 the likeliest, the first of equals."""
    if sampling is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    key, temperature, top_p = sampling
    z = logits.astype(jnp.float32) / temperature
    if top_k is not None and top_k < z.shape[-1]:
        z = jnp.where(z < jax.lax.top_k(z, top_k)[0][:, -1:], -jnp.inf, z)
    if top_p is not None:
        order = jnp.argsort(-z, axis=-1, stable=True)
        p = jnp.take_along_axis(jax.nn.softmax(z, axis=-1), order, axis=-1)
        # An entry stays while those before it have not reached top_p.
        leaves = jnp.cumsum(p, axis=-1) - p >= top_p
        back = jnp.argsort(order, axis=-1)
        z = jnp.where(jnp.take_along_axis(leaves, back, axis=-1), -jnp.inf, z)
    return categorical(fold_in(key, n), z)
