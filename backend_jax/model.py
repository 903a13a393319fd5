"""The whole model, and its parameters under canonical names. Rules: core_numpy.model."""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from core_numpy.contract.checks import model as checks
from core_numpy.contract.config import ModelConfig
from core_numpy.contract.interop import host
from core_numpy.contract.parameters import model_parameters

from . import encodings, layers, place, random
from .arrays import from_numpy, place_of, require_arrays, to_numpy, values
from .block import Block, make_rotary
from .cache import KVCache, Pair, close_cache, open_cache
from .modules import Initial, Norm, Stored, drop, matmul
from .repeating import run_repeated


class Table(nnx.Module):
    """A matrix that is read by rows: weight (rows, features)."""

    def __init__(self, initial: Initial):
        self.weight = initial.parameter("weight")


class Head(nnx.Module):
    """What makes logits of hidden states: weight (W, classes) unless the embedding serves, bias (classes,) or None."""

    def __init__(self, initial: Initial):
        self.weight = initial.optional("weight")
        self.bias = initial.optional("bias")


class Stack(nnx.Module):
    """One stack of blocks with what stands before and after it: a whole decoder or encoder, or a side of a pair."""

    def build(self, config: ModelConfig, initial: Initial) -> None:
        """Make the parts."""
        self.config = config
        # In an encoder-decoder one table may serve both sides; it is the decoder's.
        self.embedding: Any = Table(initial.at("embedding")) if initial.has("embedding.weight") else None
        self.positions = Table(initial.at("positions")) if config.positions == "learned" else None
        self.relative = Table(initial.at("relative")) if config.positions == "relative" else None
        self.embedding_norm = Norm(config, initial.at("embedding_norm")) if config.embedding_norm else None
        cross = initial.has("blocks.0.cross.query.weight")
        self.blocks = nnx.List(
            [
                Block(config.block(i, cross_attention=cross), seed=initial.at(f"blocks.{i}"))
                for i in range(config.layers)
            ]
        )
        for block in self.blocks:
            block.attention.rotary_layout = config.rotary_layout
        self.norm = Norm(config, initial.at("norm")) if config.final_norm else None
        self.head: Any = Head(initial.at("head")) if initial.has("head.weight") or initial.has("head.bias") else None
        # Set by a Trainer with remat=True: each block's activations are computed again for the backward pass.
        self.remat = False
        # How often the blocks are repeated, by as many entries along the first axis of their parameters, while a
        # Trainer's step computes; the layers of anybody else's model have their own blocks.
        self.folds = 1

    def run(
        self, tokens: jax.Array, *, table: jax.Array | None = None, mask=None, kv_lengths=None, segments=None,
        positions=None, stores=None, dropout_key=None, memory=None, memory_lengths=None, maps=None, last=None,
    ) -> jax.Array:  # fmt: skip
        """Token ids to logits, or to hidden states where there is no head; unchecked.

        memory: the encoded context, or its keys and values for each layer. stores: the cache's, one for each layer.
        maps: a list that gets each layer's attention weights. last: the one position whose logits are wanted.
        """
        config, T = self.config, tokens.shape[1]
        past = stores[0].length if stores else 0
        begins = isinstance(past, int) and past == 0 and T > 1
        ring = not stores and place.ringed(*tokens.shape)
        columns = place.order(T) if ring else jnp.arange(T, dtype=jnp.int32)
        where = past + columns if positions is None else positions
        table = self.embedding.weight[...] if table is None else table
        in_order = positions is None and not ring and isinstance(past, int) and past == 0
        rows = slice(0, T) if in_order else where
        x = self._embed(tokens, where, rows, table)
        if dropout_key is not None and config.dropout:
            x = drop(x, config.dropout, random.fold_in(dropout_key, config.layers))
        x = place.hidden(x)
        longest = stores[0].capacity if stores else T
        # The first call of a cache sees its own positions alone.
        S, stored = (T, False) if begins or not stores else (longest, True)
        arguments = {
            "mask": mask, "kv_lengths": kv_lengths, "segments": segments, "memory_lengths": memory_lengths,
            "bias": self._by_distance(T, past, S, x.dtype, stored=stored, ring=ring),
            "rotary": make_rotary(config, where, longest) if config.positions == "rotary" else None,
        }  # fmt: skip
        if not config.dropout:
            dropout_key = None
        if self.folds > 1:
            given = arguments | {"memory": memory}
            x = run_repeated(self.blocks, self.folds, x, given, dropout_key=dropout_key, remat=self.remat)
            return self._finish(x, table, kv_lengths, segments)
        for i, block in enumerate(self.blocks):
            key = None if dropout_key is None else random.fold_in(dropout_key, i)
            here = {
                **arguments, "dropout_key": key, "memory": memory[i] if isinstance(memory, list) else memory,
            }  # fmt: skip
            if self.remat and not stores and maps is None:
                x = _rematerialised(block, x, here)
            else:
                x = block.run(x, **here, store=stores[i] if stores else None, maps=maps)
            x = place.hidden(x)
        if last is not None:
            x = jax.lax.dynamic_slice_in_dim(x, last, 1, axis=1)
        return self._finish(x, table, kv_lengths, segments)

    def _embed(self, tokens: jax.Array, where: jax.Array, rows: Any, table: jax.Array) -> jax.Array:
        """`rows` are those of the learned table: a slice where it can be one, because a gather's gradient scatters."""
        config = self.config
        x = encodings.embed(table, tokens)
        if config.embedding_scale is not None:
            x = _scaled(x, config.embedding_scale)
        if self.positions is not None:
            weight = self.positions.weight[...]
            x = x + (weight[rows] if isinstance(rows, slice) else encodings.embed(weight, rows))
        if config.positions == "sinusoidal":
            x = x + encodings.sinusoidal_encoding(where, config.width, dtype=x.dtype.name)
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def _by_distance(self, T: int, past: Any, S: int, dtype: Any, *, stored: bool, ring: bool) -> Any:
        """`_distance_bias`, or what a ring of devices makes it of, block by block."""
        if not ring or self.config.positions not in ("alibi", "relative"):
            return self._distance_bias(T, past, S, dtype, stored=stored)
        from .ring import Distances  # only where positions are spread

        return Distances(self.config, None if self.relative is None else self.relative.weight[...])

    def _distance_bias(self, T: int, past: Any, S: int, dtype: Any, *, stored: bool) -> jax.Array | None:
        """The bias of distances j - i - past, (1, H, T, S) in the accumulation dtype, or None.

        `past` may be traced, while a cache is written in a compiled loop: distances are then looked up in one row
        of all of them.
        """
        config = self.config
        if config.positions not in ("alibi", "relative"):
            return None
        if not stored:
            if self.relative is None:
                wide = layers.accumulation(dtype).name
                return encodings.alibi_bias(config.heads, T, S, dtype=wide)[None]
            return encodings.relative_bias(self.relative.weight[...], T, S, **self._buckets())[None]
        away = jnp.arange(S) - (past + jnp.arange(T))[:, None]
        if self.relative is None:
            slopes = encodings.alibi_slopes(config.heads, dtype=layers.accumulation(dtype).name)
            return (-slopes[:, None, None] * jnp.abs(away))[None]
        row = encodings.relative_bias(self.relative.weight[...], 1, 2 * S - 1, q_offset=S - 1, **self._buckets())
        return row[None, :, 0, away + (S - 1)]

    def _buckets(self) -> dict[str, Any]:
        config = self.config
        return {
            "buckets": config.relative_buckets,
            "max_distance": config.relative_max_distance,
            "bidirectional": not config.is_causal,
        }

    def _finish(self, x: jax.Array, table: jax.Array, kv_lengths: Any, segments: Any) -> jax.Array:
        config = self.config
        if self.norm is not None:
            x = self.norm(x)
        if config.head == "none":
            return x
        if config.head == "classifier":
            x = pool(x, config.pool, kv_lengths, segments)
        weight = table.T if config.tie_embeddings else self.head.weight[...]
        logits = matmul(x, weight)
        if self.head is not None and self.head.bias is not None:
            logits = logits + self.head.bias[...]
        if config.logit_scale is not None:
            logits = _scaled(logits, config.logit_scale)
        if config.logit_softcap is not None:
            wide = logits.astype(layers.accumulation(logits.dtype))
            logits = (config.logit_softcap * jnp.tanh(wide / config.logit_softcap)).astype(logits.dtype)
        return logits

    def memory(self, source: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        """The keys and values of an encoded source for each layer: what decoding computes once."""
        return [block.cross.keys_and_values(source) for block in self.blocks]


class Transformer(Stack):
    """A decoder, an encoder or an encoder-decoder. Rules: core_numpy.model.

    model(tokens): (B, T) -> (B, T, V) logits, (B, classes), or (B, T, W) with head="none".
    """

    parameter_table = staticmethod(model_parameters)
    family: str | None = None

    def __init__(self, config: ModelConfig, *, seed: int = 0, dtype: str = "float32", device: Any = None):
        initial = Initial.of(seed, config, model_parameters, dtype, device, model=True)
        if config.kind == "encoder_decoder":
            self.config = config
            self.encoder, self.decoder = Stack(), Stack()
            self.encoder.build(config.stack("encoder"), initial.at("encoder"))
            self.decoder.build(config.stack("decoder"), initial.at("decoder"))
        else:
            self.build(config, initial)

    @classmethod
    def from_pretrained(
        cls, folder: str | os.PathLike[str], *, dtype: str = "float32", device: Any = None
    ) -> Transformer:
        """The model of a Hugging Face folder in `dtype`. Rules: core_numpy.model."""
        from core_numpy.contract.families import Pretrained  # many tables, which only folders need

        source = Pretrained(folder)
        values: Any = Stored.of(source, dtype, device)
        model = cls(source.config, seed=values)
        model.family = source.family
        return model

    def save_pretrained(
        self, folder: str | os.PathLike[str], *, family: str | None = None, max_shard_size: int | str | None = None
    ) -> None:
        """Write `config.json` and `model.safetensors`, or shards and their index. Rules: core_numpy.model."""
        from core_numpy.contract.families import write_pretrained

        own = named_parameters(self)
        write_pretrained(
            folder, self.config, lambda name: to_numpy(own[name][...]), family or self.family, max_shard_size
        )

    def __call__(
        self, tokens: jax.Array, *, mask=None, kv_lengths=None, segments=None, positions=None,
        cache: KVCache | None = None, dropout_key=None, context=None, context_lengths=None,
    ) -> jax.Array:  # fmt: skip
        return self._call(
            tokens, None, mask=mask, kv_lengths=kv_lengths, segments=segments, positions=positions, cache=cache,
            dropout_key=dropout_key, context=context, context_lengths=context_lengths,
        )  # fmt: skip

    def attention_maps(
        self, tokens: jax.Array, *, mask=None, kv_lengths=None, segments=None, positions=None,
        cache: KVCache | None = None, dropout_key=None, context=None, context_lengths=None,
    ) -> list[jax.Array]:  # fmt: skip
        """Each layer's self-attention weights (B, H, T, S), before dropout; an encoder-decoder gives its decoder's."""
        maps: list[jax.Array] = []
        self._call(
            tokens, maps, mask=mask, kv_lengths=kv_lengths, segments=segments, positions=positions, cache=cache,
            dropout_key=dropout_key, context=context, context_lengths=context_lengths,
        )  # fmt: skip
        return maps

    @property
    def dtype(self) -> str:
        """The name of the parameters' dtype."""
        return self.reader.embedding.weight[...].dtype.name

    @property
    def reader(self) -> Stack:
        """The stack that reads the tokens: the decoder of a pair, or the model itself."""
        return self.decoder if self.config.kind == "encoder_decoder" else self

    def encode(self, context: jax.Array, lengths: Any, *, dropout_key: jax.Array | None = None) -> jax.Array:
        """The source (B, S) read by the encoder of a pair, (B, S, W); unchecked."""
        table = self.decoder.embedding.weight[...] if self.config.share_embedding else None
        return self.encoder.run(context, table=table, kv_lengths=lengths, dropout_key=dropout_key)

    def _call(
        self, tokens: jax.Array, maps: list[jax.Array] | None, *, cache: KVCache | None, **given: Any
    ) -> jax.Array:
        require_arrays(tokens=tokens, **given)
        plan = checks.check_model_call(self.config, tokens, cache=cache, **given, dtype=self.dtype, values=values)
        stores = open_cache(cache)
        memory = None
        if cache is not None and given["context"] is not None and given["dropout_key"] is None:
            memory = self._read_once(cache, given["context"], given["context_lengths"])
        logits = self.compute(tokens, stores=stores, maps=maps, memory=memory, **given)
        close_cache(cache, stores, plan.T)
        return logits

    def _read_once(self, cache: KVCache, context: jax.Array, lengths: Any) -> list[Pair]:
        """The keys and values of the source as a cache keeps them, read by the call at length 0."""
        if cache.memory is None or (isinstance(cache.length, int) and cache.length == 0):
            cache.source, cache.memory = (context, lengths), self.reader.memory(self.encode(context, lengths))
        checks.check_source(cache.source, (context, lengths), values)
        return cache.memory

    def compute(
        self, tokens: jax.Array, *, dropout_key=None, context=None, context_lengths=None, memory=None, **arguments: Any
    ) -> jax.Array:
        """The call without its checks: what a compiled step runs. `memory` is the source's, where it was read."""
        if context is None:
            return self.reader.run(tokens, dropout_key=dropout_key, **arguments)
        if memory is not None:
            return self.reader.run(tokens, memory=memory, memory_lengths=context_lengths, **arguments)
        keys = (None, None) if dropout_key is None else tuple(random.fold_in(dropout_key, side) for side in (0, 1))
        source = self.encode(context, context_lengths, dropout_key=keys[0])
        return self.reader.run(tokens, dropout_key=keys[1], memory=source, memory_lengths=context_lengths, **arguments)


def _rematerialised(block: Block, x: jax.Array, arguments: dict[str, Any]) -> jax.Array:
    """`block.run` whose activations are computed again for the backward pass."""
    graphdef, state = nnx.split(block)

    def run(state: Any, x: jax.Array, arguments: dict[str, Any]) -> jax.Array:
        return nnx.merge(graphdef, state).run(x, **arguments)

    return jax.checkpoint(run)(state, x, arguments)


def pool(x: jax.Array, how: str, kv_lengths: Any, segments: Any) -> jax.Array:
    """(B, T, W) -> (B, W): the mean over each row's real tokens, its first or its last; 0 where a row has none."""
    B, T, _ = x.shape
    columns = jnp.arange(T)
    real = jnp.ones((B, T), bool)
    if kv_lengths is not None:
        real = real & (columns < kv_lengths[:, None])
    if segments is not None:
        real = real & (segments >= 0)
    picked = real
    if how == "first":
        picked = columns == jnp.min(jnp.where(real, columns, T), axis=1, initial=T)[:, None]
    elif how == "last":
        picked = columns == jnp.max(jnp.where(real, columns, -1), axis=1, initial=-1)[:, None]
    # Selected, not multiplied by 0: a padded row may hold NaN.
    y = jnp.where(picked[:, :, None], x, 0.0).astype(layers.accumulation(x.dtype))
    return (jnp.sum(y, axis=1) / jnp.maximum(jnp.sum(picked, axis=1), 1)[:, None]).astype(x.dtype)


def get_params(module: nnx.Module) -> dict[str, np.ndarray]:
    """Every parameter as a NumPy array under its canonical name, linear weights (in, out)."""
    return {name: to_numpy(p[...]) for name, p in named_parameters(module).items()}


def set_params(module: nnx.Module, params: dict[str, np.ndarray]) -> None:
    """Copy `params` in: exactly the module's names, each with its shape and dtype."""
    own = named_parameters(module)
    checks.check_params({name: (p.shape, p[...].dtype.name) for name, p in own.items()}, params)
    for name, p in own.items():
        p[...] = from_numpy(host(params[name]), device=place_of(p[...]))


def named_parameters(module: Any) -> dict[str, nnx.Param]:
    """The `nnx.Param`s by their paths, which are the canonical names, in the contract's order."""
    checks.check_owner(module, isinstance(module, nnx.Module), "backend_jax")
    flat = {".".join(map(str, path)): p for path, p in nnx.to_flat_state(nnx.state(module, nnx.Param))}
    table = getattr(type(module), "parameter_table", None)
    order = [] if table is None else [name for name in table(module.config) if name in flat]
    return {name: flat[name] for name in [*order, *(name for name in flat if name not in order)]}


def _scaled(x: jax.Array, scale: float) -> jax.Array:
    """x times a number that is not rounded to x's dtype first."""
    return (x.astype(layers.accumulation(x.dtype)) * scale).astype(x.dtype)
