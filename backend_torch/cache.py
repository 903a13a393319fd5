"""Keys and values of earlier positions, and generation with them. Rules: core_numpy.cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from core_numpy.contract.checks.training import check_cache, check_generate
from core_numpy.contract.config import BlockConfig, ModelConfig

from .arrays import values
from .random import categorical, fold_in

if TYPE_CHECKING:
    from .model import Transformer


class KVCache:
    """Room for `capacity` positions of keys (batch, G, capacity, D) and values (batch, G, capacity, Dv) per layer.

    It is written in place by the call that takes it and counts in `length`. What it holds carries no gradient.
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
        self.config, self.batch, self.dtype, self.length = config, batch, dtype, 0
        layers = config.layers if isinstance(config, ModelConfig) else 1
        shape, factory = (batch, config.groups, self.capacity), {"dtype": getattr(torch, dtype), "device": device}
        # Zeros, not empty memory: a masked key may still enter a product with weight 0, and 0 times NaN is NaN.
        self.keys = [torch.zeros(*shape, config.key_size, **factory) for _ in range(layers)]
        self.values = [torch.zeros(*shape, config.value_size, **factory) for _ in range(layers)]

    def write(self, k: Tensor, v: Tensor, layer: int = 0) -> tuple[Tensor, Tensor]:
        """Put k (B, G, T, D) and v (B, G, T, Dv) after `length`; gives all keys and values so far."""
        start, stop = self.length, self.length + k.shape[2]
        for store, new in ((self.keys[layer], k), (self.values[layer], v)):
            store[:, :, start:stop] = new.detach()
        return self.keys[layer][:, :, :stop], self.values[layer][:, :, :stop]

    def advance(self, T: int) -> None:
        """Count T positions as written."""
        self.length += T

    def layer(self, layer: int, config: BlockConfig) -> LayerCache:
        """What block `layer` of the model is handed."""
        return LayerCache(self, layer, config)


@dataclass(frozen=True)
class LayerCache:
    """One layer of a model's cache: what it writes counts when the model has gone through all its layers."""

    whole: KVCache
    index: int
    config: BlockConfig

    @property
    def batch(self) -> int:
        return self.whole.batch

    @property
    def capacity(self) -> int:
        return self.whole.capacity

    @property
    def dtype(self) -> str:
        return self.whole.dtype

    @property
    def length(self) -> int:
        return self.whole.length

    def write(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.whole.write(k, v, self.index)

    def advance(self, T: int) -> None:
        """The model counts for all its layers."""


@torch.no_grad()
def generate(
    model: Transformer,
    tokens: Tensor,
    *,
    max_new: int,
    temperature: float = 0,
    top_k: int | None = None,
    top_p: float | None = None,
    key: Tensor | None = None,
    lengths: Tensor | None = None,
    context: Tensor | None = None,
    context_lengths: Tensor | None = None,
) -> Tensor:
    """The prompt (B, T) and then `max_new` tokens per row, (B, T + max_new). Rules: core_numpy.cache.

    The model is in eval mode meanwhile: nothing is dropped.
    """
    new = check_generate(
        model.config, tokens, max_new=max_new, temperature=temperature, top_k=top_k, top_p=top_p, key=key,
        lengths=lengths, context=context, context_lengths=context_lengths, dtype=model.dtype, values=values,
    )  # fmt: skip
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        chosen = _continue(model, tokens, new, temperature, top_k, top_p, key, lengths, context, context_lengths)
    finally:
        for module in training:
            module.training = True
    return torch.cat([tokens, *chosen], 1)


def _continue(
    model: Transformer,
    tokens: Tensor,
    new: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    key: Tensor | None,
    lengths: Tensor | None,
    context: Tensor | None,
    context_lengths: Tensor | None,
) -> list[Tensor]:
    B, T = tokens.shape
    cache = KVCache(model.config, B, max(T + new - 1, 1), dtype=model.dtype, device=tokens.device)
    source = None if context is None else model.encode(context, context_lengths)
    # Columns of padding in front of each row once it is shifted to the right end.
    padding = torch.zeros(B, dtype=torch.int64, device=tokens.device) if lengths is None else T - lengths.long()
    columns = torch.arange(T, device=tokens.device)
    row = tokens.gather(1, (columns - padding[:, None]).remainder(T))
    given, start, chosen = row, 0, []
    for n in range(new):
        S = start + given.shape[1]
        arguments = {}
        if lengths is not None:
            keys = torch.arange(S, device=tokens.device)
            arguments["mask"] = (keys >= padding[:, None])[:, None, None, :]
            if model.config.positions in ("learned", "sinusoidal", "rotary"):
                arguments["positions"] = (keys[start:] - padding[:, None]).clamp(min=0)
        logits = model.decode(given, source=source, context_lengths=context_lengths, cache=cache, **arguments)[:, -1]
        token = _choose(logits, temperature, top_k, top_p, None if key is None else fold_in(key, n))
        chosen.append(token[:, None].to(tokens.dtype))
        given, start = chosen[-1], S
    return chosen


def _choose(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, key: Tensor | None) -> Tensor:
    """One token (B,) from logits (B, V); at temperature 0 the likeliest, the first of equals."""
    if temperature == 0 or key is None:
        return logits.argmax(-1)
    z = logits.float() / temperature
    if top_k is not None and top_k < z.shape[-1]:
        z = z.masked_fill(z < z.topk(top_k, -1).values[:, -1:], -torch.inf)
    if top_p is not None:
        ordered, order = z.sort(dim=-1, descending=True, stable=True)
        p = torch.softmax(ordered.double(), -1)
        # An entry leaves where those before it reach top_p already; the first never does.
        leave = p.cumsum(-1) - p >= top_p
        leave[:, 0] = False
        z = z.masked_fill(torch.zeros_like(leave).scatter(1, order, leave), -torch.inf)
    return categorical(key.to(z.device), z)
