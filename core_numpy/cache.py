"""Keys and values of earlier positions, and generation with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .contract.checks.model import check_no_device
from .contract.checks.training import check_cache, check_generate
from .contract.config import BlockConfig
from .contract.ring import cache_slots
from .contract.tensor_file import numpy_dtype
from .layers import softmax
from .modules import wide
from .random import categorical, fold_in
from .rounding import rounded

if TYPE_CHECKING:
    from .model import Transformer

Pair = tuple[np.ndarray, np.ndarray]
Source = tuple[np.ndarray | None, np.ndarray | None]


class KVCache:
    """The keys (rotated) and values of earlier calls, per layer (B, G, slots, D) and (B, G, slots, Dv).

    cache-1: a call that takes a cache writes its T positions behind the `length` that are there, and sees them all.
    cache-2: what is computed step by step equals one pass over everything, to rounding.
    cache-3: writing past `capacity` is an error, and nothing is written.
    cache-4: one made from a BlockConfig serves one block; a capacity of None is the configuration's max_length.
    cache-5: in an encoder-decoder it holds the decoder's self-attention, and for cross-attention the keys and values
    of the source that the call at length 0 gave; a later call gives the same source, which is not read again. With a
    dropout key nothing of the source is kept.
    cache-11: a layer whose window reaches back `left` positions keeps the last left + 1 alone, position p in slot
    p modulo left + 1; every query sees what its window shows, however many positions a call brings.
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
        check_no_device(device)
        self.config, self.batch, self.dtype, self.length, self.written = config, batch, dtype, 0, 0
        shapes = [(batch, config.groups, slots) for slots in cache_slots(config, self.capacity)]
        self.keys = [np.zeros((*shape, config.key_size), numpy_dtype(dtype)) for shape in shapes]
        self.values = [np.zeros((*shape, config.value_size), numpy_dtype(dtype)) for shape in shapes]
        self.source: Source = (None, None)
        self.memory: list[Pair] | None = None

    def write(self, layer: int, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """Store T new positions of a layer, rounded to the cache's dtype.

        Gives keys and values, in float64 and in order, from the first position that the oldest new query may see, and
        that position. Rules: cache-1, cache-11.
        """
        T, slots, seen = k.shape[2], self.keys[layer].shape[2], []
        first = max(0, self.length - (slots - 1))
        kept = np.arange(max(self.length, self.length + T - slots), self.length + T)
        for store, new in ((self.keys[layer], k), (self.values[layer], v)):
            new = rounded(new, store.dtype)
            seen.append(wide(np.concatenate([store[:, :, np.arange(first, self.length) % slots], new], axis=2)))
            store[:, :, kept % slots] = new[:, :, kept - self.length]
        return seen[0], seen[1], first

    def advance(self, T: int) -> None:
        """Count T positions that every layer has written."""
        self.length += T
        self.written = self.length


def generate(
    model: Transformer,
    tokens: np.ndarray,
    *,
    max_new: int,
    temperature: float = 0,
    top_k: int | None = None,
    top_p: float | None = None,
    key: np.ndarray | None = None,
    lengths: np.ndarray | None = None,
    context: np.ndarray | None = None,
    context_lengths: np.ndarray | None = None,
) -> np.ndarray:
    """Continue each row by `max_new` tokens, one after the other.

    tokens (B, T), lengths (B,) where rows end before T, context (B, S) the source of an encoder-decoder -> (B, T +
    max_new) of tokens' dtype. Refused: `contract.checks.training.check_generate`.

    cache-6: temperature 0 takes the likeliest token, the first of equals; no random number is drawn.
    cache-7: new token n (from 0) is `categorical(fold_in(key, n), logits)` of the float32 logits divided by the
    temperature, after what `top_k` and then `top_p` leave out is set to -inf.
    cache-8: top_k keeps the k largest logits and all that equal the k-th.
    cache-9: top_p keeps the shortest list of likeliest tokens whose probability reaches top_p, one at least, equal
    logits in order of id.
    cache-10: a row that ends before T gives what it gives alone: its padding is never seen and takes no position.
    """
    check_generate(
        model.config, tokens, max_new=max_new, temperature=temperature, top_k=top_k, top_p=top_p, key=key,
        lengths=lengths, context=context, context_lengths=context_lengths, dtype=model.dtype, values=np.asarray,
    )  # fmt: skip
    B, T = tokens.shape
    padding = np.zeros(B, dtype=np.int64) if lengths is None else T - np.asarray(lengths, dtype=np.int64)
    # Rows are shifted to the right, so that every row's next token stands in the same column.
    columns = (np.arange(T) - padding[:, None]) % max(T, 1)
    inputs = np.take_along_axis(np.asarray(tokens), columns, axis=1)
    cache = KVCache(model.config, B, max(T + max_new - 1, 1), dtype=model.dtype)
    memory = None if context is None else model.memory(context, context_lengths)
    new: list[np.ndarray] = []
    for n in range(max_new):
        end = T + n
        places = np.arange(end - inputs.shape[1], end) - padding[:, None]
        mask = None if lengths is None else (np.arange(end) >= padding[:, None])[:, None, None, :]
        logits, _ = model.run(
            inputs,
            positions=np.maximum(places, 0),
            mask=mask,
            cache=cache,
            memory=memory,
            context_lengths=context_lengths,
            keep=False,
            last=True,
        )
        cache.advance(inputs.shape[1])
        last = rounded(logits[:, -1], numpy_dtype(model.dtype))
        inputs = _choose(last, temperature, top_k, top_p, key, n).astype(tokens.dtype)[:, None]
        new.append(inputs)
    return np.concatenate([tokens, *new], axis=1)


def _choose(
    logits: np.ndarray, temperature: float, top_k: int | None, top_p: float | None, key: np.ndarray | None, n: int
) -> np.ndarray:
    """The next token of each row, (B,); logits (B, V)."""
    if temperature == 0 or key is None:
        return np.argmax(wide(logits), axis=-1)
    z = logits.astype(np.float32) / np.float32(temperature)
    if top_k is not None and top_k < z.shape[-1]:
        z = np.where(z >= np.sort(z, axis=-1)[:, -top_k, None], z, -np.inf)
    if top_p is not None:
        order = np.argsort(-z, axis=-1, kind="stable")
        p = softmax(wide(np.take_along_axis(z, order, axis=-1)))
        # A token stays where what is likelier does not reach top_p without it.
        stays = np.cumsum(p, axis=-1) - p < top_p
        stays[:, 0] = True
        z = np.where(np.take_along_axis(stays, np.argsort(order, axis=-1), axis=-1), z, -np.inf)
    return categorical(fold_in(key, n), z.astype(np.float32))
