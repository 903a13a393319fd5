"""`conformance race` on the command line.

Exit status: 0 done, 1 somebody was disqualified or failed, 2 a wrong argument, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from core_numpy.contract.arguments import Parser
from core_numpy.contract.parallel import AXES as AXES_OF_DEVICES

from .contestants import WORDS, all_contestants, chosen, missing
from .pictures import draw
from .racing import check, run
from .scaling import scaling
from .sweep import AXES, sweep
from .table import show
from .task import ARCHITECTURES, DEVICES, MEASURES, PRECISIONS, SIZES, Task

EPILOG = """examples:
  conformance race --with all --size small --png race.png --json race.json --html race.html
  conformance race --sweep length --with torch,torch-lstm,torch-gru --values 64,128,256,512
  conformance race --devices 2 --with torch,jax --layout fsdp --png scaling.png
  conformance race --devices 4 --positions 65536 --json memory.json
"""


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="conformance race",
        usage="conformance race [options]\n       conformance race compare A.json B.json",
        description="Train the same model in every framework and compare the speed.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--size", action="append", choices=list(SIZES), metavar="NAME", help=f"{_listed(SIZES)}; may be repeated")
    add(
        "--with", "--contestants", dest="contestants", default="ours", metavar="A,B",
        help=f"names from --list, or {', '.join(WORDS)} (default ours)",
    )  # fmt: skip
    add(
        "--architecture", action="append", choices=list(ARCHITECTURES), metavar="NAME",
        help=f"{_listed(ARCHITECTURES)}; may be repeated (default gpt, and what a chosen peer builds instead)",
    )  # fmt: skip
    add(
        "--measure", default="step", choices=MEASURES, metavar="NAME",
        help=f"{_listed(MEASURES)} (default step, a whole update)",
    )  # fmt: skip
    add("--precision", default="float32", choices=PRECISIONS, metavar="NAME", help=f"{_listed(PRECISIONS)}")
    add("--remat", action="store_true", help="recompute activations in the backward pass")
    add("--device", default="cpu", choices=DEVICES, metavar="NAME", help=_listed(DEVICES))
    add("--sweep", choices=AXES, metavar="AXIS", help=f"race at many values of {_listed(AXES)}")
    add("--values", metavar="A,B", help="the sweep's values (default: around the size)")
    add("--devices", type=int, metavar="N", help="weak and strong scaling over 1, 2, ... N host devices")
    add("--layout", choices=AXES_OF_DEVICES, metavar="AXIS", help=f"of --devices: {_listed(AXES_OF_DEVICES)}")
    add("--positions", type=int, metavar="T", help="of --devices: memory of a row of T positions")
    add("--profile", action="store_true", help="no race: where each contestant's time goes")
    add("--rounds", type=int, default=10, metavar="N", help="turns of each (default 10)")
    add("--seconds", type=float, default=1.0, metavar="X", help="length of a turn (default 1)")
    add("--threads", type=int, metavar="N", help="threads of each (default: all; of a device: 1)")
    add("--timeout", type=float, default=600.0, metavar="X", help="seconds that one answer may take (default 600)")
    add("--json", metavar="FILE", help="write all that was measured; - for standard output")
    add("--debug", action="store_true", help="show the traceback of an error")
    add("--png", metavar="FILE", help="write bars, or the curves of a sweep")
    add("--html", metavar="FILE", help="write a page: bars, loss curves, roofline")
    add("--list", action="store_true", help="show the contestants and end")
    return made


def _listed(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}"


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words[:1] == ["compare"]:
            return compare_files(words[1:])
        options = parser().parse_args(words)
        return list_contestants() if options.list else races(options)
    except ValueError as error:
        if "--debug" in words:
            raise
        print(f"conformance race: {error}", file=sys.stderr)
        return 2


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def races(options: argparse.Namespace) -> int:
    """One race, a sweep or a profile."""
    sizes, names = options.size or ["tiny"], chosen(options.contestants)
    if not options.timeout > 0:
        raise ValueError(f"--timeout must be a positive number of seconds; got {options.timeout:g}")
    if options.values is not None and options.sweep is None:
        raise ValueError("--values are those of --sweep, which was not given")
    timing = {name: getattr(options, name) for name in ("rounds", "seconds", "threads", "timeout")}
    kind = {name: getattr(options, name) for name in ("precision", "remat", "measure", "device")}
    if options.devices is None and (options.layout is not None or options.positions is not None):
        given = "--layout is" if options.positions is None else "--positions are"
        raise ValueError(f"{given} of --devices, which was not given")
    if options.devices is not None and (options.sweep is not None or options.profile):
        raise ValueError("--devices is a measurement of its own: it goes with neither --sweep nor --profile")
    if options.sweep is None and not options.profile and options.devices is None:
        return finish(run(sizes, names, architectures=options.architecture, say=say, **timing, **kind), options)
    if len(sizes) > 1:
        raise ValueError("a sweep, a profile and --devices have one --size")
    check(sizes, names, options.rounds, options.seconds, options.threads, options.architecture, options.precision,
          options.measure, options.device)  # fmt: skip
    if options.positions is not None:
        return positions(names, options)
    if options.devices is not None:
        if len(options.architecture or ()) > 1:
            raise ValueError("--devices has one --architecture")
        base = Task(sizes[0], *(options.architecture or ()), **kind)
        found = scaling(base, names, devices=options.devices, layout=options.layout or "data", say=say, **timing)
        return finish(found, options)
    if options.profile:
        return profiles(Task(sizes[0], **kind), names, options)
    document = sweep(
        options.sweep, Task(sizes[0], **kind), names, values=options.values, architectures=options.architecture,
        say=say, **timing,
    )  # fmt: skip
    return finish(document, options)


def positions(names: Sequence[str], options: argparse.Namespace) -> int:
    """Attention over one long row: what a process holds of it."""
    from .long import FRAMEWORKS, long

    other = [name for name in ("size", "architecture", "layout", "threads", "html") if getattr(options, name)]
    other += [name for name in ("measure", "precision", "device", "remat", "rounds", "seconds")
              if getattr(options, name) != parser().get_default(name)]  # fmt: skip
    if other:
        raise ValueError(f"--positions measures one thing, in one way: it does not go with --{other[0]}")
    chosen = FRAMEWORKS if options.contestants == "ours" else names
    found = long(options.devices, options.positions, chosen, timeout=options.timeout, say=say)
    status = finish(found, options)
    return status or int(any(row["status"] != "measured" for row in found["long"]["rows"]))


def profiles(task: Task, names: Sequence[str], options: argparse.Namespace) -> int:
    from .profiling import profile, show_profile

    document = profile(task, names, threads=options.threads, timeout=options.timeout, say=say)
    if options.json != "-":
        show_profile(document)
    write(options.json, document)
    return 1 if any(found["status"] == "failed" for found in document["profiles"].values()) else 0


def finish(document: dict[str, Any], options: argparse.Namespace) -> int:
    """Print, write what was asked for, and say by the status how it went."""
    if options.json != "-":
        show(document)
    write(options.json, document)
    if options.png is not None:
        draw(document, options.png)
    if options.html is not None:
        from ..report.html import write_report

        write_report(options.html, race=document, title="Race")
    if document["interrupted"]:
        return 130
    states = [row["status"] for race in document["races"] for row in race["contestants"].values()]
    return 1 if {"disqualified", "failed"} & set(states) else 0


def write(path: str | None, value: dict[str, Any]) -> None:
    """The document, where one was asked for: whole or not at all, "-" for standard output."""
    from ..summary import write_json
    from .documents import finite

    if path is not None:
        write_json(path, finite(value))


def list_contestants() -> int:
    for contestant in all_contestants().values():
        lacking = missing(contestant)
        state = f"not installed: {', '.join(lacking)}" if lacking else ", ".join(contestant.architectures)
        print(f"{contestant.name:<26} {contestant.group:<15} {contestant.note} ({state})")
    return 0


def compare_files(words: Sequence[str]) -> int:
    """`conformance race compare A.json B.json`."""
    from .documents import compare, read, show_comparison

    made = Parser(
        prog="conformance race compare",
        description="Two results of --json: the second's times as a ratio to the first's.",
        epilog="example: conformance race compare before.json after.json",
    )
    made.add_argument("first")
    made.add_argument("second")
    made.add_argument("--json", metavar="FILE", help="write the comparison; - for standard output")
    made.add_argument("--debug", action="store_true", help="show the traceback of an error")
    options = made.parse_args(words)
    found = compare(read(options.first), read(options.second))
    if options.json != "-":
        show_comparison(found)
    write(options.json, found)
    return 0
