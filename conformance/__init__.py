"""The conformance suite: cases as data, the float64 reference as oracle, tolerances derived from rounding analysis.

`python -m conformance` runs it; `conformance.runner.run_case` is the same from Python, and `conformance.bounds` says
what a function should give on inputs of your own, and how far rounding may take a right one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .own import bounds as bounds

__all__ = ["bounds"]


def __getattr__(name: str) -> Any:
    if name == "bounds":  # with NumPy and the oracle, which the pytest plugin must not import for others
        from .own import bounds

        return bounds
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
