"""Random numbers from counters: Threefry-2x32 with 20 rounds, in torch on any device. Rules: core_numpy.random.

torch has no complete unsigned arithmetic, so 32-bit words live in int64 and are cut to 32 bits where it matters.
Results are on the key's device. Everything traces under `torch.compile`, where the twenty rounds stay one
operation: its default compiler takes half a minute of Python to fuse them, for each draw of a model anew.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from core_numpy.contract.checks.attention import check_key
from core_numpy.contract.checks.random import (
    check_count,
    check_counter,
    check_fold,
    check_logits,
    check_probability,
    check_seed,
    check_shape,
)

from .arrays import require_tensors, values

# Distances of rotation and the parity constant of the key schedule, from the paper's reference code (Random123).
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA
MASK = 0xFFFFFFFF


def key(seed: int) -> Tensor:
    """The key of a seed: its high and low 32-bit word, int64 (2,), on the CPU; move it with `.to(device)`."""
    return torch.tensor(check_seed(seed), dtype=torch.int64)


def split(key: Tensor, n: int = 2) -> Tensor:
    """n independent keys, int64 (n, 2). Rules: core_numpy.random."""
    check_key("key", key)
    require_tensors(key=key)
    counter = torch.arange(check_count(n), dtype=torch.int64, device=key.device)
    return torch.stack(_threefry(key, torch.zeros_like(counter), counter), dim=-1)


def fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    """The key that `data` (from 0 to 2**32 - 1) makes of `key`. Rules: core_numpy.random."""
    value = check_fold(key, data, values)
    require_tensors(key=key)
    counter = torch.as_tensor(data if value is None else value, dtype=torch.int64, device=key.device)
    return torch.stack(_threefry(key, torch.zeros_like(counter), counter), dim=-1)


def random_bits(key: Tensor, shape: tuple[int, ...]) -> Tensor:
    """int64 from 0 to 2**32 - 1 of the given shape, every bit fair. Rules: core_numpy.random."""
    shape = check_shape(key, shape)
    require_tensors(key=key)
    return _bits(key, torch.arange(math.prod(shape), dtype=torch.int64, device=key.device), 0).reshape(shape)


def bits_at(key: Tensor, low: Tensor, high: Tensor | int = 0) -> Tensor:
    """The bits at flat indices high * 2**32 + low; low may hold a whole 63-bit index. Rules: core_numpy.random."""
    check_counter(key, low, high)
    require_tensors(key=key)
    return _bits(key, low, high)


def uniform(key: Tensor, shape: tuple[int, ...]) -> Tensor:
    """float32 in [0, 1) with 23 random bits. Rules: core_numpy.random."""
    return _to_uniform(random_bits(key, shape))


def uniform_at(key: Tensor, low: Tensor, high: Tensor | int = 0) -> Tensor:
    """`uniform` at given flat indices, as `bits_at`. Rules: core_numpy.random."""
    return _to_uniform(bits_at(key, low, high))


def normal(key: Tensor, shape: tuple[int, ...]) -> Tensor:
    """float32 with mean 0 and variance 1, by `torch.erfinv`. Rules: core_numpy.random."""
    u = uniform(key, shape) * 2.0 + (2.0**-24 - 1.0)
    return math.sqrt(2.0) * torch.erfinv(u)


def bernoulli(key: Tensor, p: float | Tensor, shape: tuple[int, ...]) -> Tensor:
    """bool, True with probability p (a number, or a floating tensor that broadcasts to shape)."""
    shape = check_shape(key, shape)
    rounded = check_probability(p, shape, values)
    limit = torch.as_tensor(p if rounded is None else rounded, dtype=torch.float32, device=key.device)
    return uniform(key, shape) < limit


def categorical(key: Tensor, logits: Tensor) -> Tensor:
    """Indices along the last axis, drawn with probability softmax(logits); int64 (...), logits (..., V)."""
    check_logits(key, logits)
    require_tensors(key=key, logits=logits)
    u = uniform(key, logits.shape).clamp_min(torch.finfo(torch.float32).tiny)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return torch.argmax(logits.to(wide) - torch.log(-torch.log(u)), dim=-1)


def _bits(key: Tensor, low: Tensor | int, high: Tensor | int) -> Tensor:
    index = torch.as_tensor(low, device=key.device).to(torch.int64)
    above = torch.as_tensor(high, device=key.device).to(torch.int64) + (index >> 32)
    first, second = _threefry(key, above & MASK, index & MASK)
    return first ^ second


def _to_uniform(bits: Tensor) -> Tensor:
    return (bits >> 9).to(torch.float32) * 2.0**-23


def _threefry(key: Tensor, high: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    kept = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    return (_whole if kept else _rounds)(key, high, low)


def _rounds(key: Tensor, high: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    """Twenty rounds of add, rotate, exclusive or; after every four, the next two words of the key.

    x1 is always cut to 32 bits, because bits above would be shifted down; x0 only grows (by at most 26 words) and is
    cut at the end.
    """
    first, second = (key.to(torch.int64) & MASK).unbind()
    words = (first, second, first ^ second ^ PARITY)
    x0, x1 = high + words[0], (low + words[1]) & MASK
    for group in range(5):
        for distance in ROTATIONS[group % 2]:
            x0 = x0 + x1
            shifted = x1 << distance
            x1 = ((shifted | (shifted >> 32)) ^ x0) & MASK
        x0 = x0 + words[(group + 1) % 3]
        x1 = (x1 + words[(group + 2) % 3] + (group + 1)) & MASK
    return x0 & MASK, x1


@torch.library.custom_op("backend_torch::threefry", mutates_args=())
def _whole(key: Tensor, high: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    """`_rounds` as an operation that no compiler takes apart."""
    return _rounds(key, high, low)


@_whole.register_fake
def _(key: Tensor, high: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    shape = torch.broadcast_shapes(high.shape, low.shape)
    return low.new_empty(shape, dtype=torch.int64), low.new_empty(shape, dtype=torch.int64)


@_whole.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *args: Tensor) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    parts = [
        _whole(*(x if d is None else x.select(d, b) for x, d in zip(args, in_dims, strict=True)))
        for b in range(info.batch_size)
    ]
    return tuple(torch.stack(words) for words in zip(*parts, strict=True)), (0, 0)
