"""`conformance zoo`: the score, and which cases caught what."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from core_numpy.contract.arguments import Parser

from .. import models, rows, space
from ..memory import remembering
from ..progress import Bar
from .catching import Caught, catch, touched
from .every import GROUPS, all_faults, group_of
from .honest import variants


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="conformance zoo",
        description="Plant every known fault and see which cases catch it.",
        epilog="example: conformance zoo --fault window --all --json zoo.json",
    )
    parser.add_argument("--level", default="quick", choices=rows.LEVELS)
    parser.add_argument("--fault", metavar="TEXT", help="only faults whose id contains TEXT, or of group TEXT")
    parser.add_argument("--all", action="store_true", help="run on after the first catch, and list every fault")
    parser.add_argument("--cases", action="store_true", help="what each case catches, and those that catch nothing")
    parser.add_argument("--diagnose", action="store_true", help="how many faults `conformance diagnose` names rightly")
    parser.add_argument(
        "--mutate", type=int, metavar="N", help="judge N single changes of the reference's own lines (0: all of them)"
    )
    parser.add_argument("--tests", action="store_true", help="with --mutate: ask our own tests where no case catches")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="which lines are changed; default: 0")
    parser.add_argument("--json", metavar="FILE", help="write the score as JSON; - for standard output")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    options = parser.parse_args(argv)
    if options.mutate is not None:
        from .mutation_score import command

        if options.mutate < 0 or options.seed < 0:
            raise ValueError(f"--mutate and --seed must be 0 or more; got {options.mutate} and {options.seed}")
        return command(options.mutate, options.seed, options.level, options.json, options.tests)
    chosen = [
        fault
        for fault in all_faults()
        if not options.fault or options.fault in fault.id or options.fault == group_of(fault)
    ]
    if not chosen:
        raise ValueError(f"no fault has {options.fault!r} in its id, and no group has that name")
    if options.diagnose:
        return _diagnose(chosen, options.level)
    everything = options.all or options.cases or bool(options.json)
    found = []
    with remembering(), Bar(len(chosen), quiet=options.json == "-") as seen:
        for fault in chosen:
            found.append(catch(fault, options.level, first=not everything))
            seen(fault.id)
        functions = {name for fault in chosen for name in touched(fault)}
        blamed = [catch(variant, options.level) for variant in variants() if touched(variant) & functions]
    if options.json != "-":
        if options.cases:
            _print_cases(found, options.level)
        elif options.all:
            _print_all(found)
        _print_score(found, blamed)
    if options.json:
        from ..summary import write_json

        write_json(options.json, score(found, options.level))
    return int(any(not caught.cases for caught in found) or any(caught.cases for caught in blamed))


def score(found: Sequence[Caught], level: str) -> dict[str, Any]:
    return {
        "schema": 2,
        "level": level,
        "caught": sum(bool(caught.cases) for caught in found),
        "planted": len(found),
        "faults": [
            {
                "id": c.fault.id,
                "group": group_of(c.fault),
                "stands_for": c.fault.stands_for,
                "strength": c.fault.strength,
                "diagnosis": c.fault.diagnosis,
                "share": c.share,
                "cases": list(c.cases),
            }
            for c in found
        ],
    }


def catches(found: Sequence[Caught], level: str) -> dict[str, list[str]]:
    """For each case of the level that is no refusal: the faults that it caught."""
    cases = [case.id for case in space.select(level) if case.verb != "refuses"]
    by_case: dict[str, list[str]] = {name: [] for name in [*cases, *(c.id for c in models.select_models(level))]}
    for caught in found:
        for name in caught.cases:
            by_case.setdefault(name, []).append(caught.fault.id)
    return by_case


def _console() -> Any:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 118)


def _table(title: str, *columns: str) -> Any:
    from rich.table import Table

    table = Table(title=title)
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _print_all(found: Sequence[Caught]) -> None:
    table = _table("planted faults", "fault", "strength", "stands for", "caught by")
    for caught in found:
        style = "" if caught.cases else "red"
        row = (caught.fault.id, caught.fault.strength, caught.fault.stands_for, _some(caught.cases) or "NOTHING")
        table.add_row(*row, style=style)
    _console().print(table)


def _print_cases(found: Sequence[Caught], level: str) -> None:
    by_case = catches(found, level)
    table = _table("what each case catches", "case", "faults", "among them")
    for name, faults in by_case.items():
        if faults:
            table.add_row(name, str(len(faults)), _some(faults))
    console = _console()
    console.print(table)
    nothing = [name for name, faults in by_case.items() if not faults]
    console.print(f"{len(nothing)} cases catch nothing of this: {', '.join(nothing)}", highlight=False)


def _print_score(found: Sequence[Caught], blamed: Sequence[Caught]) -> None:
    table = _table("planted faults", "group", "planted", "caught", "blatant", "subtle", "rare")
    for group in GROUPS:
        own = [caught for caught in found if group_of(caught.fault) == group]
        if own:
            kinds = [
                f"{sum(bool(c.cases) for c in own if c.fault.strength == kind)}/"
                f"{sum(c.fault.strength == kind for c in own)}"
                for kind in ("blatant", "subtle", "rare")
            ]
            table.add_row(group, str(len(own)), str(sum(bool(c.cases) for c in own)), *kinds)
    console = _console()
    console.print(table)
    missed = [caught.fault.id for caught in found if not caught.cases]
    console.print(f"{len(found) - len(missed)} of {len(found)} planted faults caught", highlight=False)
    if missed:
        console.print(f"caught by nothing: {', '.join(missed)}", style="red", markup=False)
    for caught in blamed:
        if caught.cases:
            console.print(f"{caught.fault.id} is blamed by {', '.join(caught.cases)}", style="red", markup=False)


def _diagnose(chosen: Sequence[Any], level: str) -> int:
    """The diagnosis has a score of its own: the first guess, on the faults of functions."""
    from ..diagnose import named_rightly, score_zoo
    from ..guesses import Bench

    known = {fault.id for fault in Bench().faults}
    found = score_zoo([fault for fault in chosen if fault.id in known], level)
    right = set(named_rightly(found))
    for fault, guesses in found:
        if fault.id not in right:
            print(f"{fault.id} is taken for {guesses[0].fault.id if guesses else 'nothing known'}")
    print(f"{len(right)} of {len(found)} planted faults named rightly at the first guess")
    return int(len(right) < 0.9 * len(found))
