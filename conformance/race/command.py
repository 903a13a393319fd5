"""`conformance race` on the command line.

Exit status: 0 done, 1 somebody was disqualified or failed, 2 a wrong argument, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .contestants import WORDS, all_contestants, chosen, missing
from .pictures import draw
from .racing import run
from .table import show
from .task import ARCHITECTURES, DEVICES, MEASURES, PRECISIONS, SIZES

EPILOG = """examples:
  conformance race                                        ours at the tiny size
  conformance race --size small --with torch-compiled,torch-class
  conformance race --with all --size tiny --size small --png race.png --json race.json
"""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="conformance race",
        description="Train the same model in every framework and compare the speed.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--size", action="append", choices=list(SIZES), help="may be given more than once (default tiny)")
    add(
        "--with",
        "--contestants",
        dest="contestants",
        default="ours",
        metavar="A,B",
        help=f"names and the words {', '.join(WORDS)}, comma-separated (default ours; --list shows the names)",
    )
    add(
        "--architecture",
        action="append",
        choices=list(ARCHITECTURES),
        help="may be given more than once (default: gpt, and what a chosen peer builds instead)",
    )
    add("--measure", default="step", choices=MEASURES, help="a whole update, loss and gradients, the loss, generation")
    add("--precision", default="float32", choices=PRECISIONS)
    add("--remat", action="store_true", help="recompute activations in the backward pass")
    add("--device", default="cpu", choices=DEVICES)
    add("--rounds", type=int, default=10, metavar="N", help="turns of each (default 10)")
    add("--seconds", type=float, default=1.0, metavar="X", help="length of a turn (default 1)")
    add("--threads", type=int, metavar="N", help="processor threads of each (default: all)")
    add("--json", metavar="FILE", help="write everything that was measured")
    add("--png", metavar="FILE", help="write bars")
    add("--list", action="store_true", help="show the contestants and end")
    return made  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    if options.list:
        return list_contestants()
    try:
        document = run(
            options.size or ["tiny"],
            chosen(options.contestants),
            rounds=options.rounds,
            seconds=options.seconds,
            threads=options.threads,
            say=lambda text: print(text, file=sys.stderr, flush=True),
            architectures=options.architecture,
            precision=options.precision,
            remat=options.remat,
            measure=options.measure,
            device=options.device,
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return finish(document, options)


def finish(document: dict[str, Any], options: argparse.Namespace) -> int:
    """Print, write what was asked for, and say by the status how it went."""
    show(document)
    if options.json is not None:
        write(options.json, json.dumps(document, indent=1))
    if options.png is not None:
        draw(document, options.png)
    if document["interrupted"]:
        return 130
    states = [row["status"] for race in document["races"] for row in race["contestants"].values()]
    return 1 if {"disqualified", "failed"} & set(states) else 0


def write(path: str, text: str) -> None:
    """Whole or not at all."""
    from ..summary import write_text

    write_text(Path(path), text)


def list_contestants() -> int:
    for contestant in all_contestants().values():
        lacking = missing(contestant)
        state = f"not installed: {', '.join(lacking)}" if lacking else ", ".join(contestant.architectures)
        print(f"{contestant.name:<26} {contestant.group:<15} {contestant.note} ({state})")
    return 0
