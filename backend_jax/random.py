"""Random numbers from counters: Threefry-2x32 with 20 rounds, in uint32 arithmetic. Rules: core_numpy.random.

Written out rather than taken from `jax.random`, whose bits depend on a global flag and on the installed
implementation; a test holds the two equal. Keys are raw uint32 (2,) arrays; everything traces under `jax.jit`.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from core_numpy.contract.checks.attention import check_key
from core_numpy.contract.checks.random import (
    WORD,
    check_count,
    check_counter,
    check_fold,
    check_logits,
    check_probability,
    check_seed,
    check_shape,
)

from .arrays import values
from .words import upper

# Distances of rotation and the parity constant of the key schedule, from the paper's reference code (Random123).
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA


def key(seed: int) -> jax.Array:
    """The key of a seed: its high and low 32-bit word, uint32 (2,). Rules: core_numpy.random."""
    return jnp.asarray(np.array(check_seed(seed), dtype=np.uint32))


def split(key: jax.Array, n: int = 2) -> jax.Array:
    """n independent keys, uint32 (n, 2). Rules: core_numpy.random."""
    check_key("key", key)
    counter = jnp.arange(check_count(n), dtype=jnp.uint32)
    return jnp.stack(_threefry(key, jnp.zeros_like(counter), counter), axis=-1)


def fold_in(key: jax.Array, data: int | jax.Array) -> jax.Array:
    """The key that `data` (from 0 to 2**32 - 1, may be traced) makes of `key`. Rules: core_numpy.random."""
    value = check_fold(key, data, values)
    counter = jnp.asarray(data if value is None else np.uint32(value)).astype(jnp.uint32)
    return jnp.stack(_threefry(key, jnp.zeros_like(counter), counter), axis=-1)


def random_bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """uint32 of the given shape, every bit fair. Rules: core_numpy.random."""
    return _shaped(key, check_shape(key, shape))


def bits_at(key: jax.Array, low: jax.Array, high: jax.Array | int = 0) -> jax.Array:
    """The bits at flat indices high * 2**32 + low, words of 32 bits. Rules: core_numpy.random.

    With x64 on, low may hold a whole 64-bit index; without it there are no such integers, so indices from 2**32
    on come as two words.
    """
    check_counter(key, low, high)
    return _bits(key, _word(low), _word(high) + _high_word(low))


def uniform(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """float32 in [0, 1) with 23 random bits. Rules: core_numpy.random."""
    return _to_uniform(random_bits(key, shape))


def uniform_at(key: jax.Array, low: jax.Array, high: jax.Array | int = 0) -> jax.Array:
    """`uniform` at given flat indices, as `bits_at`. Rules: core_numpy.random."""
    return _to_uniform(bits_at(key, low, high))


def uniform_columns(key: jax.Array, shape: tuple[int, ...], columns: jax.Array) -> jax.Array:
    """`uniform` of a shape (B, T, W) whose columns are kept in another order: column t is `columns[t]`'s."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return _to_uniform(_bits(key, *_index_words(shape, strides, columns)))


def normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """float32 with mean 0 and variance 1, by `jax.lax.erf_inv`. Rules: core_numpy.random."""
    u = uniform(key, shape) * np.float32(2) + np.float32(2.0**-24 - 1)
    return np.float32(math.sqrt(2.0)) * jax.lax.erf_inv(u)


def bernoulli(key: jax.Array, p: float | jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """bool, True with probability p (a number, or a floating array that broadcasts to shape)."""
    shape = check_shape(key, shape)
    rounded = check_probability(p, shape, values)
    return uniform(key, shape) < jnp.asarray(p if rounded is None else rounded, dtype=jnp.float32)


def categorical(key: jax.Array, logits: jax.Array) -> jax.Array:
    """Indices along the last axis, drawn with probability softmax(logits); int32 (...), logits (..., V)."""
    check_logits(key, logits)
    u = jnp.maximum(uniform(key, logits.shape), jnp.finfo(jnp.float32).tiny)
    wide = jnp.promote_types(logits.dtype, jnp.float32)
    return jnp.argmax(logits.astype(wide) - jnp.log(-jnp.log(u)), axis=-1).astype(jnp.int32)


# One program where bits are drawn by themselves, in place of one for each operation; inside others' programs no trace.
@partial(jax.jit, static_argnames="shape", inline=True)
def _shaped(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return _bits(key, *_index_words(shape, strides))


def _bits(key: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    first, second = _threefry(key, high, low)
    return first ^ second


@partial(jax.jit, inline=True)
def _to_uniform(bits: jax.Array) -> jax.Array:
    return (bits >> 9).astype(jnp.float32) * np.float32(2.0**-23)


def _word(index: jax.Array | int) -> jax.Array:
    """The low 32 bits."""
    return jnp.uint32(index % WORD) if isinstance(index, int) else jnp.asarray(index).astype(jnp.uint32)


def _high_word(index: jax.Array | int) -> jax.Array:
    """What is above the low 32 bits: zero unless the index is 64 bits wide."""
    if isinstance(index, int):
        return jnp.uint32(index // WORD)
    wide = jnp.asarray(index)
    return (wide >> 32).astype(jnp.uint32) if wide.dtype.itemsize == 8 else jnp.uint32(0)


def _index_words(
    shape: tuple[int, ...], strides: list[int], columns: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """(low, high) of sum(index * stride) over the axes, in 32-bit arithmetic because 64-bit may be off.

    columns: the indices along axis 1, where they are not in order.
    """
    fits = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) < WORD
    low = high = jnp.zeros(shape, jnp.uint32)
    for axis, stride in enumerate(strides):
        i = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        if axis == 1 and columns is not None:
            i = jnp.broadcast_to(columns.astype(jnp.uint32)[:, None], shape)
        term = i * jnp.uint32(stride % WORD)
        low = low + term
        if not fits:
            high = high + upper(i, jnp.uint32(stride % WORD)) + i * jnp.uint32(stride // WORD)
            # An unsigned sum below one of its terms has overflown.
            high = high + (low < term).astype(jnp.uint32)
    return low, high


@jax.jit
def _threefry(key: jax.Array, high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Twenty rounds of add, rotate, exclusive or; after every four, the next two words of the key.

    As a loop on a CPU, as in `jax.random`: XLA would copy the rounds into every use of the bits and compile them each
    time, a second for each layer with dropout and more. Elsewhere a loop would cost a launch for each turn.
    """
    first, second = key.astype(jnp.uint32)
    words = (first, second, first ^ second ^ jnp.uint32(PARITY))
    x0, x1 = jnp.broadcast_arrays(high + words[0], low + words[1])
    return jax.lax.platform_dependent(x0, x1, words, cpu=_rolled, default=_unrolled)


def _unrolled(x0: jax.Array, x1: jax.Array, words: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    for group in range(5):
        x0, x1 = _four(x0, x1, ROTATIONS[group % 2])
        x0 = x0 + words[(group + 1) % 3]
        x1 = x1 + words[(group + 2) % 3] + jnp.uint32(group + 1)
    return x0, x1


def _rolled(x0: jax.Array, x1: jax.Array, words: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    def group(number: jax.Array, state: tuple[Any, ...]) -> tuple[Any, ...]:
        x0, x1, (next_word, after, last), (distances, others) = state
        x0, x1 = _four(x0, x1, distances)
        x1 = x1 + after + (number + 1).astype(jnp.uint32)
        return x0 + next_word, x1, (after, last, next_word), (others, distances)

    turns = tuple(jnp.array(distances, jnp.uint32) for distances in ROTATIONS)
    return jax.lax.fori_loop(0, 5, group, (x0, x1, (words[1], words[2], words[0]), turns))[:2]


def _four(x0: jax.Array, x1: jax.Array, distances: Any) -> tuple[jax.Array, jax.Array]:
    for place in range(4):
        x0 = x0 + x1
        x1 = ((x1 << distances[place]) | (x1 >> (32 - distances[place]))) ^ x0
    return x0, x1
