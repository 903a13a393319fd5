"""Keys and values of earlier positions, and generation with them. Rules: core_numpy.cache."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from core_numpy.contract.checks.common import require_x64
from core_numpy.contract.checks.training import check_cache, check_generate
from core_numpy.contract.config import BlockConfig, ModelConfig
from core_numpy.contract.ring import cache_slots

from .arrays import find_device, require_arrays, values
from .random import categorical, fold_in

if TYPE_CHECKING:
    from .model import Transformer


Pair = tuple[jax.Array, jax.Array]
Options = dict[str, Any]


@jax.tree_util.register_pytree_node_class
class KVCache:
    """The keys (rotated) and values of earlier calls, per layer (batch, G, slots, D) and (batch, G, slots, Dv).

    The call that takes it replaces its arrays and counts in `length`. It is a pytree: give it to a compiled step and
    take it back, `nnx.jit(lambda model, tokens, cache: (model(tokens, cache=cache), cache))`, and steps of one length
    share one program. While traced its length is not checked, and a mask has `capacity` columns. `generate` compiles
    its whole loop.
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
        self.config, self.batch, self.dtype, self.written = config, batch, dtype, 0
        self._length: Any = 0
        shapes, device = (
            [(batch, config.groups, slots) for slots in cache_slots(config, self.capacity)],
            find_device(device),
        )
        self.keys = [jnp.zeros((*shape, config.key_size), dtype, device=device) for shape in shapes]
        self.values = [jnp.zeros((*shape, config.value_size), dtype, device=device) for shape in shapes]
        self.source: tuple[Any, Any] = (None, None)
        self.memory: list[Pair] | None = None

    @property
    def length(self) -> Any:
        """How many positions were written: an int, or what stands for it while traced."""
        known = isinstance(self._length, np.generic | np.ndarray | jax.Array) and not isinstance(
            self._length, jax.core.Tracer
        )
        return int(self._length) if known else self._length

    @length.setter
    def length(self, value: Any) -> None:
        self._length = value

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        length = np.int32(self._length) if isinstance(self._length, int) else self._length
        return (self.keys, self.values, length, self.source, self.memory), (
            self.config, self.batch, self.capacity, self.dtype,
        )  # fmt: skip

    @classmethod
    def tree_unflatten(cls, fixed: tuple[Any, ...], arrays: tuple[Any, ...]) -> KVCache:
        cache = cls.__new__(cls)
        cache.config, cache.batch, cache.capacity, cache.dtype = fixed
        cache.keys, cache.values, cache._length, cache.source, cache.memory = arrays
        cache.written = 0  # Unknown: what a ring has let go is checked in calls that are not traced.
        return cache


@dataclass
class LayerCache:
    """What one layer reads and replaces during a call. `length` may be traced; `count` says how many of the new
    positions are real, where a bucket's last ones are not.
    """

    keys: jax.Array
    values: jax.Array
    length: int | jax.Array
    capacity: int
    count: int | jax.Array | None = None

    def extend(self, k: jax.Array, v: jax.Array, options: Options) -> tuple[jax.Array, jax.Array, Options]:
        """Store k (B, G, T, D) and v (B, G, T, Dv) after `length`.

        Gives the keys and values that the new queries may see, and for these the `options` of `attention`, which speak
        of all positions so far. Shapes depend on T alone, so nothing is compiled again as `length` grows.
        """
        T, slots, start = k.shape[2], self.keys.shape[2], self.length
        if isinstance(start, int) and start == 0 and T > 1:
            self._store(k, v)
            return k, v, options | {"q_offset": None}
        if T == 1:
            return self._single(k, v, options)
        if slots == self.capacity:
            self._store(k, v)
            return self.keys, self.values, self._whole(options, T) | {"q_offset": self._rows(start)}
        # Positions from slots - 1 before the first query on; those below 0 do not exist.
        first = start - (slots - 1)
        old = (first + jnp.arange(slots - 1)) % slots
        keys, values = (
            jnp.concatenate([store[:, :, old], new], axis=2) for store, new in ((self.keys, k), (self.values, v))
        )
        self._store(k, v)
        return keys, values, _at(options, first + jnp.arange(slots - 1 + T)) | {"q_offset": slots - 1}

    def preview(self, k: jax.Array, options: Options) -> tuple[jax.Array, Options, int]:
        """Keys in the order of their positions, options for them, and the first of these; nothing is stored."""
        slots, start = self.keys.shape[2], self.length
        if not isinstance(start, int):
            raise ValueError("attention_maps takes a cache in calls that are not traced: what it gives grows")
        first = max(0, start - (slots - 1))
        keys = jnp.concatenate([self.keys[:, :, jnp.arange(first, start) % slots], k], axis=2)
        return keys, _at(options, jnp.arange(first, start + k.shape[2])) | {"q_offset": start - first}, first

    def _single(self, k: jax.Array, v: jax.Array, options: Options) -> tuple[jax.Array, jax.Array, Options]:
        """One query sees whatever is stored, in any order: no band is left to say."""
        slots, start = self.keys.shape[2], self.length
        self._store(k, v)
        options = options | {"causal": False, "window": None, "q_offset": None}
        if slots == self.capacity:
            return self.keys, self.values, self._whole(options, 1)
        # Each slot holds the last position that it can.
        places = start - (start - jnp.arange(slots)) % slots
        said = any(options[name] is not None for name in ("mask", "bias", "kv_lengths"))
        filled = jnp.minimum(self._rows(start) + 1, slots)
        return self.keys, self.values, (_at(options, places) if said else options) | {"kv_lengths": filled}

    def _store(self, k: jax.Array, v: jax.Array) -> None:
        """Put the new positions, or the last of them, into their slots."""
        T, slots, start = k.shape[2], self.keys.shape[2], self.length
        if T == 0:
            return
        if T == 1 or slots == self.capacity:
            at = tuple(jnp.asarray(index, jnp.int32) for index in (0, 0, start % slots, 0))
            self.keys = jax.lax.dynamic_update_slice(self.keys, k, at)
            self.values = jax.lax.dynamic_update_slice(self.values, v, at)
            return
        last = start + (T if self.count is None else self.count) - 1
        places = last - (last - jnp.arange(slots)) % slots
        new, rows = (places >= start)[:, None], jnp.clip(places - start, 0, T - 1)
        self.keys = jnp.where(new, k[:, :, rows], self.keys)
        self.values = jnp.where(new, v[:, :, rows], self.values)

    def _rows(self, x: Any) -> jax.Array:
        return jnp.full(self.keys.shape[0], x, jnp.int32)

    def _whole(self, options: Options, T: int) -> Options:
        """The options over all of the room, what is not written behind `kv_lengths`."""
        end, lengths = self._rows(self.length) + T, options["kv_lengths"]
        wide = {name: self._widen(options[name]) for name in ("mask", "bias")}
        return options | wide | {"kv_lengths": end if lengths is None else jnp.minimum(lengths, end)}

    def _widen(self, x: Any) -> Any:
        if x is None or x.shape[-1] in (1, self.capacity):
            return x
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, self.capacity - x.shape[-1])])


def _at(options: Options, places: jax.Array) -> Options:
    """The options over all positions, over those of `places`; what is below 0 is nobody's."""
    mask, bias, lengths = options["mask"], options["bias"], options["kv_lengths"]
    rows = jnp.maximum(places, 0)
    mask, bias = (x if x is None or x.shape[-1] == 1 else x[..., rows] for x in (mask, bias))
    seen = (places >= 0)[None, None, None]
    if lengths is not None:
        seen = seen & (places < jnp.asarray(lengths)[:, None, None, None])
    return options | {"mask": seen if mask is None else mask & seen, "bias": bias, "kv_lengths": None}


def open_cache(cache: KVCache | None) -> list[LayerCache] | None:
    """One `LayerCache` for each layer, or None."""
    if cache is None:
        return None
    return [LayerCache(k, v, cache.length, cache.capacity) for k, v in zip(cache.keys, cache.values, strict=True)]


def close_cache(cache: KVCache | None, stores: list[LayerCache] | None, T: int) -> None:
    """Put back what the layers replaced and count T positions as written."""
    if cache is None or stores is None:
        return
    cache.keys, cache.values = [store.keys for store in stores], [store.values for store in stores]
    cache.length = cache.length + T
    cache.written = cache.length


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

    Two compiled programs, one for the prompt and one for the loop, whose shapes are those of a bucket: lengths of the
    same bucket, any `max_new` and any temperature share them.
    """
    require_arrays(tokens=tokens, key=key, lengths=lengths, context=context, context_lengths=context_lengths)
    new = check_generate(
        model.config, tokens, max_new=max_new, temperature=temperature, top_k=top_k, top_p=top_p, key=key,
        lengths=lengths, context=context, context_lengths=context_lengths, dtype=model.dtype, values=values,
    )  # fmt: skip
    tokens = jnp.asarray(tokens)
    B, T = tokens.shape
    if new == 0 or B == 0:
        return jnp.pad(tokens, ((0, 0), (0, new)))
    padding = None if lengths is None else jnp.asarray(T - np.asarray(lengths, np.int32))
    sampling = None
    if temperature > 0:
        sampling = jnp.asarray(key), np.float32(temperature), None if top_p is None else np.float32(top_p)
    if not _cacheable(model.config, T + new - 1):
        given = (tokens, padding, context, context_lengths, sampling)
        chosen = _without_cache(model, *given, new=new, top_k=top_k)
        return jnp.concatenate([tokens, chosen.astype(tokens.dtype)], axis=1)
    graphdef, state = nnx.split(model)
    width, capacity = _buckets(model.config, T, T + new - 1)
    row = jnp.pad(_shifted(tokens, padding), ((0, 0), (0, width - T)))
    context, context_lengths = _padded_source(context, context_lengths)
    stores, memory, logits = _read(
        graphdef, state, row, np.int32(T), padding, context, context_lengths, capacity=capacity
    )
    chosen = _continue(
        graphdef, state, stores, memory, logits, np.int32(T), np.int32(new), padding, context_lengths, sampling,
        capacity=capacity, top_k=top_k,
    )  # fmt: skip
    return jnp.concatenate([tokens, chosen[:new].T.astype(tokens.dtype)], axis=1)


def _bucket(length: int) -> int:
    """The least of 32, 48, 64, 96, 128, ... (powers of two, and halfway between) that is at least `length`."""
    size = max(32, 1 << (length - 1).bit_length())
    return size * 3 // 4 if size > 32 and length <= size * 3 // 4 else size


def _buckets(config: ModelConfig, prompt: int, total: int) -> tuple[int, int]:
    """The lengths at which a prompt and a cache of `total` positions are compiled."""
    width, capacity = _bucket(prompt), _bucket(total)
    if config.positions == "learned":
        # The table has no more rows.
        width = min(width, config.max_length)
    if not _cacheable(config, max(width, capacity)):
        width, capacity = prompt, total
    return width, max(width, capacity)


def _padded_source(context: Any, lengths: Any) -> tuple[Any, Any]:
    """The source in a bucket of its own, its end in `lengths`."""
    if context is None:
        return None, None
    B, S = context.shape
    lengths = np.full(B, S, np.int32) if lengths is None else lengths
    return jnp.pad(jnp.asarray(context), ((0, 0), (0, _bucket(S) - S))), lengths


def _cacheable(config: ModelConfig, length: int) -> bool:
    """Whether cached keys stay right up to this length: not where rotary frequencies change with it."""
    scaling = config.rotary_scaling if config.positions == "rotary" else None
    if scaling is None or scaling.kind not in ("dynamic", "longrope"):
        return True
    return length <= (scaling.original_max_length or 0)


@partial(jax.jit, static_argnames=("graphdef", "capacity"))
def _read(graphdef, state, row, count, padding, context, context_lengths, *, capacity):
    """The prompt in one pass: the cache's arrays, the source's keys and values, and the logits behind it (B, V)."""
    model = nnx.merge(graphdef, state)
    config, (B, T) = model.config, row.shape
    memory = None if context is None else model.reader.memory(model.encode(context, context_lengths))
    shapes = [(B, config.groups, slots) for slots in cache_slots(config, capacity)]
    stores = [
        LayerCache(
            jnp.zeros((*shape, config.key_size), model.dtype), jnp.zeros((*shape, config.value_size), model.dtype),
            0, capacity, count,
        )
        for shape in shapes
    ]  # fmt: skip
    logits = model.reader.run(
        row, stores=stores, memory=memory, memory_lengths=context_lengths, last=count - 1,
        **_arguments(config, padding, 0, T, T),
    )  # fmt: skip
    return [(store.keys, store.values) for store in stores], memory, logits[:, 0]


@partial(jax.jit, static_argnames=("graphdef", "capacity", "top_k"))
def _continue(
    graphdef, state, stores, memory, logits, length, new, padding, context_lengths, sampling, *, capacity, top_k
):
    """The new tokens (capacity, B), of which the first `new` are chosen: a loop of single positions."""
    model = nnx.merge(graphdef, state)

    def advance(carry):
        n, pairs, logits, chosen = carry
        token = _choose(logits, sampling, top_k, n)
        stores = [LayerCache(k, v, length + n, capacity) for k, v in pairs]
        logits = model.reader.run(
            token[:, None], stores=stores, memory=memory, memory_lengths=context_lengths,
            **_arguments(model.config, padding, length + n, 1, capacity),
        )  # fmt: skip
        return n + 1, [(store.keys, store.values) for store in stores], logits[:, -1], chosen.at[n].set(token)

    chosen = jnp.zeros((capacity, logits.shape[0]), jnp.int32)
    # The last token is returned and never read.
    n, _, logits, chosen = jax.lax.while_loop(
        lambda carry: carry[0] < new - 1, advance, (jnp.int32(0), stores, logits, chosen)
    )
    return chosen.at[n].set(_choose(logits, sampling, top_k, n))


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
