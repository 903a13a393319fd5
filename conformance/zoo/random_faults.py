"""Faults of the portable random numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import core_numpy as core

from .faults import Fault, Row, from_rows


def _words(key: np.ndarray, high: Any, low: Any) -> tuple[np.ndarray, np.ndarray]:
    """The two words of a block, written again from the paper."""
    first, second = (int(x) for x in key)
    words = (first, second, first ^ second ^ 0x1BD11BDA)
    limit = np.uint64(0xFFFFFFFF)
    x0 = (np.asarray(high, np.uint64) + np.uint64(words[0])) & limit
    x1 = (np.asarray(low, np.uint64) + np.uint64(words[1])) & limit
    for group in range(5):
        for distance in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x0 = (x0 + x1) & limit
            x1 = (((x1 << np.uint64(distance)) | (x1 >> np.uint64(32 - distance))) & limit) ^ x0
        x0 = (x0 + np.uint64(words[(group + 1) % 3])) & limit
        x1 = (x1 + np.uint64(words[(group + 2) % 3] + group + 1)) & limit
    return x0.astype(np.uint32), x1.astype(np.uint32)


def bits_first_word(key: np.ndarray, shape: Any) -> np.ndarray:
    return _words(key, 0, np.arange(math.prod(shape)))[0].reshape(tuple(shape))


def bits_swapped_counter(key: np.ndarray, shape: Any) -> np.ndarray:
    index = np.arange(math.prod(shape))
    first, second = _words(key, index, np.zeros_like(index))
    return (first ^ second).reshape(tuple(shape))


def bits_in_halves(key: np.ndarray, shape: Any) -> np.ndarray:
    """The older layout: the counters' halves make pairs, and both words of a block are elements."""
    n = math.prod(shape)
    half = (n + 1) // 2
    index = np.arange(2 * half)
    words = _words(key, index[:half], np.where(index[half:] < n, index[half:], 0))
    return np.concatenate(words)[:n].reshape(tuple(shape))


def key_of_low_word(seed: int) -> np.ndarray:
    return core.key(seed % 2**32)


def split_in_halves(key: np.ndarray, n: int = 2) -> np.ndarray:
    return bits_in_halves(key, (2 * n,)).reshape(n, 2)


def fold_by_adding(key: np.ndarray, data: int) -> np.ndarray:
    return (np.asarray(key, np.uint32) + np.array([0, data], np.uint32)).astype(np.uint32)


def fold_high(key: np.ndarray, data: int) -> np.ndarray:
    return np.stack(_words(key, data, 0), axis=-1)


def uniform_24(key: np.ndarray, shape: Any) -> np.ndarray:
    return (core.random_bits(key, tuple(shape)) >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def uniform_open(key: np.ndarray, shape: Any) -> np.ndarray:
    return core.uniform(key, tuple(shape)) + np.float32(2.0**-24)


def uniform_low_bits(key: np.ndarray, shape: Any) -> np.ndarray:
    return (core.random_bits(key, tuple(shape)) & np.uint32(0x7FFFFF)).astype(np.float32) * np.float32(2.0**-23)


def bernoulli_above(key: np.ndarray, p: float, shape: Any) -> np.ndarray:
    return core.uniform(key, tuple(shape)) >= np.float32(p)


def normal_box_muller(key: np.ndarray, shape: Any) -> np.ndarray:
    first, second = core.split(key)
    u, v = (core.uniform(one, tuple(shape)).astype(np.float64) for one in (first, second))
    return (np.sqrt(-2.0 * np.log1p(-u)) * np.cos(2.0 * np.pi * v)).astype(np.float32)


def normal_unscaled(key: np.ndarray, shape: Any) -> np.ndarray:
    return (core.normal(key, tuple(shape)) / np.float32(math.sqrt(2.0))).astype(np.float32)


_ROWS: list[Row] = [
    ("bits-first-word", "one word of each block in place of both",
     "blatant", {"random_bits": bits_first_word},
     "random_bits gives the block's first word; the contract is both words combined by exclusive or"),
    ("bits-counter-swapped", "the counter's words swapped",
     "blatant", {"random_bits": bits_swapped_counter},
     "the counter's words are swapped; the contract is (index >> 32, index mod 2^32)"),
    ("bits-in-halves", "the older counter layout, in which bits depend on the size of the draw",
     "blatant", {"random_bits": bits_in_halves},
     "bits are drawn by the older layout in halves; the contract is one counter per element"),
    ("key-low-word", "seeds past 32 bits lose their high word",
     "rare", {"key": key_of_low_word},
     "key(seed) drops the seed's high word; the contract is (seed >> 32, seed mod 2^32)"),
    ("split-in-halves", "split by the older layout",
     "blatant", {"split": split_in_halves},
     "split draws by the older layout; the contract is key i = the block for the counter (0, i)"),
    ("fold-in-adds", "folding in by addition: neighbouring keys overlap",
     "blatant", {"fold_in": fold_by_adding},
     "fold_in adds to the key; the contract is the block for the counter (0, data)"),
    ("fold-in-high", "the data in the counter's high word",
     "subtle", {"fold_in": fold_high},
     "fold_in counts in the high word; the contract is the block for the counter (0, data)"),
    ("uniform-24-bits", "24 random bits",
     "subtle", {"uniform": uniform_24},
     "uniform has 24 random bits; the contract is 23: (bits >> 9) 2^-23"),
    ("uniform-open", "half a step above",
     "subtle", {"uniform": uniform_open},
     "uniform is shifted by half a step; the contract is (bits >> 9) 2^-23, with 0"),
    ("uniform-low-bits", "the low bits in place of the high ones",
     "blatant", {"uniform": uniform_low_bits},
     "uniform takes the low bits; the contract is the high ones: (bits >> 9) 2^-23"),
    ("bernoulli-above", "True with probability 1 - p",
     "blatant", {"bernoulli": bernoulli_above},
     "bernoulli is true with probability 1 - p; the contract is uniform < p"),
    ("normal-box-muller", "another way to a normal distribution",
     "blatant", {"normal": normal_box_muller},
     "normal is Box-Muller's; the contract is the inverse of the distribution function"),
    ("normal-unscaled", "the error function's inverse without its factor",
     "blatant", {"normal": normal_unscaled},
     "normal lacks the factor sqrt(2); the contract is sqrt(2) erfinv(u)"),
]  # fmt: skip


def faults() -> list[Fault]:
    return from_rows(_ROWS)
