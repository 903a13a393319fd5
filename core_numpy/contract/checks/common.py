"""Names of dtypes, and the refusals that several checks share."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

FLOATS = ("float16", "bfloat16", "float32", "float64")
Values = Callable[[Any], "np.ndarray | None"]


def dtype_name(x: Any) -> str:
    """ "float32" for numpy.float32, torch.float32 and jax.numpy.float32 alike."""
    dtype = x.dtype
    return _numpy_name(dtype) if isinstance(dtype, np.dtype) else str(dtype).removeprefix("torch.")


@lru_cache(maxsize=64)
def _numpy_name(dtype: np.dtype) -> str:
    """NumPy puts a name together anew each time, which takes longer than the rest of a check."""
    return str(dtype)


def came(x: Any) -> str:
    """What came, for an error sentence: dtype and shape of an array, else the type and value."""
    # A class such as numpy.float32 has these names too, but they are not its own.
    if hasattr(x, "dtype") and hasattr(x, "shape") and not isinstance(x, type):
        return f"{dtype_name(x)} {tuple(x.shape)}"
    text = repr(x)
    return f"{type(x).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def require_array(name: str, x: Any) -> None:
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        raise TypeError(f"{name} must be an array; got {came(x)}")


def refuse_foreign(name: str, x: Any, kind: str) -> None:
    """Refuse an array, of another framework than the one that asks, whose own are `kind`.

    What is no array at all, and NumPy's scalars, are left to the check that knows what should be there.
    """
    if hasattr(x, "dtype") and hasattr(x, "shape") and not isinstance(x, np.generic | type):
        package = type(x).__module__.split(".")[0].removesuffix("lib")
        raise TypeError(f"{name} must be {kind}; got an array of {package}, {came(x)}: from_numpy() makes one of it")


def require_float(name: str, x: Any) -> None:
    """Refuse what is no array of float16, bfloat16, float32 or float64."""
    require_array(name, x)
    if dtype_name(x) not in FLOATS:
        hint = ": convert it to one of them" if is_integer(x) else ""
        raise TypeError(f"{name} must be one of {', '.join(FLOATS)}; got {came(x)}{hint}")


def is_integer(x: Any) -> bool:
    name = dtype_name(x)
    return name.startswith(("int", "uint"))


def require_integer(name: str, x: Any) -> None:
    """Refuse what is no array of integers (booleans are none)."""
    require_array(name, x)
    if not is_integer(x):
        raise TypeError(f"{name} must hold integers; got {came(x)}")


def require_shape(name: str, x: Any, shape: Sequence[int], meaning: str) -> None:
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)} {meaning}; got {tuple(x.shape)}")


def require_number(name: str, x: Any, expected: str) -> float:
    """A finite Python or NumPy real number that is no bool."""
    if isinstance(x, bool | np.bool_) or not isinstance(x, int | float | np.integer | np.floating):
        raise TypeError(f"{name} must be {expected}; got {came(x)}")
    if not -math.inf < x < math.inf:  # no call of isfinite: torch.compile, which may trace the number, has none
        raise ValueError(f"{name} must be {expected}; got {x!r}")
    return float(x)


def require_int(name: str, x: Any, least: int | None = None) -> int:
    """A Python or NumPy integer that is no bool, at least `least`."""
    expected = "an integer" + ("" if least is None else f" of at least {least}")
    if isinstance(x, bool | np.bool_) or not isinstance(x, int | np.integer):
        raise TypeError(f"{name} must be {expected}; got {came(x)}")
    if least is not None and x < least:
        raise ValueError(f"{name} must be {expected}; got {int(x)}")
    return int(x)


def require_choice(name: str, x: Any, choices: Sequence[str]) -> None:
    if not isinstance(x, str) or x not in choices:
        # A framework's own dtype, such as numpy.float32 or torch.float32, is told its name.
        word = x if isinstance(x, str) else getattr(x, "__name__", str(x)).removeprefix("torch.")
        near = difflib.get_close_matches(word, choices, n=1, cutoff=0.6 if word is x else 1.0)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {x!r}{hint}")


def require_axis(name: str, x: Any, axis: Any) -> None:
    """Refuse an axis that `x` does not have."""
    if isinstance(axis, bool) or not isinstance(axis, int):
        raise TypeError(f"axis must be an integer; got {came(axis)}")
    rank = len(x.shape)
    if not -rank <= axis < rank:
        raise ValueError(f"axis must be from {-rank} to {rank - 1} for {name} of shape {tuple(x.shape)}; got {axis}")


def require_x64(name: str, dtype: str, enabled: bool) -> None:
    """JAX without x64 would compute in float32 what was asked in float64: refuse instead."""
    if dtype == "float64" and not enabled:
        raise TypeError(
            f"{name} is float64, but JAX has 64-bit types off and would compute in float32: turn them on with "
            'jax.config.update("jax_enable_x64", True) at the start of the program, or JAX_ENABLE_X64=1 in the '
            "environment, or convert to float32"
        )
