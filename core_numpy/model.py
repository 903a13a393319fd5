"""The whole model: embeddings, a stack of blocks, a head; and its parameters by their canonical names.

model-1: h = embedding[token] * embedding_scale + the position's row (learned table or sinusoids), then the embedding
norm, then dropout, then the blocks, then the final norm.
model-2: positions default to 0, 1, ..., counted on behind a cache; segments do not restart them.
model-3: ALiBi and relative biases are added to the scores of self-attention, in every layer alike; cross-attention has
none. A relative table is one for all layers of a stack, with buckets for both directions where attention is not causal.
model-4: block i has the window of `layer_windows[i]` where given, else `window`.
model-5: logits = head(h), or h embedding^T with tied embeddings, plus the head's bias, times `logit_scale`, then
c tanh(logits / c) with c = `logit_softcap`.
model-6: a classifier pools h over the row's real tokens, those before `kv_lengths` and with a segment that is not
negative: their mean, the first or the last of them; 0 where there are none.
model-7: dropout of block i has the key fold_in(key, i), that of the embeddings fold_in(key, layers); in an
encoder-decoder the encoder has fold_in(key, 0) and the decoder fold_in(key, 1).
model-8: an encoder-decoder's blocks attend to the encoder's output, up to `context_lengths`; the encoder is a stack
without a head, sees both ways and counts its own positions from 0.
model-9: attention maps are the weights of self-attention (the decoder's), before dropout.
model-10: parameters go in and out by name, all of them or none; a wrong name, shape or dtype is refused, all in one
sentence.
model-11: a pretrained model has the numbers of the family's own library: every field of its config is read or refused,
every tensor is a parameter or ignored by name, and a model is made whole or not at all.
model-12: what is written is read again as the same model, by this package and by the family's own library. The family
is the one asked for, else the one the model was read from, else the first that can say the configuration.
model-13: with a limit on the size of a file, tensors go in their order into shards, each as full as the limit allows, a
larger tensor alone; model.safetensors.index.json says what each holds. What fits into one file has no index. All shards
are complete before one has its name, and the config comes last: a reader never meets a part of a model as a whole.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .block import Block, BranchKept, Scene
from .cache import KVCache, Pair
from .contract.checks.model import check_model_call, check_owner, check_params, check_source
from .contract.config import ModelConfig
from .contract.copies import copied, serves
from .contract.families import Pretrained, write_pretrained
from .contract.interop import host
from .contract.parameters import model_parameters
from .contract.tensor_file import numpy_dtype
from .encodings import alibi_bias, relative_bias, sinusoidal_encoding
from .modules import Module, Norm, Table, Values, below, dropped, initial_values, own_rotary, wide
from .random import fold_in
from .rounding import rounded


@dataclass
class ModelKept:
    """What the backward pass of a stack reads: the inputs of each part, and what the blocks kept (None: to redo)."""

    tokens: np.ndarray
    places: np.ndarray
    key: np.ndarray | None
    embedded: np.ndarray
    scene: Scene
    inputs: list[np.ndarray]
    blocks: list[dict[str, BranchKept] | None]
    last: np.ndarray
    normal: np.ndarray
    pooled: np.ndarray
    weights: np.ndarray | None
    logits: np.ndarray
    encoder: ModelKept | None = None


class Transformer(Module):
    """A decoder, an encoder or both, with a language-model head, a classifier or none.

    tokens (B, T) -> logits (B, T, V), (B, classes) or, without a head, (B, T, W), in the model's dtype; computed in
    float64 throughout and rounded once. Refused: `contract.checks.model.check_model_call`. Rules: model-1 to model-8.
    """

    embedding: Table
    family: str | None = None

    def __init__(self, config: ModelConfig, *, seed: int = 0, dtype: str = "float32", device: Any = None) -> None:
        self.refuse(config, seed, dtype, device, model=True)
        self.assemble(config, initial_values(model_parameters(config), seed, dtype), dtype)

    @classmethod
    def from_pretrained(
        cls, folder: str | os.PathLike[str], *, dtype: str = "float32", device: Any = None
    ) -> Transformer:
        """The model of a Hugging Face folder, `config.json` and `*.safetensors`, in `dtype`.

        Parameters that lie in the file as they do in memory are read from there: docs/porting.md.
        Refused: `contract.families.Pretrained`. Rules: model-11.
        """
        source = Pretrained(folder)
        cls.refuse(source.config, 0, dtype, device, model=True)
        kind = numpy_dtype(dtype)
        values = {}
        for name in source.shapes:
            x = source.read(name)
            values[name] = x if serves(x, kind, order="K") else copied(x, kind, order="K")
        model = cls.__new__(cls)
        model.assemble(source.config, values, dtype)
        model.family = source.family
        return model

    def save_pretrained(
        self, folder: str | os.PathLike[str], *, family: str | None = None, max_shard_size: int | str | None = None
    ) -> None:
        """Write `config.json` and `model.safetensors` as the family's own library reads them.

        max_shard_size: the most bytes of a file, a number or a text such as "5GB"; None writes one file.
        Rules: model-12, model-13.
        """
        own = self.parameters()
        write_pretrained(folder, self.config, own.__getitem__, family or self.family, max_shard_size)

    def assemble(self, config: ModelConfig, values: Values, dtype: str, *, cross: bool = False) -> None:
        """Take the parameters of `values`; `cross` where the blocks attend to an encoder."""
        self.config, self.dtype, self._names = config, dtype, tuple(values)
        if config.kind == "encoder_decoder":
            encoder, decoder = below(values, "encoder"), below(values, "decoder")
            if config.share_embedding:
                encoder["embedding.weight"] = decoder["embedding.weight"]
            self.encoder, self.decoder = Transformer.__new__(Transformer), Transformer.__new__(Transformer)
            self.encoder.assemble(config.stack("encoder"), encoder, dtype)
            self.decoder.assemble(config.stack("decoder"), decoder, dtype, cross=True)
            if config.share_embedding:
                self.encoder.embedding = self.decoder.embedding
            return
        self.embedding = Table(below(values, "embedding"))
        self.positions = Table(below(values, "positions")) if config.positions == "learned" else None
        self.relative = Table(below(values, "relative")) if config.positions == "relative" else None
        self.embedding_norm = Norm(below(values, "embedding_norm"), config) if config.embedding_norm else None
        self.blocks = []
        for i in range(config.layers):
            block = Block.__new__(Block)
            block.assemble(
                config.block(i, cross_attention=cross), below(values, f"blocks.{i}"), dtype, layout=config.rotary_layout
            )
            self.blocks.append(block)
        self.norm = Norm(below(values, "norm"), config) if config.final_norm else None
        self.head = Head(below(values, "head")) if below(values, "head") else None

    def __call__(
        self,
        tokens: np.ndarray,
        *,
        mask: np.ndarray | None = None,
        kv_lengths: np.ndarray | None = None,
        segments: np.ndarray | None = None,
        positions: np.ndarray | None = None,
        cache: KVCache | None = None,
        dropout_key: np.ndarray | None = None,
        context: np.ndarray | None = None,
        context_lengths: np.ndarray | None = None,
    ) -> np.ndarray:
        given = {
            "mask": mask, "kv_lengths": kv_lengths, "segments": segments, "positions": positions, "cache": cache,
            "dropout_key": dropout_key, "context": context, "context_lengths": context_lengths,
        }  # fmt: skip
        return rounded(self._call(tokens, given, None), numpy_dtype(self.dtype))

    def attention_maps(
        self,
        tokens: np.ndarray,
        *,
        mask: np.ndarray | None = None,
        kv_lengths: np.ndarray | None = None,
        segments: np.ndarray | None = None,
        positions: np.ndarray | None = None,
        cache: KVCache | None = None,
        dropout_key: np.ndarray | None = None,
        context: np.ndarray | None = None,
        context_lengths: np.ndarray | None = None,
    ) -> list[np.ndarray]:
        """The weights of each layer's self-attention, (B, H, T, S) in the model's dtype. Rules: model-9."""
        given = {
            "mask": mask, "kv_lengths": kv_lengths, "segments": segments, "positions": positions, "cache": cache,
            "dropout_key": dropout_key, "context": context, "context_lengths": context_lengths,
        }  # fmt: skip
        maps: list[np.ndarray] = []
        self._call(tokens, given, maps)
        return [rounded(weights, numpy_dtype(self.dtype)) for weights in maps]

    def _call(self, tokens: np.ndarray, given: dict[str, Any], maps: list[np.ndarray] | None) -> np.ndarray:
        check_model_call(self.config, tokens, **given, dtype=self.dtype, values=np.asarray)
        cache, source = given["cache"], (given["context"], given["context_lengths"])
        memory = None
        if cache is not None and given["context"] is not None and given["dropout_key"] is None:
            if cache.memory is None or cache.length == 0:
                cache.source, cache.memory = source, self.memory(*source)
            check_source(cache.source, source, np.asarray)
            memory = cache.memory
        y, _ = self.run(tokens, **given, memory=memory, maps=maps, keep=False)
        if cache is not None:
            cache.advance(tokens.shape[1])
        return y

    def encode(self, context: np.ndarray, context_lengths: np.ndarray | None) -> np.ndarray:
        """The encoder's output for source ids, float64: what `run` takes as `memory`."""
        return self.encoder.run(context, kv_lengths=context_lengths, keep=False)[0]

    def memory(self, context: np.ndarray, context_lengths: np.ndarray | None) -> list[Pair]:
        """The keys and values of cross-attention in each layer, float64: what decoding computes once per source."""
        source = self.encode(context, context_lengths)
        return [block.cross.keys_and_values(source)[1:] for block in self.decoder.blocks if block.cross is not None]

    def run(
        self,
        tokens: np.ndarray,
        *,
        mask: np.ndarray | None = None,
        kv_lengths: np.ndarray | None = None,
        segments: np.ndarray | None = None,
        positions: np.ndarray | None = None,
        cache: KVCache | None = None,
        dropout_key: np.ndarray | None = None,
        context: np.ndarray | None = None,
        context_lengths: np.ndarray | None = None,
        memory: np.ndarray | list[Pair] | None = None,
        maps: list[np.ndarray] | None = None,
        keep: bool = True,
        last: bool = False,
    ) -> tuple[np.ndarray, ModelKept]:
        """Unchecked: the output in float64, and what the backward pass needs; `keep=False` keeps block inputs only.
        `last`: the logits of the last position alone.

        `memory` is the encoder's output, or its keys and values for each layer, in place of the `context`.
        """
        if self.config.kind == "encoder_decoder":
            encoder_kept = None
            keys = (None, None) if dropout_key is None else (fold_in(dropout_key, 0), fold_in(dropout_key, 1))
            if memory is None and context is not None:
                memory, encoder_kept = self.encoder.run(
                    context, kv_lengths=context_lengths, dropout_key=keys[0], keep=keep
                )
            y, kept = self.decoder.run(
                tokens, mask=mask, kv_lengths=kv_lengths, segments=segments, positions=positions, cache=cache,
                dropout_key=keys[1], context_lengths=context_lengths, memory=memory, maps=maps, keep=keep, last=last,
            )  # fmt: skip
            kept.encoder = encoder_kept
            return y, kept
        past, T = 0 if cache is None else cache.length, tokens.shape[1]
        places = np.arange(past, past + T) if positions is None else np.asarray(positions)
        scene = Scene(
            past, mask, self._bias(T, past), kv_lengths, segments, own_rotary(self.config, places, T, past), cache,
            context=None if isinstance(memory, list) else memory, context_lengths=context_lengths,
            memory=memory if isinstance(memory, list) else None, maps=maps, keep=keep,
        )  # fmt: skip
        embedded, h = self._embed(tokens, places, dropout_key)
        inputs, blocks = [], []
        for i, block in enumerate(self.blocks):
            inputs.append(h)
            h, kept_block = block.run(h, *self.of_block(i, scene, dropout_key))
            blocks.append(kept_block if keep else None)
        h = h[:, -1:] if last else h
        normal = h if self.norm is None else self.norm.run(h)
        pooled, weights = self._pool(normal, kv_lengths, segments)
        logits, y = self._logits(pooled)
        return y, ModelKept(
            tokens, places, dropout_key, embedded, scene, inputs, blocks, h, normal, pooled, weights, logits
        )  # fmt: skip

    def of_block(self, i: int, scene: Scene, key: np.ndarray | None) -> tuple[Scene, np.ndarray | None]:
        """What block i is called with besides its input. Rules: model-7."""
        return replace(scene, layer=i), None if key is None else fold_in(key, i)

    def _bias(self, T: int, past: int) -> np.ndarray | None:
        """What the encoding adds to the scores, (1, H, T, S). Rules: model-3."""
        config = self.config
        if config.positions == "alibi":
            return alibi_bias(config.heads, T, past + T, q_offset=past, dtype="float64")[None]
        if self.relative is None:
            return None
        return relative_bias(
            wide(self.relative.weight), T, past + T, buckets=config.relative_buckets,
            max_distance=config.relative_max_distance, bidirectional=not config.is_causal, q_offset=past,
        )[None]  # fmt: skip

    def _embed(self, tokens: np.ndarray, places: np.ndarray, key: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """The sum of embeddings before its norm, and after norm and dropout. Rules: model-1."""
        config = self.config
        embedded = wide(self.embedding.weight[tokens])
        if config.embedding_scale is not None:
            embedded = embedded * config.embedding_scale
        if self.positions is not None:
            embedded = embedded + wide(self.positions.weight[places])
        if config.positions == "sinusoidal":
            embedded = embedded + sinusoidal_encoding(places, config.width, dtype="float64")
        h = embedded if self.embedding_norm is None else self.embedding_norm.run(embedded)
        return embedded, dropped(h, config.dropout, None if key is None else fold_in(key, config.layers))

    def _pool(
        self, h: np.ndarray, kv_lengths: np.ndarray | None, segments: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """What the head reads: h itself, or a classifier's weighted sum of it, (B, W), with the weights (B, T)."""
        if self.config.head != "classifier":
            return h, None
        B, T, _ = h.shape
        real = np.ones((B, T), dtype=bool)
        if kv_lengths is not None:
            real &= np.arange(T) < np.asarray(kv_lengths)[:, None]
        if segments is not None:
            real &= np.asarray(segments) >= 0
        count = np.cumsum(real, axis=1)
        if self.config.pool == "first":
            real &= count == 1
        elif self.config.pool == "last":
            real &= count == count[:, -1:]
        weights = real / np.maximum(np.sum(real, axis=1, keepdims=True), 1)
        # What is not pooled has no effect, NaN included.
        return np.einsum("bt,btw->bw", weights, np.where(real[..., None], h, 0.0)), weights

    def _logits(self, h: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The scaled logits before the soft cap, and after it. Rules: model-5."""
        config = self.config
        if config.head == "none":
            return h, h
        weight, bias = self.head_weight(), None if self.head is None else self.head.bias
        logits = (h.reshape(-1, h.shape[-1]) @ weight).reshape(*h.shape[:-1], weight.shape[1])
        if bias is not None:
            logits = logits + wide(bias)
        if config.logit_scale is not None:
            logits = logits * config.logit_scale
        cap = config.logit_softcap
        return logits, logits if cap is None else cap * np.tanh(logits / cap)

    def head_weight(self) -> np.ndarray:
        """(W, V), float64: the head's own, or the embedding turned over."""
        if self.head is not None and self.head.weight is not None:
            return wide(self.head.weight)
        return wide(self.embedding.weight).T


class Head:
    """weight (W, V), or None where the embedding is the head; bias (V,) or None."""

    def __init__(self, values: Values) -> None:
        self.weight = values.get("weight")
        self.bias = values.get("bias")


def get_params(module: Module) -> dict[str, np.ndarray]:
    """A copy of every parameter by its canonical name, in the canonical order. Rules: model-10."""
    check_owner(module, isinstance(module, Module), "core_numpy")
    return {name: x.copy() for name, x in module.parameters().items()}


def set_params(module: Module, params: dict[str, np.ndarray]) -> None:
    """Put copies of `params` into the module. Refused: names, shapes and dtypes that are not the module's own, all
    listed, and then nothing is changed. Rules: model-10.
    """
    check_owner(module, isinstance(module, Module), "core_numpy")
    own = module.parameters()
    check_params({name: (x.shape, x.dtype.name) for name, x in own.items()}, params)
    module.assign({name: np.array(host(params[name])) for name in own})
