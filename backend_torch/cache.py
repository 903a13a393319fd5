"""Keys and values of earlier positions, and generation with them. Rules: core_numpy.cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core_numpy.contract.checks.training import check_cache, check_generate
from core_numpy.contract.config import BlockConfig
from core_numpy.contract.ring import cache_slots

from .arrays import find_device, require_tensors, values
from .random import categorical, fold_in
from .turning import Tables

if TYPE_CHECKING:
    from .model import Transformer


Pair = tuple[Tensor, Tensor]
Options = dict[str, Any]


class KVCache:
    """The keys (rotated) and values of earlier calls, per layer (batch, G, slots, D) and (batch, G, slots, Dv).

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
        self.config, self.batch, self.dtype, self.length, self.written = config, batch, dtype, 0, 0
        shapes = [(batch, config.groups, slots) for slots in cache_slots(config, self.capacity)]
        factory: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": find_device(device)}
        # Zeros, not empty memory: a masked key may still enter a product with weight 0, and 0 times NaN is NaN.
        self.keys = [torch.zeros(*shape, config.key_size, **factory) for shape in shapes]
        self.values = [torch.zeros(*shape, config.value_size, **factory) for shape in shapes]
        self.source: tuple[Tensor | None, Tensor | None] = (None, None)
        self.encoded: Tensor | None = None
        self.memory: list[Pair] | None = None
        self._rotary: Tables | None = None

    def rotary(self, tables: Callable[[int], Pair], T: int) -> Tables:
        """cos and sin of the next T positions; `tables(n)` makes those of positions 0 to n - 1.

        Kept and made for twice as many positions when they run out: a cache never outlives its frequencies.
        """
        end = self.length + T
        if self._rotary is None or self._rotary[0].shape[0] < end:
            self._rotary = Tables.of(*tables(min(2 * end, self.capacity)))
        return self._rotary.rows(self.length, end)

    def extend(self, k: Tensor, v: Tensor, options: Options, layer: int = 0) -> tuple[Tensor, Tensor, Options]:
        """Put k (B, G, T, D) and v (B, G, T, Dv) after `length`.

        Gives the keys and values that the new queries may see, and for these the `options` of `attention`, which
        speak of all positions so far.
        """
        start, T, slots = self.length, k.shape[2], self.keys[layer].shape[2]
        stores, new = (self.keys[layer], self.values[layer]), (k.detach(), v.detach())
        if T == 1:
            # A single query sees whatever is stored, in any order: no band is left to say.
            place, count = start % slots, min(start + 1, slots)
            stores[0].narrow(2, place, 1).copy_(new[0])
            stores[1].narrow(2, place, 1).copy_(new[1])
            k, v = stores[0].narrow(2, 0, count), stores[1].narrow(2, 0, count)
            return k, v, _of_slots(options, start, slots, k.device)
        if start + T <= slots:
            for store, x in zip(stores, new, strict=True):
                store[:, :, start : start + T] = x
            k, v = (store[:, :, : start + T] for store in stores) if start else new
            return k, v, options
        k, v, first = self._before(k, v, layer)
        kept = torch.arange(max(start, start + T - slots), start + T, device=k.device)
        for store, x in zip(stores, new, strict=True):
            store[:, :, kept % slots] = x[:, :, kept - start]
        return k, v, _from(options, first)

    def preview(self, k: Tensor, v: Tensor, options: Options, layer: int = 0) -> tuple[Tensor, Tensor, Options, int]:
        """What `extend` would give, nothing stored, keys in the order of their positions, and the first of these."""
        k, v, first = self._before(k, v, layer)
        return k, v, _from(options, first), first

    def _before(self, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor, int]:
        """k and v with what is stored and may be seen before them, and the position at which that begins."""
        slots = self.keys[layer].shape[2]
        first = max(0, self.length - (slots - 1))
        old = torch.arange(first, self.length, device=k.device) % slots
        stores = (self.keys[layer], self.values[layer])
        k, v = (torch.cat([store[:, :, old], x.detach()], 2) for store, x in zip(stores, (k, v), strict=True))
        return k, v, first

    def advance(self, T: int) -> None:
        """Count T positions as written."""
        self.length += T
        self.written = self.length

    def layer(self, layer: int, config: BlockConfig, pair: Pair | None = None) -> LayerCache:
        """What block `layer` of the model is handed; `pair`: the keys and values of its source."""
        return LayerCache(self, layer, config, pair)


def _from(options: Options, first: int) -> Options:
    """The options over all positions, over those from `first` on."""
    mask, bias = (x if x is None or x.shape[-1] == 1 else x[..., first:] for x in (options["mask"], options["bias"]))
    lengths = options["kv_lengths"]
    lengths = lengths if lengths is None or first == 0 else (lengths - first).clamp(min=0)
    return options | {"mask": mask, "bias": bias, "kv_lengths": lengths, "q_offset": options["q_offset"] - first}


def _of_slots(options: Options, position: int, slots: int, device: torch.device) -> Options:
    """The options of the query at `position`, over the slots: each holds the last position that it can."""
    options = options | {"causal": False, "window": None, "q_offset": None}
    mask, bias, lengths = options["mask"], options["bias"], options["kv_lengths"]
    if position < slots or (mask is None and bias is None and lengths is None):
        return options
    places = position - (position - torch.arange(slots, device=device)) % slots
    mask, bias = (x if x is None or x.shape[-1] == 1 else x[..., places] for x in (mask, bias))
    if lengths is not None:
        seen = (places < lengths[:, None])[:, None, None, :]
        mask = seen if mask is None else mask & seen
    return options | {"mask": mask, "bias": bias, "kv_lengths": None}


def read(q: Tensor, k: Tensor, v: Tensor, options: Options, common: Options) -> Tensor | None:
    """`attention` of a single query to all that a cache holds, (B, H, 1, Dv), or None where there is more to say.

    A step of decoding takes tens of microseconds per layer on a CPU, and checking and choosing would take as long.
    """
    said = any(options[name] is not None for name in ("mask", "bias", "kv_lengths", "q_segments"))
    if said or q.shape[2] != 1 or options["causal"] or common["softcap"] is not None or common["sinks"] is not None:
        return None
    if torch.is_grad_enabled() or q.dtype not in (torch.float32, torch.float64) or q.shape[3] != v.shape[3]:
        return None
    if torch.is_autocast_enabled(q.device.type) or torch.compiler.is_compiling():
        return None
    return F.scaled_dot_product_attention(q, k, v, scale=common["scale"], enable_gqa=k.shape[1] != q.shape[1])


@dataclass(frozen=True)
class LayerCache:
    """One layer of a model's cache: what it writes counts when the model has gone through all its layers."""

    whole: KVCache
    index: int
    config: BlockConfig
    pair: Pair | None = None

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

    @property
    def written(self) -> int:
        return self.whole.written

    def extend(self, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor, Options]:
        return self.whole.extend(k, v, options, self.index)

    def preview(self, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor, Options, int]:
        return self.whole.preview(k, v, options, self.index)

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
    require_tensors(tokens=tokens, key=key, lengths=lengths, context=context, context_lengths=context_lengths)
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
    memory = None if source is None else model.memory(source)
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
        logits = model.decode(
            given, source=source, memory=memory, context_lengths=context_lengths, cache=cache, last=True, **arguments
        )[:, -1]
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
