"""Attention and feed-forward with their parameters, and the block. Rules: core_numpy.block.

All are `nn.Module`s with `nn.Linear` inside: `state_dict` keys are the canonical names, and they train in anybody's
loop with `torch.optim`, under `torch.compile` and `torch.func.functional_call`. In train mode dropout without a key
draws one from torch's generator; in eval mode nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core_numpy.contract import parameters as contract
from core_numpy.contract.checks.model import (
    check_attention_call,
    check_block_call,
    check_feed_forward_call,
    check_module,
)
from core_numpy.contract.config import BlockConfig, ModelConfig

from .arrays import require_tensors, values
from .attention import attention, attention_weights
from .cache import KVCache, LayerCache, Pair, read
from .encodings import rotary_tables, rotate
from .frequencies import scaled_frequencies
from .hooks import direct, hooked
from .initial import initialise, linear
from .layers import drop, normalise_layer, normalise_rms
from .place import part
from .products import Joined, project
from .random import split
from .turning import Tables, turned, turns

Rotary = tuple[Tensor, Tensor]


class Norm(nn.Module):
    """The layer norm or RMS norm that a configuration asks for, over the last axis; any shape (..., size)."""

    def __init__(self, config: BlockConfig, factory: dict[str, Any], *, size: int | None = None) -> None:
        """`size` given: the RMS norm over a head of `qk_norm`, which has no bias whatever the block's norm is."""
        super().__init__()
        self.rms = config.norm == "rms" or size is not None
        self.eps, self.unit_offset = config.norm_eps, config.unit_offset
        self.weight = nn.Parameter(torch.empty(config.width if size is None else size, **factory))
        has_bias = config.has_norm_bias and size is None
        self.bias = nn.Parameter(torch.empty(config.width, **factory)) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.rms:
            return normalise_rms(x, self.weight, self.eps, self.unit_offset)
        return normalise_layer(x, self.weight, self.bias, self.eps, self.unit_offset)


class MultiHeadAttention(nn.Module):
    """Projections, optional q/k norm and rotation, attention, output projection. Rules: core_numpy.block.

    x (B, T, W) -> (B, T, W); with a context (B, S, W) the keys and values are the context's.
    """

    def __init__(self, config: BlockConfig, *, seed: int = 0, dtype: str = "float32", device: Any = None) -> None:
        super().__init__()
        check_module(config, seed, dtype, model=False)
        self.config = config
        self.causal = config.is_causal if isinstance(config, ModelConfig) else bool(config.causal)
        self.rotary_layout = config.rotary_layout if isinstance(config, ModelConfig) else "half"
        width, bias, factory = config.width, config.attention_bias, parts(dtype)
        self.query = linear(width, config.heads * config.key_size, bias=bias, factory=factory)
        self.key = linear(width, config.groups * config.key_size, bias=bias, factory=factory)
        self.value = linear(width, config.groups * config.value_size, bias=bias, factory=factory)
        self.output = linear(config.heads * config.value_size, width, bias=config.has_output_bias, factory=factory)
        self.query_norm = Norm(config, factory, size=config.key_size) if config.qk_norm else None
        self.key_norm = Norm(config, factory, size=config.key_size) if config.qk_norm else None
        self.sinks = nn.Parameter(torch.empty(config.heads, **factory)) if config.sinks else None
        # Which query heads are here, where a trainer spreads them over devices: (first, past the last).
        self.here: tuple[int, int] | None = None
        # The three first layers as one, while a trainer trains them.
        self.joint: Joined | None = None
        initialise(self, contract.attention_parameters(config), seed, device)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        kv_lengths: Tensor | None = None,
        segments: Tensor | None = None,
        positions: Tensor | None = None,
        rotary: Rotary | None = None,
        cache: KVCache | LayerCache | None = None,
        dropout_key: Tensor | None = None,
        context: Tensor | None = None,
        context_lengths: Tensor | None = None,
    ) -> Tensor:
        own: dict[str, Any] = {
            "mask": mask, "bias": bias, "kv_lengths": kv_lengths, "segments": segments, "cache": cache,
            "dropout_key": dropout_key, "context": context, "context_lengths": context_lengths,
        }  # fmt: skip
        require_tensors(x=x, positions=positions, **own)
        plan = check_attention_call(
            self.config, x, **own, positions=positions, rotary=rotary, dtype=dtype_of(self.query.weight), values=values
        )
        y = self.run(x, **own, rotary=self._own_rotary(rotary, positions, context, plan, x.device))
        if cache is not None:
            cache.advance(x.shape[1])
        return y

    def run(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        kv_lengths: Tensor | None = None,
        segments: Tensor | None = None,
        rotary: Rotary | None = None,
        cache: KVCache | LayerCache | None = None,
        dropout_key: Tensor | None = None,
        context: Tensor | None = None,
        context_lengths: Tensor | None = None,
        pair: Pair | None = None,
    ) -> Tensor:
        """The call unchecked, its cache written and not advanced; `pair`: the context's keys and values, if known."""
        q, k, v = self._project(x, context, rotary, pair)
        if context is None:
            options = self._options(mask, bias, kv_lengths, segments, 0 if cache is None else cache.length)
            if cache is not None:
                k, v, options = cache.extend(k, v, options)
        else:
            options = {"kv_lengths": context_lengths}
        key = dropout_key_of(self, self.config.dropout, dropout_key, x.device)
        rate = 0.0 if key is None else self.config.dropout
        common = self._common()
        out = read(q, k, v, options, common) if cache is not None and key is None else None
        if out is None:
            options = options | common | {"dropout_rate": rate, "dropout_key": key}
            here = part()
            if here is not None and here.ring is not None:
                from .ring import ring_attention  # only where positions are spread

                out = ring_attention(here, q, k, v, options)
            else:
                out = attention(q, k, v, **options)
        return project(out.transpose(1, 2).flatten(2), self.output)[0]

    def weights(
        self, x: Tensor, *, mask: Any = None, bias: Any = None, kv_lengths: Any = None, segments: Any = None,
        rotary: Any = None, cache: Any = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        """The weights (B, H, T, S) of the same self-attention, before dropout, unchecked; a cache is only read."""
        q, k, v = self._project(x, None, rotary, None)
        options = self._options(mask, bias, kv_lengths, segments, 0 if cache is None else cache.length)
        first = 0
        if cache is not None:
            k, v, options, first = cache.preview(k, v, options)
        return F.pad(attention_weights(q, k, **options, **self._common()), (first, 0))

    def keys_and_values(self, source: Tensor) -> Pair:
        """(B, S, W) -> (B, G, S, D), normalised but not rotated, and (B, G, S, Dv)."""
        return self._pair(*project(source, self.key, self.value))

    def _pair(self, k: Tensor, v: Tensor) -> Pair:
        k, v = heads_of(k, self.config.key_size), heads_of(v, self.config.value_size)
        return (k if self.key_norm is None else self.key_norm(k)), v

    def _project(
        self, x: Tensor, context: Tensor | None, rotary: Rotary | None, pair: Pair | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, H, T, D), k (B, G, S, D), v (B, G, S, Dv)."""
        if pair is None and context is None and self.query_norm is None and self.rotary_layout == "half":
            size = self.config.key_size
            if turns(rotary, x, size):
                q, k = turned(self.query(x), self.key(x), cast(Tables, rotary))
                return q, k, heads_of(self.value(x), self.config.value_size)
        if pair is None and context is None:
            q, *projected = project(x, self.query, self.key, self.value, joint=self.joint)
            k, v = self._pair(*projected)
        else:
            (q,) = project(x, self.query)
            k, v = self.keys_and_values(cast(Tensor, context)) if pair is None else pair
        q = heads_of(q, self.config.key_size)
        if self.query_norm is not None:
            q = self.query_norm(q)
        if rotary is not None:
            q, k = (rotate(y, *rotary, self.rotary_layout) for y in (q, k))
        return q, k, v

    def _options(self, mask: Any, bias: Any, kv_lengths: Any, segments: Any, past: int) -> dict[str, Any]:
        """What `attention` is told of self-attention, over all keys so far."""
        if self.here is not None and bias is not None and bias.shape[1] != 1:
            bias = bias[:, slice(*self.here)]
        return {
            "mask": mask, "bias": bias, "causal": self.causal, "window": self.config.window, "q_offset": past,
            "kv_lengths": kv_lengths, "q_segments": segments, "kv_segments": segments,
        }  # fmt: skip

    def _common(self) -> dict[str, Any]:
        """What `attention` is told of every call."""
        sinks: Tensor | None = self.sinks
        if self.here is not None and sinks is not None:
            sinks = sinks[slice(*self.here)]
        return {"scale": self.config.scale, "softcap": self.config.softcap, "sinks": sinks}

    def _own_rotary(self, rotary: Any, positions: Any, context: Any, plan: Any, device: Any) -> Rotary | None:
        """The given tables, or those that a part made from a rotary ModelConfig makes for itself."""
        config = self.config
        if rotary is not None or context is not None or not isinstance(config, ModelConfig):
            return rotary
        return rotary_of(config, positions, plan.past, plan.T, device) if config.positions == "rotary" else None


class FeedForward(nn.Module):
    """down(act(up(x))), or down(act(gate(x)) * up(x)) where gated. Rules: core_numpy.block.

    x (B, T, W) -> (B, T, W).
    """

    def __init__(self, config: BlockConfig, *, seed: int = 0, dtype: str = "float32", device: Any = None) -> None:
        super().__init__()
        check_module(config, seed, dtype, model=False)
        self.config = config
        width, hidden, bias, factory = config.width, config.hidden_size, config.ffn_bias, parts(dtype)
        self.up = linear(width, hidden, bias=bias, factory=factory)
        self.gate = linear(width, hidden, bias=bias, factory=factory) if config.gated else None
        self.down = linear(hidden, width, bias=bias, factory=factory)
        self.joint: Joined | None = None  # up and gate as one, while a trainer trains them
        initialise(self, contract.feed_forward_parameters(config), seed, device)

    def forward(self, x: Tensor, *, dropout_key: Tensor | None = None) -> Tensor:
        require_tensors(x=x, dropout_key=dropout_key)
        check_feed_forward_call(self.config, x, dropout_key=dropout_key, dtype=dtype_of(self.up.weight))
        return self.run(x, dropout_key=dropout_key)

    def run(self, x: Tensor, *, dropout_key: Tensor | None = None) -> Tensor:
        """The call unchecked."""
        key = dropout_key_of(self, self.config.dropout, dropout_key, x.device)
        if self.gate is None:
            inner = activate(self.config.activation, project(x, self.up)[0])
        else:
            gate, up = project(x, self.gate, self.up, joint=self.joint)
            inner = activate(self.config.activation, gate) * up
        return drop(project(inner, self.down)[0], self.config.dropout, key)


class Block(nn.Module):
    """Attention and feed-forward around a residual stream, x (B, T, W) -> (B, T, W). Rules: core_numpy.block.

    pre x + f(norm(x)); post norm(x + f(x)); sandwich x + norm_post(f(norm(x))); parallel both at once.
    """

    def __init__(self, config: BlockConfig, *, seed: int = 0, dtype: str = "float32", device: Any = None) -> None:
        super().__init__()
        check_module(config, seed, dtype, model=False)
        self.config = config
        factory, inner = parts(dtype), {"dtype": dtype, "device": "meta"}  # type: tuple[dict[str, Any], dict[str, Any]]
        self.attention = MultiHeadAttention(config, **inner)
        # A sink is a property of self-attention.
        self.cross = MultiHeadAttention(config.replace(sinks=False), **inner) if config.cross_attention else None
        self.ffn = FeedForward(config, **inner)
        self.norm1 = Norm(config, factory)
        self.norm2 = None if config.shared_norm else Norm(config, factory)
        self.norm3 = Norm(config, factory) if config.cross_attention else None
        sandwich = config.norm_place == "sandwich"
        self.norm1_post = Norm(config, factory) if sandwich else None
        self.norm2_post = Norm(config, factory) if sandwich else None
        initialise(self, contract.block_parameters(config), seed, device)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        kv_lengths: Tensor | None = None,
        segments: Tensor | None = None,
        positions: Tensor | None = None,
        rotary: Rotary | None = None,
        cache: KVCache | LayerCache | None = None,
        dropout_key: Tensor | None = None,
        context: Tensor | None = None,
        context_lengths: Tensor | None = None,
    ) -> Tensor:
        own: dict[str, Any] = {
            "mask": mask, "bias": bias, "kv_lengths": kv_lengths, "segments": segments, "cache": cache,
            "dropout_key": dropout_key, "context": context, "context_lengths": context_lengths,
        }  # fmt: skip
        require_tensors(x=x, positions=positions, **own)
        plan = check_block_call(
            self.config, x, **own, positions=positions, rotary=rotary, dtype=dtype_of(self.attention.query.weight),
            cross=self.cross is not None, values=values,
        )  # fmt: skip
        y = self.run(x, **own, rotary=self.attention._own_rotary(rotary, positions, None, plan, x.device))
        if cache is not None:
            cache.advance(x.shape[1])
        return y

    def run(
        self,
        x: Tensor,
        *,
        dropout_key: Tensor | None = None,
        context: Tensor | None = None,
        context_lengths: Tensor | None = None,
        **own: Any,
    ) -> Tensor:
        """The call unchecked, its cache written and not advanced; `own` are the arguments of the self-attention."""
        rate, cache = self.config.dropout, own.get("cache")
        key = dropout_key_of(self, rate, dropout_key, x.device)
        keys = (None,) * 5 if key is None else split(key, 5).unbind()

        def attend(x: Tensor) -> Tensor:
            return drop(direct(self.attention)(x, **own, dropout_key=keys[0]), rate, keys[1])

        def feed(x: Tensor) -> Tensor:
            return direct(self.ffn)(x, dropout_key=keys[2])

        if self.config.norm_place == "parallel":
            first = self.norm1(x)
            second = first if self.norm2 is None else self.norm2(x)
            return x + attend(first) + feed(second)
        x = self._branch(x, attend, self.norm1, self.norm1_post)
        if self.cross is not None and self.norm3 is not None:
            known = {"pair": cache.pair} if isinstance(cache, LayerCache) and not hooked(self.cross) else {}
            given = {"context": context, "context_lengths": context_lengths, "dropout_key": keys[3], **known}
            cross = direct(self.cross)
            x = self._branch(x, lambda x: drop(cross(x, **given), rate, keys[4]), self.norm3, None)
        return self._branch(x, feed, self.norm2 or self.norm1, self.norm2_post)

    def _branch(self, x: Tensor, f: Callable[[Tensor], Tensor], norm: Norm, post: Norm | None) -> Tensor:
        """x and what f adds to it, with the norms where the configuration places them."""
        if self.config.norm_place == "post":
            return norm(x + f(x))
        y = f(norm(x))
        return x + (y if post is None else post(y))


def parts(dtype: str) -> dict[str, Any]:
    """Where parts are made before `initialise` gives them memory: nowhere, so that nothing is drawn or filled twice."""
    return {"dtype": getattr(torch, dtype), "device": "meta"}


def dtype_of(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def heads_of(x: Tensor, size: int) -> Tensor:
    """(B, T, heads * size) -> (B, heads, T, size), however many heads there are here."""
    return x.unflatten(2, (-1, size)).transpose(1, 2)


def dropout_key_of(module: nn.Module, rate: float, key: Tensor | None, device: torch.device) -> Tensor | None:
    """The key a call drops with: None in eval mode or at rate 0; drawn from torch's generator where none is given."""
    if rate == 0.0 or not module.training:
        return None
    return torch.randint(2**32, (2,), device=device) if key is None else key


def activate(name: str, x: Tensor) -> Tensor:
    if name in ("silu", "swiglu"):
        return F.silu(x)
    if name == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if name in ("gelu_tanh", "geglu_tanh") else "none")


def rotary_of(config: ModelConfig, positions: Tensor | None, past: int, T: int, device: torch.device) -> Rotary:
    """cos and sin (T, r) or (B, T, r) of the positions, by default those after `past`."""
    frequencies, factor = scaled_frequencies(config.rotary_size, config.rotary_base, config.rotary_scaling, past + T)
    if positions is None:
        positions = torch.arange(past, past + T, device=device)
    return rotary_tables(positions, frequencies, attention_factor=factor)
