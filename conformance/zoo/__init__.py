"""The zoo: every known fault, planted in the reference, and the cases that catch it. `main` is `conformance zoo`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .. import rows
from ..runner import FAILED, run_case
from ..targets.protocol import Target
from . import attention_faults
from .faults import Fault, Faulty
from .naive import Naive, functions


@dataclass(frozen=True)
class Caught:
    """A fault and the ids of the cases that failed on it."""

    fault: Fault
    cases: tuple[str, ...]


def all_faults() -> list[Fault]:
    """In a fixed order; ids are unique."""
    found = [*attention_faults.faults()]
    names = [fault.id for fault in found]
    if len(set(names)) != len(names):
        raise ValueError(f"two faults have one id: {sorted(n for n in names if names.count(n) > 1)}")
    return found


def honest() -> Fault:
    """The naive attention with nothing planted: the suite must not blame it."""
    return Fault("none", "nothing is wrong", "blatant", lambda: functions(Naive))


def touched(fault: Fault) -> set[str]:
    """The functions whose cases can see the fault."""
    return {name.removeprefix("gradients.").removesuffix("_vjp") for name in fault.functions()}


def catch(fault: Fault, level: str = "quick", *, first: bool = False) -> Caught:
    """Run the cases of the functions that the fault touches; `first` stops at the first catch."""
    target = Target(Faulty(fault), fault.id)
    names = touched(fault)
    caught: list[str] = []
    for case in rows.select(rows.load_cases(), level):
        if case.function not in names or case.verb == "refuses":
            continue
        if any(result.status == FAILED for result in run_case(case, target)):
            caught.append(case.id)
            if first:
                break
    return Caught(fault, tuple(caught))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="conformance zoo",
        description="Plant every known fault and see which cases catch it.",
        epilog="example: conformance zoo --fault window --json zoo.json",
    )
    parser.add_argument("--level", default="quick", choices=rows.LEVELS)
    parser.add_argument("--fault", metavar="TEXT", help="only faults whose id contains TEXT")
    parser.add_argument("--json", metavar="FILE", help="write the score as JSON; - for standard output")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    options = parser.parse_args(argv)
    chosen = [fault for fault in all_faults() if not options.fault or options.fault in fault.id]
    if not chosen:
        raise ValueError(f"no fault has {options.fault!r} in its id")
    found = [catch(fault, options.level) for fault in chosen]
    blamed = catch(honest(), options.level)
    if options.json != "-":
        _print(found, blamed)
    if options.json:
        from ..summary import write_json

        write_json(options.json, score(found, options.level))
    return int(any(not caught.cases for caught in found) or bool(blamed.cases))


def score(found: Sequence[Caught], level: str) -> dict[str, Any]:
    return {
        "schema": 1,
        "level": level,
        "caught": sum(bool(caught.cases) for caught in found),
        "planted": len(found),
        "faults": [
            {"id": c.fault.id, "stands_for": c.fault.stands_for, "strength": c.fault.strength, "cases": list(c.cases)}
            for c in found
        ],
    }


def _print(found: Sequence[Caught], blamed: Caught) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 118)
    table = Table(title="planted faults")
    for name in ("fault", "strength", "stands for", "caught by"):
        table.add_column(name, overflow="fold")
    for caught in found:
        first = ", ".join(caught.cases[:2]) + (f" and {len(caught.cases) - 2} more" if len(caught.cases) > 2 else "")
        style = "" if caught.cases else "red"
        table.add_row(caught.fault.id, caught.fault.strength, caught.fault.stands_for, first or "NOTHING", style=style)
    console.print(table)
    number = sum(bool(caught.cases) for caught in found)
    console.print(f"{number} of {len(found)} planted faults caught", highlight=False)
    if blamed.cases:
        console.print(f"the honest variant is blamed by {json.dumps(list(blamed.cases))}", style="red", markup=False)
