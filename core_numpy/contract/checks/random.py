"""The checks of the random functions: seeds, shapes, probabilities, counters."""

from __future__ import annotations

from typing import Any

import numpy as np

from .attention import check_key
from .common import Values, came, is_integer, require_array, require_float, require_int, require_number

WORD = 1 << 32


def check_seed(seed: Any) -> tuple[int, int]:
    """The high and the low 32-bit word of a seed from 0 to 2**64 - 1."""
    value = require_int("seed", seed, 0)
    if value >= WORD * WORD:
        raise ValueError(f"seed must be below 2**64; got {value}")
    return value >> 32, value & (WORD - 1)


def check_count(n: Any) -> int:
    """How many keys `split` makes."""
    return require_int("n", n, 1)


def check_shape(key: Any, shape: Any) -> tuple[int, ...]:
    """A key and the shape of what is drawn with it: a tuple of non-negative integers."""
    check_key("key", key)
    if not isinstance(shape, tuple | list):
        raise TypeError(f"shape must be a tuple of integers of at least 0, () for one number; got {came(shape)}")
    return tuple(require_int("shape", size, 0) for size in shape)


def check_fold(key: Any, data: Any, values: Values) -> int | None:
    """A key and what is folded into it: an integer from 0 to 2**32 - 1, or a 0-d integer array (then None)."""
    check_key("key", key)
    if hasattr(data, "dtype") and hasattr(data, "shape") and is_integer(data):
        if tuple(data.shape) != ():
            raise ValueError(f"data must be one integer; got {came(data)}")
        read = values(data)
        if read is None:
            return None
        data = int(read)
    value = require_int("data", data, 0)
    if value >= WORD:
        raise ValueError(f"data must be below 2**32; got {value}")
    return value


def check_probability(p: Any, shape: tuple[int, ...], values: Values) -> float | None:
    """p rounded to float32, as it is compared; None where it is an array, which must broadcast to shape."""
    if not hasattr(p, "shape") or isinstance(p, np.floating):
        value = require_number("p", p, "a number from 0 to 1 or a floating array")
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"p must be from 0 to 1; got {p!r}")
        return float(np.float32(value))
    require_float("p", p)
    sizes = tuple(p.shape)
    if len(sizes) > len(shape) or any(
        size not in (1, want) for size, want in zip(sizes[::-1], shape[::-1], strict=False)
    ):
        raise ValueError(f"p must broadcast to shape {shape}; got {came(p)}")
    read = values(p)
    if read is not None and not bool(np.all((read >= 0) & (read <= 1))):
        raise ValueError(f"p must hold numbers from 0 to 1; got {came(p)} with others in it")
    return None


def check_logits(key: Any, logits: Any) -> None:
    """Floating logits with at least one entry along the last axis."""
    check_key("key", key)
    require_float("logits", logits)
    if len(logits.shape) == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits must have at least one class along the last axis; got {came(logits)}")


def check_counter(key: Any, low: Any, high: Any) -> None:
    """A key and the words of flat indices: integer arrays or non-negative integers."""
    check_key("key", key)
    for name, word in (("low", low), ("high", high)):
        if hasattr(word, "dtype") and hasattr(word, "shape"):
            require_array(name, word)
            if not is_integer(word):
                raise TypeError(f"{name} must hold integers; got {came(word)}")
        else:
            require_int(name, word, 0)
