"""The oracle for inputs of your own: `conformance.bounds`, in a test of your kernel."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from . import oracle
from .budget import UNIT
from .compare import Disagreement, Tally
from .functions import FUNCTIONS
from .inputs import DTYPES, rounded, widened
from .reference import Arrays, call
from .runner import compare, lse_dtype, overflowed, result_dtypes

# The cotangents of one call are the same each time.
NAME = "own inputs"


@dataclass(frozen=True)
class Bounded:
    """What a function should give on the inputs that it was asked about.

    values, bounds: by name of the result, float64; |answer - value| <= bound, and where a result has no bound it is
    exact. gradients, gradient_bounds: the same by name of the argument. cotangents: what those pull back, by name of
    the result, in the dtype in which a kernel gets them.
    """

    function: str
    dtype: str
    values: Arrays
    bounds: Arrays
    gradients: Arrays
    gradient_bounds: Arrays
    cotangents: Arrays
    result_dtypes: dict[str, str]

    def check(self, got: Any, gradients: Mapping[str, Any] | None = None) -> dict[str, float]:
        """The largest share of its bound that each array uses; AssertionError, with the worst element, above 1.

        got: the result, several as a tuple or by name; gradients: by argument name, all that were asked for, or None
        to look at the results alone. NumPy, torch or JAX arrays. Refused too: another shape, dtype, NaN where none is
        due, and half types that are off in the same way all together (docs/tolerance.md).
        """
        tally = Tally()
        try:
            compare(tally, "", self._named(got), self.values, self.bounds, self.result_dtypes, 0.0)
            if gradients is not None:
                given = self._gradients(gradients)
                compare(tally, "gradient of ", given, self.gradients, self.gradient_bounds, {}, 0.0)
        except Disagreement as wrong:
            raise AssertionError(f"{self.function} in {self.dtype}: {wrong}") from None
        if not tally.share <= 1.0:
            raise AssertionError(f"{self.function} in {self.dtype}: {self._worst(tally, got, gradients)}")
        if not tally.together[0] <= 1.0:
            share, where = tally.together
            said = f"{where} over all elements is off by {share:.3g} times what rounding to nearest leaves"
            raise AssertionError(f"{self.function} in {self.dtype}: {said}")
        return dict(tally.shares)

    def _named(self, got: Any) -> Arrays:
        names = list(self.values)
        if isinstance(got, Mapping):
            if sorted(got) != sorted(names):
                raise ValueError(f"got must have the results {', '.join(names)}; has {', '.join(map(str, got))}")
            return {name: as_numpy(got[name]) for name in names}
        several = list(got) if isinstance(got, tuple | list) else [got]
        if len(several) != len(names):
            raise ValueError(f"got must be {len(names)} arrays ({', '.join(names)}); is {len(several)}")
        return {name: as_numpy(x) for name, x in zip(names, several, strict=True)}

    def _gradients(self, gradients: Mapping[str, Any]) -> Arrays:
        if not isinstance(gradients, Mapping) or sorted(gradients) != sorted(self.gradients):
            asked = ", ".join(self.gradients) or "none: bounds(..., wrt=...) asks for them"
            had = ", ".join(map(str, gradients)) if isinstance(gradients, Mapping) else type(gradients).__name__
            raise ValueError(f"gradients must be a dict of those that were asked for ({asked}); got {had}")
        return {name: as_numpy(gradients[name]) for name in self.gradients}

    def _worst(self, tally: Tally, got: Any, gradients: Mapping[str, Any] | None) -> str:
        """The element that is off by the largest share of its bound."""
        assert tally.worst is not None
        name, shares = tally.worst
        at = np.unravel_index(int(np.argmax(shares)), shares.shape)
        own = name.removeprefix("gradient of ")
        of_gradient = own != name
        came = self._gradients(gradients or {})[own] if of_gradient else self._named(got)[own]
        due = (self.gradients if of_gradient else self.values)[own]
        bound = (self.gradient_bounds if of_gradient else self.bounds)[own]
        due = overflowed(due, str(came.dtype))
        return (
            f"{tally.where} is off by {tally.share:.3g} times its error budget: must be {float(due[at])!r} within "
            f"{float(bound[at]):.3g}; got {float(came[at])!r} ({int((shares > 1).sum())} of {shares.size} are over)"
        )


def bounds(
    function: str,
    arguments: Mapping[str, Any],
    *,
    dtype: str | None = None,
    cotangents: Mapping[str, Any] | None = None,
    wrt: Sequence[str] = (),
) -> Bounded:
    """What a function should give on these inputs, and how far rounding may take a right implementation.

        |answer - value| <= bound, element by element (docs/tolerance.md derives the bounds)

    function: a public name of docs/spec.md, such as "attention" or "rms_norm". arguments: by name; arrays (NumPy, torch
    or JAX) exactly as the kernel gets them, the floating ones all of one dtype, since the reference computes in float64
    from these very numbers; `kernel` is passed over. dtype: theirs, needed only where no argument is floating. wrt: the
    arguments to differentiate by. cotangents: by name of the result, what is pulled back; drawn, and in the answer,
    where they are not given. Refused, by TypeError and ValueError: an unknown function, what the reference refuses,
    floating arrays of two dtypes, an argument in wrt that has no gradient, cotangents of another shape or dtype,
    and one that is not 0 where a query may attend to no key and its lse is -inf.
    """
    if function not in FUNCTIONS:
        near = difflib.get_close_matches(str(function), FUNCTIONS, 1)
        raise ValueError(f"function must be one of {', '.join(FUNCTIONS)}; got {function!r}" + _meant(near))
    given = {name: as_numpy(x) for name, x in arguments.items() if name != "kernel"}
    dtype = _dtype(given, dtype)
    asked = [wrt] if isinstance(wrt, str) else list(wrt)
    able = [name for name in FUNCTIONS[function].differentiable if name in given]
    if wrong := [name for name in asked if name not in able]:
        raise ValueError(f"wrt must name given arguments of {', '.join(able) or 'none'}; got {', '.join(wrong)}")
    exact = {name: widened(x) for name, x in given.items()}
    results = call(function, exact)
    if not asked and cotangents is not None:
        raise ValueError("cotangents are for gradients: wrt names the arguments to differentiate by")
    outer = {} if not asked else oracle.drawn(NAME, results, dtype)
    kinds = {name: lse_dtype(dtype) if name == "lse" else dtype for name in outer}
    if cotangents is not None:
        outer = {name: widened(x) for name, x in _checked(cotangents, results, kinds).items()}
    want = oracle.bounded(function, exact, results, asked, outer, dtype)
    pulled = {name: rounded(x, kinds[name]) for name, x in outer.items()}
    dtypes = result_dtypes(function, exact, dtype)
    return Bounded(
        function, dtype, want.results, want.bounds, want.gradients, want.gradient_bounds, pulled, dtypes
    )  # fmt: skip


def as_numpy(x: Any) -> Any:
    """An array of NumPy, torch or JAX, also in a list, as NumPy's, in its own dtype; everything else as it is."""
    if isinstance(x, list):
        return [as_numpy(item) for item in x]
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and isinstance(x, torch.Tensor):
        x = x.detach().cpu().contiguous()
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()
    if isinstance(x, np.generic) or (jax is not None and isinstance(x, jax.Array)):
        return np.asarray(x)
    return x


def _dtype(given: Mapping[str, Any], dtype: str | None) -> str:
    """The one dtype of the floating arrays."""
    if dtype is not None and dtype not in UNIT:
        raise ValueError(f"dtype must be one of {', '.join(UNIT)}; got {dtype!r}")
    for name, x in given.items():
        for item in x if isinstance(x, list) else [x]:
            if not isinstance(item, np.ndarray) or item.dtype not in DTYPES.values():
                continue
            dtype = dtype or str(item.dtype)
            if str(item.dtype) != dtype:
                raise TypeError(f"{name} must be {dtype}, as the kernel gets it; got {item.dtype}")
    if dtype is None:
        raise ValueError("dtype must be given where no argument is a floating array")
    return dtype


def _checked(cotangents: Mapping[str, Any], results: Arrays, kinds: Mapping[str, str]) -> Arrays:
    if sorted(cotangents) != sorted(results):
        raise ValueError(f"cotangents must have {', '.join(results)}; got {', '.join(map(str, cotangents)) or 'none'}")
    found = {name: as_numpy(cotangents[name]) for name in results}
    for name, x in found.items():
        if not isinstance(x, np.ndarray) or str(x.dtype) != kinds[name]:
            raise TypeError(f"cotangents[{name!r}] must be {kinds[name]}; got {getattr(x, 'dtype', type(x).__name__)}")
        if x.shape != results[name].shape:
            raise ValueError(f"cotangents[{name!r}] must have shape {results[name].shape}; got {x.shape}")
    if "lse" in found and (found["lse"][~np.isfinite(results["lse"])] != 0).any():
        raise ValueError("cotangents['lse'] must be 0 where a query may attend to no key: its lse is -inf there")
    return found


def _meant(near: Sequence[str]) -> str:
    return f"; did you mean {near[0]}?" if near else ""
