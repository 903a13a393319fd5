"""Random numbers from counters: Threefry-2x32 with 20 rounds.

random-1: a key is two 32-bit words, here uint32 (2,); `key(seed)` is (seed >> 32, seed mod 2**32).
random-2: the block function of a key and a counter (high, low) is Threefry-2x32-20 (Salmon et al. 2011).
random-3: the bits of element n of a shape (row-major flat index n) are the two words of the block for the counter
(n >> 32, n mod 2**32), combined by exclusive or: an element's bits depend on the key and its index alone.
random-4: `split(key, n)[i]` is the block for the counter (0, i), and `fold_in(key, data)` that for (0, data).
random-5: uniform = (bits >> 9) * 2**-23, float32, exact; it is 0 at least and below 1.
random-6: bernoulli = uniform < p, p rounded to float32: p = 0 is never true and p = 1 always.
random-7: normal = sqrt(2) erfinv(u), u = max(2 * uniform - 1 + 2**-24, that of uniform = 0), rounded to float32.
random-8: categorical = argmax(logits - log(-log(u))), u = uniform, 2**-126 in place of 0; equal sums: the first one.
A logit of -inf is never drawn unless all are (then the first).
random-9: all of these are the bits of `jax.random` with its default, partitionable Threefry.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); the Gumbel trick: Yellott 1977.
"""

from __future__ import annotations

import math

import numpy as np

from .contract.checks.attention import check_key
from .contract.checks.random import (
    check_count,
    check_counter,
    check_fold,
    check_logits,
    check_probability,
    check_seed,
    check_shape,
)
from .special import erfinv

# Distances of rotation and the parity constant of the key schedule, from the paper's reference code (Random123).
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = np.uint32(0x1BD11BDA)

Word = np.ndarray | np.uint32


def key(seed: int) -> np.ndarray:
    """The key of a seed: its high and low 32-bit word, uint32 (2,). Refused: negative, 2**64 and above."""
    return np.array(check_seed(seed), dtype=np.uint32)


def split(key: np.ndarray, n: int = 2) -> np.ndarray:
    """n independent keys, uint32 (n, 2): row i is the block for the counter (0, i). Rules: random-4."""
    check_key("key", key)
    words = _threefry(key, np.uint32(0), np.arange(check_count(n), dtype=np.uint32))
    return np.stack(words, axis=-1)


def fold_in(key: np.ndarray, data: int) -> np.ndarray:
    """The key that `data` (from 0 to 2**32 - 1) makes of `key`: the block for (0, data). Rules: random-4."""
    check_fold(key, data, np.asarray)
    words = _threefry(key, np.uint32(0), np.uint32(int(data)))
    return np.stack(words, axis=-1)


def random_bits(key: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """uint32 of the given shape, every bit fair. Rules: random-3."""
    shape = check_shape(key, shape)
    return _bits(key, np.arange(math.prod(shape), dtype=np.uint64), 0).reshape(shape)


def bits_at(key: np.ndarray, low: np.ndarray, high: np.ndarray | int = 0) -> np.ndarray:
    """The bits at given flat indices: `bits_at(key, n)` is `random_bits(key, shape).ravel()[n]` for any shape.

    The index is high * 2**32 + low, broadcast against each other; low may hold a whole 64-bit index. What is drawn
    block by block is thus what is drawn at once. Rules: random-3.
    """
    check_counter(key, low, high)
    return _bits(key, low, high)


def uniform(key: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """float32 in [0, 1) with 23 random bits. Rules: random-5."""
    return _to_uniform(random_bits(key, shape))


def uniform_at(key: np.ndarray, low: np.ndarray, high: np.ndarray | int = 0) -> np.ndarray:
    """`uniform` at given flat indices, as `bits_at`. Rules: random-3, random-5."""
    return _to_uniform(bits_at(key, low, high))


def normal(key: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """float32 with mean 0 and variance 1, by the inverse of the distribution function. Rules: random-7."""
    # The sum is rounded to float32 before the inverse sees it, as in jax.random: the tails depend on its last bit.
    u = uniform(key, shape) * np.float32(2) + np.float32(2.0**-24 - 1)
    return np.asarray(math.sqrt(2.0) * erfinv(u.astype(np.float64)), dtype=np.float32)


def bernoulli(key: np.ndarray, p: float | np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """bool, True with probability p (a number, or a floating array that broadcasts to shape). Rules: random-6."""
    shape = check_shape(key, shape)
    rounded = check_probability(p, shape, np.asarray)
    return uniform(key, shape) < np.asarray(p if rounded is None else rounded, dtype=np.float32)


def categorical(key: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """Indices along the last axis, drawn with probability softmax(logits); int64 (...), logits (..., V). random-8."""
    check_logits(key, logits)
    u = np.maximum(uniform(key, logits.shape), np.finfo(np.float32).tiny).astype(np.float64)
    return np.argmax(logits.astype(np.float64) - np.log(-np.log(u)), axis=-1)


def _bits(key: np.ndarray, low: np.ndarray | int, high: np.ndarray | int) -> np.ndarray:
    index = np.asarray(low).astype(np.uint64)
    above = np.asarray(high).astype(np.uint64) + (index >> np.uint64(32))
    first, second = _threefry(key, above.astype(np.uint32), index.astype(np.uint32))
    return first ^ second


def _to_uniform(bits: np.ndarray) -> np.ndarray:
    return (bits >> np.uint32(9)).astype(np.float32) * np.float32(2.0**-23)


def _threefry(key: np.ndarray, high: Word, low: Word) -> tuple[np.ndarray, np.ndarray]:
    """random-2: twenty rounds of add, rotate, exclusive or; after every four, the next two words of the key."""
    first, second = np.asarray(key, dtype=np.uint32)
    words = (first, second, first ^ second ^ PARITY)
    # Sums are meant modulo 2**32; NumPy would warn about it for single words.
    with np.errstate(over="ignore"):
        x0, x1 = high + words[0], low + words[1]
        for group in range(5):
            for distance in ROTATIONS[group % 2]:
                x0 = x0 + x1
                x1 = ((x1 << np.uint32(distance)) | (x1 >> np.uint32(32 - distance))) ^ x0
            x0 = x0 + words[(group + 1) % 3]
            x1 = x1 + words[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1
