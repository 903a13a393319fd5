"""A bar on a terminal, silence elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


class Bar:
    """`with Bar(total) as advance`: each `advance(text)` is one step done; without a total, one under way."""

    def __init__(self, total: int | None, *, quiet: bool = False) -> None:
        self.total = total
        self.bar: Any = None
        self.quiet = quiet or not sys.stderr.isatty()

    def __enter__(self) -> Callable[[str], None]:
        if self.quiet:
            return lambda text: None
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        self.bar = Progress(*columns, console=Console(stderr=True), transient=True).__enter__()
        task = self.bar.add_task("", total=self.total)
        bar = self.bar
        return lambda text: bar.update(task, advance=1, description=text)

    def __exit__(self, *error: Any) -> None:
        if self.bar is not None:
            self.bar.__exit__(*error)
