"""Training speed side by side: same weights, same data, same optimiser, losses shown to agree while the clock runs.

Each contestant has a process of its own, is warmed up, and then takes turns with the others. A race inside the noise
has no winner. Peers live in `contestants`, one small file each.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from .contestants import all_contestants
from .racing import run
from .table import as_text, draw
from .task import SIZES

__all__ = ["as_text", "draw", "main", "run"]


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m conformance race`: 0 done, 1 somebody was disqualified or failed, 2 a wrong argument."""
    parser = argparse.ArgumentParser(
        prog="python -m conformance race",
        description="Train the same model in every framework and compare the speed.",
        epilog="Example: python -m conformance race --size tiny --size small --rounds 12 --png race.png",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--size", action="append", choices=list(SIZES), help="may be given more than once (default tiny)"
    )
    parser.add_argument("--contestants", metavar="A,B", help="names, comma-separated (default: all; --list shows them)")
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="turns of each (default 10)")
    parser.add_argument("--seconds", type=float, default=1.0, metavar="X", help="length of a turn (default 1)")
    parser.add_argument("--threads", type=int, metavar="N", help="processor threads of each (default: all)")
    parser.add_argument("--json", metavar="FILE", help="write everything that was measured")
    parser.add_argument("--png", metavar="FILE", help="write bars")
    parser.add_argument("--list", action="store_true", help="show the contestants and end")
    arguments = parser.parse_args(argv)
    if arguments.list:
        for contestant in all_contestants().values():
            print(f"{contestant.name:<18} {contestant.note} (needs {', '.join(contestant.requires)})")
        return 0
    names = None if arguments.contestants is None else [name.strip() for name in arguments.contestants.split(",")]
    try:
        document = run(
            arguments.size or ["tiny"],
            names,
            rounds=arguments.rounds,
            seconds=arguments.seconds,
            threads=arguments.threads,
            say=lambda text: print(text, file=sys.stderr, flush=True),
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(as_text(document))
    if arguments.json is not None:
        Path(arguments.json).write_text(json.dumps(document, indent=1), encoding="utf-8")
    if arguments.png is not None:
        draw(document, arguments.png)
    states = [row["status"] for race in document["races"] for row in race["contestants"].values()]
    return 1 if {"disqualified", "failed"} & set(states) else 0
