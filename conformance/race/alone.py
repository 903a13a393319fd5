"""Attention alone, timed: turns, medians, the table and its file. attention_torch and attention_jax say what is timed.

A figure is the ratio of our median to the smallest of the others' medians: below 1 ours is faster. Contestants of a
case take turns, so a machine's moods meet all of them, and their results are compared before the clock runs.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from core_numpy.contract.arguments import Parser, ended

from ..progress import Bar
from ..summary import write_json
from .machine import environment

LENGTHS = (64, 256, 1024, 2048)
# What every case has: one row, eight heads of 64, float32; "both" is forward and backward.
HEADS, SIZE, MODES = 8, 64, ("forward", "both")
OURS = "ours"
FEWEST_TURNS = 5


@dataclass(frozen=True)
class Row:
    """One case at one length in one mode: contestant -> median seconds."""

    case: str
    length: int
    mode: str
    seconds: dict[str, float]
    turns: int

    @property
    def rival(self) -> str:
        """The fastest of the others."""
        return min((name for name in self.seconds if name != OURS), key=self.seconds.__getitem__)

    @property
    def ratio(self) -> float:
        return self.seconds[OURS] / self.seconds[self.rival]


def take_turns(calls: Mapping[str, Callable[[], Any]], seconds: float) -> tuple[dict[str, float], int]:
    """Median seconds of each call and the number of turns, for about so long, each turn in an order of its own.

    A contestant finds the caches and the heap as the one before left them, so nobody always follows the same one.
    """
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    order, end, turns, shuffled = list(calls), time.perf_counter() + seconds, 0, random.Random(0)
    while turns < FEWEST_TURNS or time.perf_counter() < end:
        shuffled.shuffle(order)
        for name in order:
            start = time.perf_counter()
            calls[name]()
            times[name].append(time.perf_counter() - start)
        turns += 1
    return {name: statistics.median(found) for name, found in times.items()}, turns


def command(doc: str | None, prog: str, cases: Iterable[str], arguments: list[str] | None) -> argparse.Namespace:
    """The command line that both commands have."""
    name = f"python -m conformance.race.{prog}"
    example = f"example: {name} 512 2048 --case causal"
    parser = Parser(prog=name, description=(doc or "").split("\n")[0], epilog=example)
    parser.add_argument("lengths", type=int, nargs="*", help=f"lengths ({' '.join(map(str, LENGTHS))})")
    parser.add_argument("--case", action="append", metavar="TEXT", help=f"only cases with it: {', '.join(cases)}")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each case in each mode (2)")
    parser.add_argument("--threads", type=int, default=2, help="threads of every contestant (2)")
    parser.add_argument("--json", metavar="FILE", help="write every contestant's figures; - for standard output")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    asked = parser.parse_args(arguments)
    asked.lengths = asked.lengths or list(LENGTHS)
    if min(asked.lengths) < 1 or asked.threads < 1 or not asked.seconds > 0:
        parser.error("lengths and threads must be at least 1, seconds above 0")
    return asked


def run(rows: Iterator[Row], total: int, asked: argparse.Namespace, framework: str) -> int:
    """Measure with a bar, print the table or write the document."""
    return ended(
        lambda: _run(rows, total, asked, framework),
        f"python -m conformance.race.attention_{framework.lower()}", debug=asked.debug,
    )  # fmt: skip


def _run(rows: Iterator[Row], total: int, asked: argparse.Namespace, framework: str) -> int:
    if not total:
        raise ValueError(f"no case has {' or '.join(map(repr, asked.case))} in its name")
    found = []
    with Bar(total, quiet=asked.json == "-") as advance:
        for row in rows:
            found.append(row)
            advance(f"attention in {framework}: {row.case}, {row.length:,}")
    if asked.json:
        document = {"schema": 1, "environment": environment(asked.threads), "rows": [asdict(row) for row in found]}
        write_json(asked.json, document)
    if asked.json != "-":
        from rich.console import Console

        Console().print(table(found, f"attention in {framework}, threads: {asked.threads}"))
    return 0


def table(rows: list[Row], title: str) -> Any:
    """A line per case, a column per length: ratio forward, ratio of both, and who the fastest others were."""
    from rich.table import Table

    lengths = sorted({row.length for row in rows})
    shown = Table(title=title, caption="ours by the fastest of the others: forward, forward and backward")
    shown.add_column("case")
    for length in lengths:
        shown.add_column(f"{length:,}", justify="right")
    shown.add_column("against")
    for case in dict.fromkeys(row.case for row in rows):
        mine = [row for row in rows if row.case == case]
        cells = [
            ", ".join(f"{row.ratio:.2f}" for mode in MODES for row in mine if (row.length, row.mode) == (length, mode))
            for length in lengths
        ]
        shown.add_row(case, *cells, ", ".join(dict.fromkeys(row.rival for row in mine)))
    return shown
