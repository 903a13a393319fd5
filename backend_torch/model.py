"""Embeddings, blocks, final norm and head; parameters in and out. Rules: core_numpy.model.

`Transformer` is an `nn.Module` whose `state_dict` keys are the canonical names. `nn.Linear` and `nn.Embedding` are
kept, so tools that look for them (LoRA, quantisation, sharding) find them.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from core_numpy.contract.checks.model import check_model_call, check_module, check_owner, check_params, check_source
from core_numpy.contract.config import BlockConfig, ModelConfig
from core_numpy.contract.copies import copied, empty, serves
from core_numpy.contract.interop import host
from core_numpy.contract.parameters import model_parameters
from core_numpy.contract.tensor_file import numpy_dtype

from .arrays import borrow, find_device, from_numpy, require_tensors, to_numpy, values
from .block import Block, Norm, dropout_key_of, dtype_of, parts, rotary_of
from .cache import KVCache, Pair
from .encodings import alibi_bias, relative_bias, sinusoidal_encoding
from .hooks import direct
from .initial import initialise, linear, materialise, turn
from .layers import accumulation, drop
from .place import move, part
from .products import project
from .random import fold_in


class Bias(nn.Module):
    """A head whose matrix is the embedding's: only the bias is its own."""

    def __init__(self, size: int, factory: dict[str, Any]) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(size, **factory))


class Table(nn.Module):
    """A matrix that is read by rows."""

    def __init__(self, rows: int, columns: int, factory: dict[str, Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns, **factory))


class Stack(nn.Module):
    """One stack of blocks with what stands before and after it: a whole decoder or encoder, or a side of a pair."""

    def build(self, config: ModelConfig, dtype: str, *, cross: bool, embedding: bool = True) -> None:
        """Make the parts on the meta device. `embedding=False`: the other side's table is read."""
        self.config = config
        factory, width = parts(dtype), config.width
        if embedding:
            # From memory that exists nowhere yet: nn.Embedding would draw its values.
            self.embedding = nn.Embedding(config.vocab, width, _weight=torch.empty(config.vocab, width, **factory))
        self.positions = Table(config.max_length, width, factory) if config.positions == "learned" else None
        relative = config.positions == "relative"
        self.relative = Table(config.relative_buckets, config.heads, factory) if relative else None
        self.embedding_norm = Norm(config, factory) if config.embedding_norm else None
        blocks = [
            Block(config.block(i, cross_attention=cross), dtype=dtype, device="meta") for i in range(config.layers)
        ]
        for block in blocks:
            block.attention.rotary_layout = config.rotary_layout
        self.blocks = nn.ModuleList(blocks)
        self.norm = Norm(config, factory) if config.final_norm else None
        self.head = self._head(factory)
        self.remat = False

    def _head(self, factory: dict[str, Any]) -> nn.Module | None:
        config = self.config
        if config.head == "none":
            return None
        size = config.vocab if config.head == "lm" else config.classes or 0
        if config.tie_embeddings:
            return Bias(size, factory) if config.has_head_bias else None
        return linear(config.width, size, bias=config.has_head_bias, factory=factory)

    def run(
        self,
        tokens: Tensor,
        *,
        table: Tensor | None = None,
        mask: Tensor | None = None,
        kv_lengths: Tensor | None = None,
        segments: Tensor | None = None,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
        key: Tensor | None = None,
        context: Tensor | None = None,
        context_lengths: Tensor | None = None,
        memory: list[Pair] | None = None,
        last: bool = False,
    ) -> Tensor:
        """tokens (B, T) -> logits (B, T, V), (B, classes) or hidden (B, T, W).

        `table`: another side's embedding; `memory`: each layer's keys and values of the context, where a cache has
        them; `last`: the logits of the last position alone.
        """
        config, T = self.config, tokens.shape[1]
        past = 0 if cache is None else cache.length
        table = self.embedding.weight if table is None else table
        x = self._embed(tokens, table, positions, past)
        x = drop(x, config.dropout, None if key is None else fold_in(key, config.layers))
        shared: dict[str, Any] = {
            "mask": mask, "kv_lengths": kv_lengths, "segments": segments, "context": context,
            "context_lengths": context_lengths, "bias": self._spread_bias(past, T, x),
        }  # fmt: skip
        if config.positions == "rotary":
            shared["rotary"] = self._rotary(positions, cache, T, x)
        for i, block in enumerate(self.blocks):
            pair = None if memory is None else memory[i]
            own: dict[str, Any] = {
                "cache": None if cache is None else cache.layer(i, cast(BlockConfig, block.config), pair),
                "dropout_key": None if key is None else fold_in(key, i),
            }
            if self.remat and torch.is_grad_enabled():
                # Dropout comes from keys, so torch's generators need not be kept.
                run = direct(block)
                x = checkpoint(run, x, use_reentrant=False, preserve_rng_state=False, **shared, **own)
            else:
                x = direct(block)(x, **shared, **own)
        if cache is not None:
            cache.advance(T)
        return self._finish(x[:, -1:] if last else x, table, kv_lengths, segments)

    def _rotary(self, positions: Tensor | None, cache: KVCache | None, T: int, x: Tensor) -> Pair:
        """The tables for all layers, in the dtype that they compute in."""

        def tables(end: int, positions: Tensor | None = None) -> Pair:
            cos, sin = rotary_of(self.config, positions, 0, end, x.device)
            return cos.to(accumulation(x.dtype)), sin.to(accumulation(x.dtype))

        if cache is not None:
            return cache.rotary(tables, T) if positions is None else tables(cache.length + T, positions)
        here = part()
        return tables(T if here is None or here.ring is None else here.ring.length, positions)

    def _embed(self, tokens: Tensor, table: Tensor, positions: Tensor | None, past: int) -> Tensor:
        config, T = self.config, tokens.shape[1]
        x = F.embedding(tokens.long(), table)
        if config.embedding_scale is not None:
            x = x * config.embedding_scale
        if self.positions is not None:
            rows = self.positions.weight
            x = x + (rows[past : past + T] if positions is None else F.embedding(positions.long(), rows))
        if config.positions == "sinusoidal":
            if positions is None:
                positions = torch.arange(past, past + T, device=x.device)
            x = x + sinusoidal_encoding(positions, config.width, dtype=dtype_of(x))
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def _spread_bias(self, past: int, T: int, x: Tensor) -> Tensor | None:
        """`_bias`, unless a ring of processes makes it block by block."""
        here = part()
        if here is None or here.ring is None:
            return self._bias(past, T, x)
        if self.config.positions in ("alibi", "relative"):
            move(replace(here, distance=(self.config, None if self.relative is None else self.relative.weight)))
        return None

    def _bias(self, past: int, T: int, x: Tensor) -> Tensor | None:
        """What ALiBi or relative positions add to the scores, (1, H, T, S)."""
        config, S = self.config, past + T
        if config.positions == "alibi":
            wide = "float64" if x.dtype == torch.float64 else "float32"
            # The offset as a tensor says where the bias is made: (1, H, T, S) from the host would be far to go.
            offset = torch.full((1,), past, device=x.device)
            return alibi_bias(config.heads, T, S, q_offset=offset, dtype=wide)
        if self.relative is None:
            return None
        return relative_bias(
            self.relative.weight, T, S, buckets=config.relative_buckets, max_distance=config.relative_max_distance,
            bidirectional=not config.is_causal, q_offset=past,
        )[None]  # fmt: skip

    def _finish(self, x: Tensor, table: Tensor, kv_lengths: Tensor | None, segments: Tensor | None) -> Tensor:
        config = self.config
        if self.norm is not None:
            x = self.norm(x)
        if config.head == "classifier":
            x = pool(x, config.pool, kv_lengths, segments)
        if config.tie_embeddings:
            logits = F.linear(x, table, self.head.bias if isinstance(self.head, Bias) else None)
        elif self.head is not None:
            (logits,) = project(x, self.head)
        else:
            return x
        if config.logit_scale is not None:
            logits = logits * config.logit_scale
        if config.logit_softcap is not None:
            logits = config.logit_softcap * torch.tanh(logits / config.logit_softcap)
        return logits


class Transformer(Stack):
    """A decoder, an encoder or an encoder-decoder. Rules: core_numpy.model.

    model(tokens): (B, T) -> (B, T, V) logits, (B, classes), or (B, T, W) with head="none".
    """

    family: str | None = None

    def __init__(self, config: ModelConfig, *, seed: int = 0, dtype: str = "float32", device: Any = None) -> None:
        super().__init__()
        check_module(config, seed, dtype, model=True)
        if config.kind == "encoder_decoder":
            self.config = config
            self.encoder, self.decoder = Stack(), Stack()
            self.encoder.build(config.stack("encoder"), dtype, cross=False, embedding=not config.share_embedding)
            self.decoder.build(config.stack("decoder"), dtype, cross=True)
        else:
            self.build(config, dtype, cross=False)
        initialise(self, model_parameters(config), seed, device)

    @classmethod
    def from_pretrained(
        cls, folder: str | os.PathLike[str], *, dtype: str = "float32", device: Any = None
    ) -> Transformer:
        """The model of a Hugging Face folder in `dtype`, in eval mode. Rules: core_numpy.model.

        On a CPU, parameters that lie in the file as they do in memory are read from there: docs/porting.md. All others
        are copied from the mapped file straight into their places.
        """
        from core_numpy.contract.families import Pretrained  # many tables, which only folders need

        source = Pretrained(folder)
        model = cls(source.config, dtype=dtype, device="meta")
        device = find_device(device)
        if device.type == "cpu":
            kind = numpy_dtype(dtype)
            for name in named(model):
                _place(model, name, source.read(name), kind)
        else:
            materialise(model, device)
            with torch.no_grad():
                for name, p in named(model).items():
                    turn(model, name, p).copy_(borrow(source.read(name)))
        model.family = source.family
        return model.eval()

    def save_pretrained(
        self, folder: str | os.PathLike[str], *, family: str | None = None, max_shard_size: int | str | None = None
    ) -> None:
        """Write `config.json` and `model.safetensors`, or shards and their index. Rules: core_numpy.model."""
        from core_numpy.contract.families import write_pretrained

        own = named(self)
        write_pretrained(
            folder,
            self.config,
            lambda name: to_numpy(turn(self, name, own[name])),
            family or self.family,
            max_shard_size,
        )

    @property
    def dtype(self) -> str:
        """The name of the parameters' dtype."""
        return dtype_of(self._reader().embedding.weight)

    def forward(
        self,
        tokens: Tensor,
        *,
        mask: Tensor | None = None,
        kv_lengths: Tensor | None = None,
        segments: Tensor | None = None,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
        dropout_key: Tensor | None = None,
        context: Tensor | None = None,
        context_lengths: Tensor | None = None,
    ) -> Tensor:
        given: dict[str, Any] = {
            "mask": mask, "kv_lengths": kv_lengths, "segments": segments, "positions": positions,
            "dropout_key": dropout_key, "context": context, "context_lengths": context_lengths,
        }  # fmt: skip
        require_tensors(tokens=tokens, **given)
        check_model_call(self.config, tokens, cache=cache, dtype=self.dtype, values=values, **given)
        return self.unchecked(tokens, cache=cache, **given)

    def unchecked(
        self,
        tokens: Tensor,
        *,
        cache: KVCache | None = None,
        dropout_key: Tensor | None = None,
        context: Tensor | None = None,
        context_lengths: Tensor | None = None,
        **own: Any,
    ) -> Tensor:
        """The call itself, for a trainer that has checked its batch; `own` are the other arguments of a call."""
        key = dropout_key_of(self, self.config.dropout, dropout_key, tokens.device)
        if context is None:
            return self.run(tokens, **own, cache=cache, key=key)
        if cache is not None and key is None:
            source, memory = self._read_once(cache, context, context_lengths)
            own |= {"memory": memory, "cache": cache}
        else:
            source = self.encode(context, context_lengths, key=None if key is None else fold_in(key, 0))
            own |= {"cache": cache, "key": None if key is None else fold_in(key, 1)}
        return self.decode(tokens, **own, source=source, context_lengths=context_lengths)

    def _read_once(self, cache: KVCache, context: Tensor, lengths: Tensor | None) -> tuple[Tensor, list[Pair]]:
        """The source as a cache keeps it, encoded and as keys and values, read by the call at length 0."""
        if cache.encoded is None or cache.memory is None or cache.length == 0:
            cache.source, cache.encoded = (context, lengths), self.encode(context, lengths).detach()
            cache.memory = self.memory(cache.encoded)
        check_source(cache.source, (context, lengths), values)
        return cache.encoded, cache.memory

    @torch.no_grad()
    def memory(self, source: Tensor) -> list[Pair]:
        """The keys and values of cross-attention in each layer, of the encoded source: what decoding computes once."""
        return [cast(Block, block).cross.keys_and_values(source) for block in self.decoder.blocks]  # type: ignore[union-attr]

    def encode(self, context: Tensor, context_lengths: Tensor | None, *, key: Tensor | None = None) -> Tensor:
        """The source (B, S) read by the encoder of an encoder-decoder, (B, S, W); unchecked."""
        table = self.decoder.embedding.weight if self.config.share_embedding else None
        return self.encoder.run(context, table=table, kv_lengths=context_lengths, key=key)

    def decode(
        self, tokens: Tensor, *, source: Tensor | None, context_lengths: Tensor | None = None, **own: Any
    ) -> Tensor:
        """The logits of tokens, given the encoded source of an encoder-decoder or None; unchecked."""
        return self._reader().run(tokens, context=source, context_lengths=context_lengths, **own)

    def attention_maps(
        self,
        tokens: Tensor,
        *,
        mask: Tensor | None = None,
        kv_lengths: Tensor | None = None,
        segments: Tensor | None = None,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
        dropout_key: Tensor | None = None,
        context: Tensor | None = None,
        context_lengths: Tensor | None = None,
    ) -> list[Tensor]:
        """Each layer's self-attention weights (B, H, T, S), before dropout; an encoder-decoder gives its decoder's."""
        maps: list[Tensor] = []

        def keep(attention: Any, inputs: tuple[Tensor], arguments: dict[str, Any]) -> None:
            maps.append(attention.weights(*inputs, **arguments))

        hooks = [
            block.get_submodule("attention").register_forward_pre_hook(keep, with_kwargs=True)
            for block in self._reader().blocks
        ]
        try:
            self(
                tokens, mask=mask, kv_lengths=kv_lengths, segments=segments, positions=positions, cache=cache,
                dropout_key=dropout_key, context=context, context_lengths=context_lengths,
            )  # fmt: skip
        finally:
            for hook in hooks:
                hook.remove()
        return maps

    def _reader(self) -> Stack:
        """The stack that reads the tokens: the decoder of a pair, or the model itself."""
        return self.decoder if self.config.kind == "encoder_decoder" else self


def _place(model: Transformer, name: str, x: np.ndarray, kind: np.dtype) -> None:
    """Make x, canonical, a parameter of a model without memory: the file's own memory or memory of the parameter's."""
    owner, _, leaf = name.rpartition(".")
    x = turn(model, name, x)
    if serves(x, kind):
        value = borrow(x)
    elif x.flags.c_contiguous:
        # torch converts faster than NumPy, and turns matrices more slowly.
        value = borrow(empty(x.shape, kind)).copy_(borrow(x))
    else:
        value = borrow(copied(x, kind))
    setattr(model.get_submodule(owner), leaf, nn.Parameter(value))


def pool(x: Tensor, how: str, kv_lengths: Tensor | None, segments: Tensor | None) -> Tensor:
    """(B, T, W) -> (B, W): the mean over each row's real tokens, its first or its last; 0 where a row has none."""
    B, T, _ = x.shape
    real = torch.ones(B, T, dtype=torch.bool, device=x.device)
    if kv_lengths is not None:
        real = real & (torch.arange(T, device=x.device) < kv_lengths[:, None])
    if segments is not None:
        real = real & (segments >= 0)
    count = real.cumsum(1)
    if how == "first":
        real = real & (count == 1)
    elif how == "last":
        real = real & (count == count[:, -1:])
    # Selected, not multiplied by 0: a padded column may hold NaN.
    total = torch.where(real[:, :, None], x, 0.0).to(accumulation(x.dtype)).sum(1)
    return (total / real.sum(1).clamp(min=1)[:, None]).to(x.dtype)


def named(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by canonical name, in the canonical order."""
    check_owner(module, isinstance(module, nn.Module) and hasattr(module, "names"), "backend_torch")
    own, names = dict(module.named_parameters()), cast("tuple[str, ...]", module.names)
    return {name: own[name] for name in names}


def get_params(module: nn.Module) -> dict[str, np.ndarray]:
    """Every parameter as a NumPy array under its canonical name, linear weights (in, out). Rules: core_numpy.model."""
    return {name: to_numpy(turn(module, name, p)) for name, p in named(module).items()}


@torch.no_grad()
def set_params(module: nn.Module, params: dict[str, np.ndarray]) -> None:
    """Copy `params` in: exactly the module's names, each with its shape and dtype. Rules: core_numpy.model."""
    own = named(module)
    check_params({name: (tuple(turn(module, name, p).shape), dtype_of(p)) for name, p in own.items()}, params)
    for name, p in own.items():
        p.copy_(turn(module, name, from_numpy(host(params[name]), device=p.device)))
