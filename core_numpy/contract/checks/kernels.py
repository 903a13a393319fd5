"""What a backend says about its attention kernels, and the refusals of the `kernel` argument."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .common import came


@dataclass(frozen=True)
class Kernel:
    """One way to compute attention.

    cannot: what it does not serve, one phrase each; empty where it serves everything. twice: whether it can be
    differentiated twice. shields: "pairs" where NaN in any masked query-key pair never matters, "keys" where
    that holds only for keys that no query may attend to. weights: "stored" where half types' weights are divided by
    their sum and then rounded to the type, "wide" where they stay in float32 or are rounded before the division.
    """

    name: str
    cannot: tuple[str, ...] = ()
    twice: bool = True
    shields: str = "keys"
    weights: str = "wide"


def check_kernel(kernel: Any, names: Iterable[str]) -> str:
    """ "auto" or the name of a kernel of this backend."""
    known = ("auto", *names)
    if not isinstance(kernel, str):
        raise TypeError(f"kernel must be one of {', '.join(map(repr, known))}; got {came(kernel)}")
    if kernel not in known:
        raise ValueError(f"kernel must be one of {', '.join(map(repr, known))}; got {kernel!r}")
    return kernel


def refuse_kernel(kernel: str, reasons: Iterable[str]) -> None:
    """Raise where a kernel was asked for by name and cannot serve the arguments."""
    why = "; ".join(reasons)
    if why:
        raise ValueError(f"kernel={kernel!r} cannot serve these arguments: {why}. kernel='auto' picks one that can")
