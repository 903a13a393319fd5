"""`conformance diagnose`: what is wrong with a target, its outputs held against every known fault (guesses.py)."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from core_numpy.contract.arguments import Parser

from . import rows
from .guesses import Bench, Guess, diagnose, evidence, explain
from .memory import remembering
from .observations import Arrays, Row, cases_of, look_at, rows_of
from .progress import Bar
from .workers import THREADS, no_case, on_device
from .workers import TIMEOUT as CALL_TIMEOUT
from .zoo.catching import touched
from .zoo.faults import Fault

# Seconds for a diagnosis in a process of its own.
TIMEOUT = 300.0


def score_zoo(faults: Iterable[Fault] | None = None, level: str = "quick") -> list[tuple[Fault, list[Guess]]]:
    """Every fault of functions diagnosed as if it were a target that came from outside."""
    found = []
    with remembering():
        bench = Bench()
        for fault in bench.faults if faults is None else faults:
            target = bench.targets[fault.id]
            own = [row for name in sorted(touched(fault)) for row in rows_of(target, level, name)]
            functions = touched(fault)
            found.append((fault, diagnose(target, [r for r in own if r.case.function in functions], bench)))
    return found


def named_rightly(found: Sequence[tuple[Fault, list[Guess]]]) -> list[str]:
    """The ids of the faults whose first guess was right."""
    return [fault.id for fault, guesses in found if guesses and guesses[0].fault.id == fault.id]


def document(target: str, failing: Sequence[str], guesses: Sequence[Guess]) -> dict[str, Any]:
    """The JSON document of a diagnosis (docs/json.md)."""
    explained = {name for guess in guesses for name in guess.explained}
    return {
        "schema": 1,
        "target": target,
        "failing": list(failing),
        "guesses": [
            {
                "fault": guess.fault.id,
                "diagnosis": guess.fault.diagnosis,
                "stands_for": guess.fault.stands_for,
                "evidence": evidence(guess),
                "explained": list(guess.explained),
                "contradicted": list(guess.contradicted),
            }
            for guess in guesses
        ],
        "unexplained": [name for name in failing if name not in explained],
    }


def separately(name: str, level: str, pattern: rows.Pattern, timeout: float = CALL_TIMEOUT) -> dict[str, Any]:
    """The document of a diagnosis made in a process of its own, since the target may hang or die; {"note": why there is
    none} where it gave none."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "diagnosis.json")
        command = [sys.executable, "-m", "conformance", "diagnose", name, "--level", level, "--json", path]
        for text in rows.texts_of(pattern):
            command += ["--case", text]
        command += ["--timeout", f"{timeout:g}"]
        paths = os.pathsep.join(filter(None, [*sys.path, os.getcwd()]))
        environment = {**os.environ, **THREADS, "PYTHONPATH": paths}
        # Into a file: a pipe would stay open as long as anything that a hanging target started.
        with open(os.path.join(folder, "said.txt"), "w+", encoding="utf-8", errors="replace") as heard:
            process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=heard, env=environment, start_new_session=True
            )
            try:
                process.wait(timeout=TIMEOUT)
            except subprocess.TimeoutExpired:
                return {"note": f"the diagnosis took longer than {TIMEOUT:g} seconds and was ended"}
            finally:
                process.kill()  # the target's process ends when this one is gone
                process.wait()
            heard.seek(0)
            said = heard.read()
        try:
            with open(path, encoding="utf-8") as file:
                found: dict[str, Any] = json.load(file)
        except (OSError, ValueError):
            return {"note": f"there is no diagnosis: {(said.strip().splitlines() or ['it said nothing'])[-1]}"}
    return found


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="conformance diagnose",
        description="Say what is wrong with a target: hold its outputs against every known fault.",
        epilog="example: conformance diagnose my_package.my_attention --case causal",
    )
    parser.add_argument("target", help="a module, as for `conformance run`")
    parser.add_argument("--level", default="quick", choices=rows.LEVELS)
    parser.add_argument("--case", action="append", metavar="TEXT", help=rows.CASE_HELP)
    parser.add_argument("--device", metavar="DEVICE", help="where a target of torch or JAX computes: cpu, cuda, ...")
    parser.add_argument("--json", metavar="FILE", help="write the diagnosis as JSON; - for standard output")
    parser.add_argument(
        "--timeout", type=float, metavar="SECONDS", default=CALL_TIMEOUT,
        help="end a target that is silent for longer in one case; default: 120",
    )  # fmt: skip
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    options = parser.parse_args(argv)
    if not options.timeout > 0:
        raise ValueError(f"--timeout must be a positive number of seconds; got {options.timeout:g}")
    for text in rows.texts_of(options.case):
        if not cases_of(options.level, text):
            raise no_case(text, options.level, what="no case that shows in numbers")
    with on_device(options.device), remembering():
        name, judged, seen, lost = _looked(options)
        if not judged and not lost:
            raise ValueError(f"{options.target} offers nothing that these cases ask for")
        failing = [row.case.id for row in judged if row.failed]
        guesses = explain(judged, seen, Bench()) if failing else []
    failing += lost
    found = document(name, failing, guesses)
    if options.json:
        from .summary import write_json

        write_json(options.json, found)
    if options.json != "-":
        print_document(name, found)
        if not failing:
            print(f"nothing to diagnose: {len(judged)} case{'s pass' if len(judged) != 1 else ' passes'}")
    return int(bool(failing))


def _looked(options: argparse.Namespace) -> tuple[str, list[Row], dict[str, Arrays], list[str]]:
    """The target's name, its cases judged, what it gave on those that fail, and the ids of those that have no answer
    because it hung or died there: each way of that is said once on standard error."""
    from .isolated import Isolated, LostError

    judged: list[Row] = []
    seen: dict[str, Arrays] = {}
    lost: list[str] = []
    said: set[str] = set()
    there = Isolated(options.target, options.level, options.timeout)
    cases = cases_of(options.level, options.case)
    try:
        with Bar(len(cases), quiet=options.json == "-") as advance:
            for case in cases:
                try:
                    found = there.ask(case.function, look_at, case, options.level)
                except LostError as why:
                    lost.append(case.id)
                    if str(why) not in said:
                        print(f"conformance diagnose: {case.id}: {why}", file=sys.stderr)
                    said.add(str(why))
                    continue
                finally:
                    advance(case.id)
                if found is not None:
                    judged.append(found[0])
                    seen[case.id] = found[1]
    finally:
        there.end()
    if there.notes:
        print(f"conformance diagnose: {options.target}: {'; '.join(there.notes)}", file=sys.stderr)
    return there.offer.name, judged, seen, lost


def print_document(target: str, found: Mapping[str, Any]) -> None:
    """A diagnosis for the terminal: the guesses with their evidence, and what they leave open."""
    if "note" in found:
        print(f"{target}: {found['note']}")
        return
    for number, guess in enumerate(found["guesses"], 1):
        print(f"{number}. {guess['diagnosis']}.\n  {guess['evidence']}")
    rest = found["unexplained"]
    if rest:
        print(f"no known fault explains {', '.join(rest[:8])}" + (f" and {len(rest) - 8} more" if rest[8:] else ""))
