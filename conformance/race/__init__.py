"""Training speed side by side: same weights, same data, same optimiser, losses shown to agree while the clock runs.

Each contestant has a process of its own, is warmed up, and then takes turns with the others. A race inside the noise
has no winner. Contestants live in `contestants`, one small file each.
"""

from __future__ import annotations

from collections.abc import Sequence

from .pictures import draw
from .racing import run
from .table import as_text

__all__ = ["as_text", "draw", "main", "run"]


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m conformance race`: see `command`."""
    from .command import main as command

    return command(argv)
