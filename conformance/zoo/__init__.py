"""The zoo: every known fault, planted in the reference, and the cases that catch it. `main` is `conformance zoo`."""

from __future__ import annotations

from .catching import Caught, catch, touched
from .command import main, score
from .every import all_faults
from .faults import Fault, Faulty
from .honest import variants

__all__ = ["Caught", "Fault", "Faulty", "all_faults", "catch", "main", "score", "touched", "variants"]
