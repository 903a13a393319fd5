"""Attention with its projections, the feed-forward, and the block that joins them.

A module computes in float64 from end to end and rounds its output once. `run` gives float64 and what the backward
pass in `gradients.block` needs; the call checks and rounds.

block-1: queries, keys and values are x (or the context) times their weights, plus their biases, heads side by side:
head h owns columns h D to (h + 1) D - 1; the heads' outputs are laid side by side in the same way before the output
projection.
block-2: q/k norm is an RMS norm over the head size, after the projection and before the rotation.
block-3: rotation turns queries and keys by their positions, values never; cross-attention is not rotated.
block-4: self-attention has the configuration's causality and window, counted from the cache's length; cross-attention
has neither, no bias and no sinks, and sees the context up to `context_lengths`.
block-5: scale and soft cap serve self- and cross-attention alike.
block-6: a feed-forward is down(act(up(x))), a gated one down(act(gate(x)) * up(x)).
block-7: pre x + f(norm(x)); post norm(x + f(x)); sandwich x + norm_post(f(norm(x))); parallel
x + attention(norm1(x)) + ffn(norm2(x)), where `shared_norm` reads norm1 twice.
block-8: cross-attention stands between attention and feed-forward, with norm3.
block-9: dropout acts on the attention weights, on the attention's output and on the feed-forward's output, before they
join x; the key is split in five: weights, output, feed-forward, cross weights, cross output.
block-10: an attention module called alone takes its key for the weights, a feed-forward for its output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .attention import attend, attention_weights
from .cache import KVCache, Pair
from .contract.checks.model import check_attention_call, check_block_call, check_feed_forward_call
from .contract.config import BlockConfig, ModelConfig
from .contract.parameters import attention_parameters, block_parameters, feed_forward_parameters
from .encodings import apply_rotary
from .layers import normal_share, relu, tanh_share
from .modules import (
    Linear,
    Module,
    Norm,
    Values,
    below,
    dropped,
    initial_values,
    merge_heads,
    own_rotary,
    split_heads,
    wide,
)
from .pairs import Pairs, arrange, join_heads
from .pieces import by_element
from .random import split
from .rounding import rounded
from .special import expit

# An activation is x s(x): the share s of x that it lets through.
SHARE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "gelu": normal_share,
    "gelu_tanh": tanh_share,
    "relu": lambda x: x > 0.0,
    "silu": expit,
    "swiglu": expit,
    "geglu": normal_share,
    "geglu_tanh": tanh_share,
}


@dataclass(frozen=True)
class Scene:
    """What a call gives besides x, checked; blocks of a model differ in `layer` alone. context is float64; memory are
    its keys and values for each layer, where they are there already; keep: a backward pass will follow."""

    past: int = 0
    mask: np.ndarray | None = None
    bias: np.ndarray | None = None
    kv_lengths: np.ndarray | None = None
    segments: np.ndarray | None = None
    rotary: tuple[np.ndarray, np.ndarray] | None = None
    cache: KVCache | None = None
    layer: int = 0
    context: np.ndarray | None = None
    context_lengths: np.ndarray | None = None
    memory: list[Pair] | None = None
    maps: list[np.ndarray] | None = None
    keep: bool = False


@dataclass(frozen=True)
class AttentionKept:
    """What the backward pass of an attention module reads."""

    x: np.ndarray
    source: np.ndarray
    raw: tuple[np.ndarray, np.ndarray]
    rotary: tuple[np.ndarray, np.ndarray] | None
    pairs: Pairs
    weights: list[np.ndarray] | None
    merged: np.ndarray


class MultiHeadAttention(Module):
    """Self-attention with its projections; cross-attention where a context is given.

    x (B, T, W) in the module's dtype -> (B, T, W). `positions` serve a module made from a ModelConfig with rotary
    positions. Refused: `contract.checks.model.check_attention_call`. Rules: block-1 to block-5, block-10.
    """

    def __init__(self, config: BlockConfig, *, seed: int = 0, dtype: str = "float32", device: Any = None) -> None:
        self.refuse(config, seed, dtype, device, model=False)
        self.assemble(config, initial_values(attention_parameters(config), seed, dtype), dtype)

    def assemble(self, config: BlockConfig, values: Values, dtype: str, *, layout: str | None = None) -> None:
        """Take the parameters of `values`; `layout` of the rotation where the configuration does not say."""
        self.config, self.dtype, self._names = config, dtype, tuple(values)
        self.causal = bool(config.is_causal if isinstance(config, ModelConfig) else config.causal)
        self.layout = getattr(config, "rotary_layout", "half") if layout is None else layout
        self.query, self.key = Linear(below(values, "query")), Linear(below(values, "key"))
        self.value, self.output = Linear(below(values, "value")), Linear(below(values, "output"))
        self.query_norm = Norm(below(values, "query_norm"), config, "rms") if config.qk_norm else None
        self.key_norm = Norm(below(values, "key_norm"), config, "rms") if config.qk_norm else None
        self.sinks = values.get("sinks")

    def __call__(
        self,
        x: np.ndarray,
        *,
        mask: np.ndarray | None = None,
        bias: np.ndarray | None = None,
        kv_lengths: np.ndarray | None = None,
        segments: np.ndarray | None = None,
        positions: np.ndarray | None = None,
        rotary: tuple[np.ndarray, np.ndarray] | None = None,
        cache: KVCache | None = None,
        dropout_key: np.ndarray | None = None,
        context: np.ndarray | None = None,
        context_lengths: np.ndarray | None = None,
    ) -> np.ndarray:
        plan = check_attention_call(
            self.config, x, mask=mask, bias=bias, kv_lengths=kv_lengths, segments=segments, positions=positions,
            rotary=rotary, cache=cache, dropout_key=dropout_key, context=context, context_lengths=context_lengths,
            dtype=self.dtype, values=np.asarray,
        )  # fmt: skip
        if rotary is None and context is None:
            rotary = own_rotary(self.config, positions, plan.T, plan.past)
        scene = Scene(
            plan.past, mask, bias, kv_lengths, segments, rotary, cache,
            context=None if context is None else wide(context), context_lengths=context_lengths,
        )  # fmt: skip
        y, _ = self.run(wide(x), scene, dropout_key, cross=context is not None)
        if cache is not None:
            cache.advance(plan.T)
        return rounded(y, x.dtype)

    def run(
        self, x: np.ndarray, scene: Scene, key: np.ndarray | None, *, cross: bool = False
    ) -> tuple[np.ndarray, AttentionKept]:
        """x (B, T, W) float64 -> y, and what the backward pass needs; `key` is for the weights."""
        source = scene.context if cross and scene.context is not None else x
        raw_q = split_heads(self.query.run(x), self.config.heads)
        q = raw_q if self.query_norm is None else self.query_norm.run(raw_q)
        if cross and scene.memory is not None:
            raw_k, v = k, _ = scene.memory[scene.layer]
        else:
            raw_k, k, v = self.keys_and_values(source)
        rotary, first = None if cross else scene.rotary, 0
        if rotary is not None:
            q, k = (apply_rotary(z, *rotary, layout=self.layout) for z in (q, k))
        if scene.cache is not None and not cross:
            k, v, first = scene.cache.write(scene.layer, k, v)
        arguments = self._arguments(scene, key, cross, first)
        if scene.maps is not None and not cross:
            shown = attention_weights(q, k, **arguments)
            scene.maps.append(np.pad(shown, ((0, 0), (0, 0), (0, 0), (first, 0))))
        pairs = arrange(q, k, v, **arguments)
        out, _, weights = attend(pairs, keep=scene.keep)
        merged = merge_heads(join_heads(out))
        return self.output.run(merged), AttentionKept(x, source, (raw_q, raw_k), rotary, pairs, weights, merged)

    def keys_and_values(self, source: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(B, S, W) float64 -> the keys before and after their norm (B, G, S, D), and the values (B, G, S, Dv)."""
        raw_k, v = (split_heads(part.run(source), self.config.groups) for part in (self.key, self.value))
        return raw_k, raw_k if self.key_norm is None else self.key_norm.run(raw_k), v

    def _arguments(self, scene: Scene, key: np.ndarray | None, cross: bool, first: int) -> dict[str, Any]:
        """The keywords of `attention`: what the configuration says, and what the call says, of keys from `first` on."""
        config = self.config
        common = {
            "scale": config.scale,
            "softcap": config.softcap,
            "sinks": None if self.sinks is None else wide(self.sinks),
            "dropout_rate": 0.0 if key is None else config.dropout,
            "dropout_key": key,
        }
        if cross:
            return {**common, "kv_lengths": scene.context_lengths}
        return {
            **common,
            "mask": _from(first, scene.mask),
            "bias": _from(first, scene.bias),
            "causal": self.causal,
            "window": config.window,
            "q_offset": scene.past - first,
            "kv_lengths": None if scene.kv_lengths is None else np.maximum(np.asarray(scene.kv_lengths) - first, 0),
            "q_segments": scene.segments,
            "kv_segments": scene.segments,
        }


def _from(first: int, x: np.ndarray | None) -> np.ndarray | None:
    """A mask or bias over all keys, over those from `first` on."""
    return x if x is None or x.shape[-1] == 1 else x[..., first:]


class FeedForward(Module):
    """Two linear layers with an activation between them, or three with a gate.

    x (B, T, W) in the module's dtype -> (B, T, W). Rules: block-6, block-10. Source: gates, Shazeer 2020.
    """

    def __init__(self, config: BlockConfig, *, seed: int = 0, dtype: str = "float32", device: Any = None) -> None:
        self.refuse(config, seed, dtype, device, model=False)
        self.assemble(config, initial_values(feed_forward_parameters(config), seed, dtype), dtype)

    def assemble(self, config: BlockConfig, values: Values, dtype: str) -> None:
        self.config, self.dtype, self._names = config, dtype, tuple(values)
        self.up, self.down = Linear(below(values, "up")), Linear(below(values, "down"))
        self.gate = Linear(below(values, "gate")) if config.gated else None

    def __call__(self, x: np.ndarray, *, dropout_key: np.ndarray | None = None) -> np.ndarray:
        check_feed_forward_call(self.config, x, dropout_key=dropout_key, dtype=self.dtype)
        return rounded(dropped(self.run(wide(x))[0], self.config.dropout, dropout_key), x.dtype)

    def run(self, x: np.ndarray) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
        """x (B, T, W) float64 -> y before dropout, and (x, up, gate or nothing, share, what goes down)."""
        up = self.up.run(x)
        if self.gate is None:
            middle, share = self._activated(up)
            return self.down.run(middle), (x, up, share, middle)
        gate = self.gate.run(x)
        middle, share = self._activated(gate)
        middle *= up
        return self.down.run(middle), (x, up, gate, share, middle)

    def _activated(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The activation x s, and s."""
        share = SHARE[self.config.activation]
        if self.config.activation == "relu":
            return relu(x), share(x)  # inf times the share 0 would be NaN

        def both(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            s = share(x)
            return x * s, s

        return by_element(both, x)


@dataclass(frozen=True)
class BranchKept:
    """What the backward pass of one branch reads: its input, what f kept, f's output after dropout, f's dropout key."""

    x: np.ndarray
    inner: Any
    out: np.ndarray
    key: np.ndarray | None


class Block(Module):
    """One transformer block.

    x (B, T, W) in the module's dtype -> (B, T, W); arguments as in `MultiHeadAttention`, and a context (B, S, W) where
    the configuration has cross-attention. Refused: `contract.checks.model.check_block_call`. Rules: block-7 to block-9.
    """

    def __init__(self, config: BlockConfig, *, seed: int = 0, dtype: str = "float32", device: Any = None) -> None:
        self.refuse(config, seed, dtype, device, model=False)
        self.assemble(config, initial_values(block_parameters(config), seed, dtype), dtype)

    def assemble(self, config: BlockConfig, values: Values, dtype: str, *, layout: str | None = None) -> None:
        self.config, self.dtype, self._names = config, dtype, tuple(values)
        self.attention = MultiHeadAttention.__new__(MultiHeadAttention)
        self.attention.assemble(config, below(values, "attention"), dtype, layout=layout)
        self.cross = None
        if config.cross_attention:
            self.cross = MultiHeadAttention.__new__(MultiHeadAttention)
            self.cross.assemble(config, below(values, "cross"), dtype)
        self.ffn = FeedForward.__new__(FeedForward)
        self.ffn.assemble(config, below(values, "ffn"), dtype)
        norms = {
            name: Norm(below(values, name), config) if f"{name}.weight" in values else None
            for name in ("norm1", "norm2", "norm3", "norm1_post", "norm2_post")
        }
        self.norm1, self.norm2, self.norm3 = norms["norm1"], norms["norm2"], norms["norm3"]
        self.norm1_post, self.norm2_post = norms["norm1_post"], norms["norm2_post"]

    def __call__(
        self,
        x: np.ndarray,
        *,
        mask: np.ndarray | None = None,
        bias: np.ndarray | None = None,
        kv_lengths: np.ndarray | None = None,
        segments: np.ndarray | None = None,
        positions: np.ndarray | None = None,
        rotary: tuple[np.ndarray, np.ndarray] | None = None,
        cache: KVCache | None = None,
        dropout_key: np.ndarray | None = None,
        context: np.ndarray | None = None,
        context_lengths: np.ndarray | None = None,
    ) -> np.ndarray:
        scene = self.scene(
            x, mask=mask, bias=bias, kv_lengths=kv_lengths, segments=segments, positions=positions, rotary=rotary,
            cache=cache, dropout_key=dropout_key, context=context, context_lengths=context_lengths,
        )  # fmt: skip
        y, _ = self.run(wide(x), scene, dropout_key)
        if cache is not None:
            cache.advance(x.shape[1])
        return rounded(y, x.dtype)

    def scene(self, x: np.ndarray, **given: Any) -> Scene:
        """The checked arguments of a call."""
        plan = check_block_call(
            self.config, x, **given, dtype=self.dtype, cross=self.cross is not None, values=np.asarray
        )
        fields = {name: given[name] for name in ("mask", "bias", "kv_lengths", "segments", "cache", "context_lengths")}
        rotary, context = given["rotary"], given["context"]
        return Scene(
            past=plan.past,
            rotary=own_rotary(self.config, given["positions"], plan.T, plan.past) if rotary is None else rotary,
            context=None if context is None else wide(context),
            **fields,
        )

    def run(self, x: np.ndarray, scene: Scene, key: np.ndarray | None) -> tuple[np.ndarray, dict[str, BranchKept]]:
        """x (B, T, W) float64 -> y, and what each branch kept, by the name of its module."""
        keys = [None] * 5 if key is None else list(split(key, 5))
        branches: list[tuple[str, Any, Any, Any, Any]] = [
            ("attention", lambda h: self.attention.run(h, scene, keys[0]), keys[1], self.norm1, self.norm1_post)
        ]
        if self.cross is not None:
            cross = self.cross
            look = lambda h: cross.run(h, scene, keys[3], cross=True)  # noqa: E731 (the branches side by side)
            branches.append(("cross", look, keys[4], self.norm3, None))
        branches.append(("ffn", self.ffn.run, keys[2], self.norm2 or self.norm1, self.norm2_post))
        place, kept, start = self.config.norm_place, {}, x
        for name, f, drop_key, norm, post in branches:
            source = start if place == "parallel" else x
            out, inner = f(source if place == "post" else norm.run(source))
            out = dropped(out, self.config.dropout, drop_key)
            kept[name] = BranchKept(source, inner, out, drop_key)
            x = x + (out if post is None else post.run(out))
            if place == "post":
                x = norm.run(x)
        return x, kept
