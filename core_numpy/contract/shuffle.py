"""Random order without a framework: the bits of Threefry-2x32, so that every backend reads the same data.

The order is a function of (seed, epoch) alone: a run resumes from one integer, its position.
"""

from __future__ import annotations

import numpy as np

from .checks.random import check_seed

# Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", table 3 and section 4.2.
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_MASK = 0xFFFFFFFF
# Four rounds make a Feistel network of good functions a strong permutation (Luby and Rackoff 1988); two to spare.
_TURNS = 6


def threefry2x32(key: tuple[int, int], x0: np.ndarray, x1: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Twenty rounds over two uint32 arrays of equal shape: two uint32 arrays of random bits."""
    words = [np.uint32(word) for word in (*key, key[0] ^ key[1] ^ _PARITY)]
    x0, x1 = x0 + words[0], x1 + words[1]  # uint32 arrays wrap
    for block in range(5):
        for turn in _ROTATIONS[block % 2]:
            x0 = x0 + x1
            x1 = ((x1 << np.uint32(turn)) | (x1 >> np.uint32(32 - turn))) ^ x0
        x0 = x0 + words[(block + 1) % 3]
        x1 = x1 + words[(block + 2) % 3] + np.uint32(block + 1)
    return x0, x1


def random_words(seed: int, stream: int, size: int) -> np.ndarray:
    """`size` uint64 words: number i is Threefry of (i >> 32, i) under the key Threefry(seed)(0, stream)."""
    k0, k1 = threefry2x32(check_seed(seed), np.zeros(1, np.uint32), _low(stream))
    index = np.arange(size, dtype=np.uint64)
    high, low = threefry2x32(
        (int(k0[0]), int(k1[0])), (index >> np.uint64(32)).astype(np.uint32), index.astype(np.uint32)
    )
    return (high.astype(np.uint64) << np.uint64(32)) | low


def _low(number: int) -> np.ndarray:
    return np.array([number & _MASK], np.uint32)


def permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    """The numbers 0 to size - 1 in random order, int64: those of `random_words(seed, epoch, size)`, sorted."""
    return np.argsort(random_words(seed, epoch, size), kind="stable")


def places_of(seed: int, epoch: int, size: int, numbers: np.ndarray) -> np.ndarray:
    """What stands at `numbers` of a random order of 0 to size - 1, int64, in memory that does not grow with size.

    A Feistel network over the bits of the number, whose round function is Threefry, is a permutation of a power of
    four; what falls outside of `size` is sent through again, which closes a permutation of the rest (Black and Rogaway
    2002, "Ciphers with arbitrary finite domains", cycle walking).
    """
    half = max((size - 1).bit_length() + 1 >> 1, 1)
    mask = np.uint64((1 << half) - 1)
    words = [int(word[0]) for word in threefry2x32(check_seed(seed), np.array([_MASK], np.uint32), _low(epoch))]
    found = np.asarray(numbers).astype(np.uint64)
    outside = np.ones(found.shape, bool)
    while outside.any():
        left, right = found[outside] >> np.uint64(half), found[outside] & mask
        for turn in range(_TURNS):
            drawn = threefry2x32((words[0], words[1]), right.astype(np.uint32), np.full(right.shape, turn, np.uint32))[
                0
            ]
            left, right = right, left ^ (drawn.astype(np.uint64) & mask)
        found[outside] = left << np.uint64(half) | right
        outside = found >= np.uint64(size)
    return found.astype(np.int64)
