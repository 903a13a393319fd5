"""The protocol of a target: what the suite asks of whatever it is pointed at. How a name becomes one: `loading`.

A target is an importable module with some of the public names (`attention` alone is enough), or any object that has
them. It may say of itself: `FRAMEWORK`, which arrays it takes: "numpy" (the default), "torch" or "jax"; `DTYPES`, the
dtypes it serves; `REFUSALS = True`, that it promises the contract's refusals; and it may raise `NotOffered`, or
NotImplementedError, for a combination that it does not serve. What it lacks is reported as not offered, never as
passed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..compare import Disagreement
from ..functions import FUNCTIONS
from ..inputs import Key

# The names by which our own are known; "torch" and "jax" are shorthand on the command line.
OURS = {"numpy": "core_numpy", "torch": "backend_torch", "jax": "backend_jax"}


class NotOffered(Exception):
    """The target does not claim this; the message says what it lacks."""


class Target:
    """A module seen through its framework's arrays. Subclasses say how arrays, gradients and compilers are reached."""

    framework = "numpy"
    compiles = False  # whether each new call costs a compilation

    def __init__(self, module: Any, name: str) -> None:
        self.module = module
        self.name = name

    def tidy(self) -> None:
        """Let go of what the cases so far left behind; called between cases."""

    # --- what it offers
    def offers(self, function: str) -> bool:
        return callable(getattr(self.module, function, None))

    def kernels(self) -> list[str]:
        """The kernels that a caller can ask for; a target without `available_kernels` has only its own choice."""
        listing = getattr(self.module, "available_kernels", None)
        return ["auto", *listing()] if callable(listing) else ["auto"]

    def shields_pairs(self, kernel: str) -> bool:
        """Whether NaN at any masked pair is without effect in this kernel; "auto" may be any of them."""
        listing = getattr(self.module, "available_kernels", None)
        if not callable(listing):
            return False
        known = listing()
        chosen = known.values() if kernel == "auto" else [known[kernel]]
        return all(getattr(one, "shields", "keys") == "pairs" for one in chosen)

    def stores_weights(self, kernel: str) -> bool:
        """Whether this kernel says that it rounds the quotients of the softmax to a half type; "auto" may be any."""
        listing = getattr(self.module, "available_kernels", None)
        if not callable(listing):
            return False
        known = listing()
        chosen = known.values() if kernel == "auto" else [known[kernel]]
        return any(getattr(one, "weights", "wide") == "stored" for one in chosen)

    def dtypes(self) -> tuple[str, ...]:
        return tuple(getattr(self.module, "DTYPES", ("float64", "float32", "bfloat16", "float16")))

    def refuses(self) -> bool:
        """Whether it promises to refuse what the contract refuses, in the contract's words; ours do."""
        return self.name in OURS.values() or bool(getattr(self.module, "REFUSALS", False))

    def require(self, function: str, arguments: dict[str, Any]) -> None:
        """Raise NotOffered for a function, or an argument of it, that the target does not have."""
        if not self.offers(function):
            raise NotOffered(f"no function {function}")
        try:
            parameters = inspect.signature(getattr(self.module, function)).parameters
        except (TypeError, ValueError):  # a compiled callable may hide its signature; then it is called as it is
            return
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return
        spec = FUNCTIONS[function]
        missing = [name for name in arguments if name not in parameters and name not in spec.positional]
        if missing:
            raise NotOffered(f"{function} has no argument {', '.join(missing)}")

    # --- arrays
    def array(self, x: np.ndarray, *, strided: str = "") -> Any:
        return strided_copy(x, strided) if strided else x

    def numpy(self, x: Any) -> np.ndarray:
        """A result or an argument as NumPy sees it; what is no array of the target's framework is said so."""
        if not isinstance(x, np.ndarray | np.generic | bool | int | float):
            raise Disagreement(f"a result must be a NumPy array; got {type(x).__module__}.{type(x).__name__}")
        return np.asarray(x)

    def native(self, x: Any, *, strided: str = "") -> Any:
        """Arrays (also in lists) and keys as the target takes them; numbers and strings as they are. strided: a way of
        STRIDED in which arrays lie in memory, "" for contiguous."""
        if isinstance(x, Key):
            return self.module.key(x.seed)
        if isinstance(x, list):
            return [self.native(item, strided=strided) for item in x]
        return self.array(x, strided=strided) if isinstance(x, np.ndarray) else x

    # --- calling
    def call(self, function: str, arguments: dict[str, Any], *, strided: str = "") -> dict[str, np.ndarray]:
        positional, rest = self._split(function, arguments, strided)
        names = [name for name in FUNCTIONS[function].positional if name in arguments]
        given = dict(zip(names, positional, strict=True)) | rest
        with self.watching(function, given):
            return self._named(function, self._run(function, positional, rest))

    @contextmanager
    def watching(self, what: str, given: dict[str, Any]) -> Iterator[None]:
        """Disagreement where an argument has other values behind the block than in front of it."""
        before = {name: self._bytes(x) for name, x in given.items()}
        yield
        for name, x in given.items():
            if self._bytes(x) != before[name]:
                raise Disagreement(f"{what} wrote into its argument {name}")

    def _bytes(self, x: Any) -> Any:
        """What the memory of an array (or of a list of them) holds; None for what is no array."""
        if isinstance(x, list):
            return [self._bytes(item) for item in x]
        return x.tobytes() if isinstance(x, np.ndarray) else None

    def gradients(
        self, function: str, arguments: dict[str, Any], wrt: list[str], cotangents: dict[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """By argument name. A NumPy target has them in `gradients.<function>_vjp`."""
        vjp = getattr(getattr(self.module, "gradients", None), f"{function}_vjp", None)
        if vjp is None:
            raise NotOffered(f"no gradients.{function}_vjp")
        positional, rest = self._split(function, arguments, "")
        given = {f"grad_{name}": x for name, x in cotangents.items()}
        given |= dict(zip(FUNCTIONS[function].positional, positional, strict=False)) | rest
        with np.errstate(all="ignore"), self.watching(f"the gradient of {function}", given):
            got = vjp(*cotangents.values(), *positional, **rest)
        if not isinstance(got, dict):
            spec = FUNCTIONS[function]
            values = got if isinstance(got, tuple | list) else (got,)
            got = dict(zip([n for n in spec.positional if n in spec.differentiable], values, strict=True))
        return {name: np.asarray(got[name]) for name in wrt}

    def optimise(
        self, config: Any, params: dict[str, np.ndarray], stream: list[dict[str, np.ndarray]]
    ) -> list[dict[str, np.ndarray]]:
        """The parameters after each update, and the "average of" each where config.ema is set, given all gradients. A
        target has it as a function `optimise(config, params, stream)` of NumPy arrays; ours by their own optimisers."""
        own = getattr(self.module, "optimise", None)
        if callable(own):
            return own(config, params, stream)
        if self.name not in OURS.values():
            raise NotOffered("no function optimise")
        return self._optimised(config, params, stream)

    def _optimised(
        self, config: Any, params: dict[str, np.ndarray], stream: list[dict[str, np.ndarray]]
    ) -> list[dict[str, np.ndarray]]:
        import importlib

        from core_numpy.contract.schedule import learning_rate

        own = importlib.import_module(f"{self.name}.optimizer")
        now = {name: self.array(p) for name, p in params.items()}
        state, after = own.initial_state(config, now), []
        for t, grads in enumerate(stream, start=1):
            native = {name: self.array(g) for name, g in grads.items()}
            clipped = own.clip(native, own.global_norm(native), config.clip_norm)
            now, state = own.update(config, now, clipped, state, t=t, lr=learning_rate(config, t))
            averages = {f"average of {name}": p for name, p in state.get("ema", {}).items()}
            after.append({name: self.numpy(p) for name, p in (now | averages).items()})
        return after

    def _split(self, function: str, arguments: dict[str, Any], strided: str) -> tuple[list[Any], dict[str, Any]]:
        rest = {name: self.native(x, strided=strided) for name, x in arguments.items()}
        positional = [rest.pop(name) for name in FUNCTIONS[function].positional if name in rest]
        return positional, rest

    def _run(self, function: str, positional: list[Any], rest: dict[str, Any]) -> Any:
        with np.errstate(all="ignore"):
            try:
                return getattr(self.module, function)(*positional, **rest)
            except NotImplementedError as error:  # the plain way to say it; ours promise everything
                if self.name in OURS.values():
                    raise
                raise NotOffered(str(error) or "NotImplementedError") from error

    def _named(self, function: str, got: Any) -> dict[str, np.ndarray]:
        names = FUNCTIONS[function].results
        if len(names) == 1 and isinstance(got, tuple | list):
            raise Disagreement(f"{function} must return one array; got a {type(got).__name__} of {len(got)}")
        values = got if isinstance(got, tuple | list) else (got,)
        if len(values) != len(names):
            raise Disagreement(f"{function} must return {len(names)} arrays ({', '.join(names)}); got {len(values)}")
        return {name: self.numpy(value) for name, value in zip(names, values, strict=True)}

    def scope(self, dtype: str) -> Any:
        """A context in which the dtype can be computed with (JAX: x64 on for float64)."""
        import contextlib

        return contextlib.nullcontext()

    def describe(self) -> dict[str, Any]:
        return {"framework": "numpy", "version": np.__version__}


# Ways for an array to lie in memory that a kernel which assumes contiguity reads wrong, and what failures call them.
# "strided": at every second place of a larger buffer. "transposed": contiguous along the last axis alone: heads behind
# positions, as a projection of (B, T, H, D) leaves them; a matrix with a gap behind each row.
STRIDED = ("strided", "transposed")


def strided_copy(x: np.ndarray, way: str) -> np.ndarray:
    """The same values in one of these ways."""
    if x.ndim == 0:
        return x
    if way == "transposed" and x.ndim > 2:
        return np.swapaxes(np.ascontiguousarray(np.swapaxes(x, -3, -2)), -3, -2)
    wide = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), dtype=x.dtype)
    part = wide[..., : x.shape[-1]] if way == "transposed" else wide[..., ::2]
    part[...] = x
    return part
