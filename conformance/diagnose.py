"""What is wrong with a target: its outputs held against every known fault. `main` is `conformance diagnose`.

A hypothesis is a fault of the zoo: its functions, called on the same inputs, say what a target that had it would give.
One explains a failing row where the target's results and gradients are within the budget of the fault's; one is
contradicted where the fault shows on a row and the target does something else. The share of rows explained, of those
that failed or should have, orders the guesses.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from core_numpy.contract.arguments import Parser

from . import rows
from .memory import remembered, remembering
from .models import ModelCase
from .observations import Arrays, Row, bounds_of, cases_of, distance, look_at, observe, rows_of
from .progress import Bar
from .reference import reference
from .targets.protocol import STRIDED, Target
from .workers import THREADS, no_case, on_device
from .workers import TIMEOUT as CALL_TIMEOUT
from .zoo.catching import touched
from .zoo.every import all_faults, group_of
from .zoo.faults import Fault, Faulty

# Failing rows that every hypothesis is tried on; those that explain any are tried on all rows.
FIRST = 10
# How many guesses go on to all rows, and how many are printed.
BEST, SHOWN = 12, 3
# Guesses that more cases speak against than for are none: on the zoo the first guess has 0.75 at least.
LEAST = 0.5
# Guesses by the size of errors: how many times larger or smaller they may be, how many cases they need, and which part
# of those that speak. A wrong scale or mask is some hundred times larger than any rounding to bfloat16.
ALIKE, FEW, MOSTLY = 3.0, 3, 0.75
# Seconds for a diagnosis in a process of its own.
TIMEOUT = 300.0


@dataclass(frozen=True)
class Guess:
    """explained: failing rows whose numbers the fault gives. contradicted: rows where it should show and does not, or
    shows otherwise. closest, share: the explained row with the target nearest to the fault, in shares of its budget.
    by_size: not the digits agree but how large the errors are, share to away times the fault's."""

    fault: Fault
    explained: tuple[str, ...]
    contradicted: tuple[str, ...]
    closest: str
    share: float
    away: float
    by_size: bool = False

    @property
    def score(self) -> float:
        return len(self.explained) / max(len(self.explained) + len(self.contradicted), 1)


# Rounding that no single fault imitates to the digit: each half type rounds in its own places.
HALF = Fault(
    "half-arithmetic", "intermediate results in half precision", "subtle",
    "half types are computed in the half type itself, float32 and float64 are right; the contract computes in float32 "
    "at least and rounds once", dict,
)  # fmt: skip
# A few roundings of intermediate results take a few budgets, up to a hundred where sums are long.
MOST_ROUNDING = 1000.0


class Bench:
    """Observations of the reference and of the zoo, made once each."""

    def __init__(self) -> None:
        self.reference = Target(reference(), "core_numpy")
        # A fault that only fails to refuse shows in no number.
        self.faults = [f for f in all_faults() if not f.refusals]
        self.targets = {fault.id: Target(Faulty(fault), fault.id) for fault in self.faults}

    def of(self, name: str, row: Row) -> Arrays:
        """What the fault `name`, or "" for the reference, gives on a row."""
        plain = Row(row.case, row.dtype, "auto", 0.0, False, row.strided)
        target = self.targets[name] if name else self.reference
        return remembered(("seen", name, *_key(row)), lambda: observe(target, plain))

    def shows(self, fault: Fault, row: Row) -> bool:
        """Whether the fault changes the row's answer."""
        if row.case.function not in touched(fault):
            return False

        def make() -> bool:
            faulty = about(fault, row, self.of(fault.id, row))
            return distance(faulty, self.of("", row), bounds_of(row), row.dtype) > 1.0

        return remembered(("shows", fault.id, *_key(row)), make)


def _key(row: Row) -> tuple[str, ...]:
    return row.case.id, row.case.function, row.dtype, row.strided


def diagnose(target: Target, judged: Sequence[Row], bench: Bench) -> list[Guess]:
    """The best guesses, best first; several faults of different functions come one after the other."""
    return explain(judged, {row.case.id: observe(target, row) for row in judged if row.failed}, bench)


def explain(judged: Sequence[Row], seen: dict[str, Arrays], bench: Bench) -> list[Guess]:
    """The same from what the target gave on the rows that fail."""
    failing = [row for row in judged if row.failed]
    guesses: list[Guess] = []
    left = failing
    while left and len(guesses) < SHOWN:
        found = _ranked(left, judged, seen, bench)
        if not found:
            break
        guesses.append(found[0])
        left = [row for row in left if row.case.id not in found[0].explained]
    return [*guesses, *_by_size(left, judged, seen, bench), *_rounding(left)][:SHOWN]


def _rounding(left: Sequence[Row]) -> list[Guess]:
    """Cases that fail by a few budgets in a half type alone; wider types are judged first."""
    rounded = [row for row in left if row.dtype in ("bfloat16", "float16") and 1.0 < row.share < MOST_ROUNDING]
    if not rounded:
        return []
    least = min(rounded, key=lambda row: row.share)
    worst = max(rounded, key=lambda row: row.share)
    names = tuple(row.case.id for row in rounded)
    return [Guess(HALF, names, (), least.case.id, least.share, worst.share)]


def _ranked(left: Sequence[Row], judged: Sequence[Row], seen: dict[str, Arrays], bench: Bench) -> list[Guess]:
    functions = {row.case.function for row in left}
    candidates = [fault for fault in bench.faults if touched(fault) & functions]
    first = _spread(left, FIRST)
    tried = {fault.id: sum(_fits(fault, row, seen, bench) for row in first) for fault in candidates}
    most = sorted((fault for fault in candidates if tried[fault.id]), key=lambda fault: -tried[fault.id])[:BEST]
    guesses = [_guess(fault, left, judged, seen, bench) for fault in most]
    guesses = [guess for guess in guesses if guess.score >= LEAST]
    return sorted(guesses, key=lambda guess: (-guess.score, -len(guess.explained), guess.share))


def _spread(left: Sequence[Row], number: int) -> list[Row]:
    """So many rows, from the first to the last."""
    if len(left) <= number:
        return list(left)
    return [left[i] for i in np.linspace(0, len(left) - 1, number).round().astype(int)]


def _fits(fault: Fault, row: Row, seen: dict[str, Arrays], bench: Bench) -> bool:
    """Within the budget of the fault, and nearer to it than to the contract; where arrays that lie in one way give the
    first failure, the fault must not show in the ways before."""
    if row.case.function not in touched(fault):
        return False
    ways = ("", *STRIDED)
    if any(bench.shows(fault, replace(row, strided=way)) for way in ways[: ways.index(row.strided)]):
        return False
    near, far = _away(fault, row, seen, bench)
    return near <= 1.0 and 2.0 * near < far


def _away(fault: Fault, row: Row, seen: dict[str, Arrays], bench: Bench) -> tuple[float, float]:
    """How far the target is from the fault, and from the contract."""
    got, bounds = about(fault, row, seen[row.case.id]), bounds_of(row)
    near, far = (distance(got, bench.of(name, row), bounds, row.dtype) for name in (fault.id, ""))
    return near, far


def about(fault: Fault, row: Row, seen: Arrays) -> Arrays:
    """What the fault speaks of: not gradients, unless it changes those. A planted fault of a result leaves the
    reference's own gradients as they are; the gradients of a target that has it follow its result."""
    if isinstance(row.case, ModelCase) or f"gradients.{row.case.function}_vjp" in fault.functions():
        return seen
    return {name: x for name, x in seen.items() if not name.startswith("gradient of ")}


def _guess(fault: Fault, left: Sequence[Row], judged: Sequence[Row], seen: dict[str, Arrays], bench: Bench) -> Guess:
    explained, against, closest, share, away = [], [], "", np.inf, 0.0
    open_rows = {row.case.id for row in left}
    for row in judged:
        if row.failed and row.case.id in open_rows and _fits(fault, row, seen, bench):
            explained.append(row.case.id)
            near, far = _away(fault, row, seen, bench)
            if near < share or (near == share and np.isfinite(far) and not np.isfinite(away)):
                closest, share, away = row.case.id, near, far
        elif _both_raise(fault, row, seen, bench):
            continue
        elif bench.shows(fault, row) or (row.case.id in open_rows and row.case.function in touched(fault)):
            against.append(row.case.id)
    return Guess(fault, tuple(explained), tuple(against), closest, share, away)


def _both_raise(fault: Fault, row: Row, seen: dict[str, Arrays], bench: Bench) -> bool:
    """Errors of two kinds say nothing for a fault, and nothing against it: each framework has its own."""
    return (
        row.failed
        and row.case.function in touched(fault)
        and "error" in seen[row.case.id]
        and "error" in bench.of(fault.id, row)
    )


def _by_size(left: Sequence[Row], judged: Sequence[Row], seen: dict[str, Arrays], bench: Bench) -> list[Guess]:
    """Cases that fail in float32 by as much as a shorter type takes: what is rounded where differs from program to
    program, so that no fault gives the same digits; its errors are as large."""
    open_rows = {row.case.id for row in left if row.dtype == "float32" and row.share > 1.0 and not row.strided}
    if len(open_rows) < FEW:
        return []
    guesses = []
    for fault in [one for one in bench.faults if group_of(one) == "precision"]:
        asked = [row for row in judged if row.dtype == "float32" and row.case.function in touched(fault)]
        sizes = {row.case.id: _size(fault, row, seen, bench) for row in asked if row.case.id in open_rows}
        alike = {name: size for name, size in sizes.items() if 1.0 / ALIKE <= size <= ALIKE}
        against = [r.case.id for r in asked if r.case.id not in alike and (r.case.id in sizes or bench.shows(fault, r))]
        if len(alike) >= FEW:
            small, large = min(alike.values()), max(alike.values())
            guesses.append(Guess(fault, tuple(alike), tuple(against), "", small, large, by_size=True))
    guesses = [guess for guess in guesses if guess.score >= MOSTLY]
    return sorted(guesses, key=lambda guess: (-guess.score, abs(np.log(guess.share * guess.away))))[:1]


def _size(fault: Fault, row: Row, seen: dict[str, Arrays], bench: Bench) -> float:
    """How large the target's errors are on a row, as a multiple of the fault's: root mean squares in budgets."""
    got, like, right, bounds = seen[row.case.id], bench.of(fault.id, row), bench.of("", row), bounds_of(row)
    squares = np.zeros(2)
    for name, bound in bounds.items():
        if name.startswith("gradient of ") or name not in got or name not in like or got[name].shape != bound.shape:
            continue
        for i, found in enumerate((got, like)):
            error = np.asarray(found[name], dtype=np.float64) - np.asarray(right[name], dtype=np.float64)
            shares = np.divide(error, bound, out=np.zeros(bound.shape), where=(bound > 0) & np.isfinite(error))
            squares[i] += float((shares**2).sum())
    return float(np.sqrt(squares[0] / squares[1])) if squares.all() else np.inf


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


def evidence(guess: Guess) -> str:
    """How many cases the fault explains, and how near the target is to it."""
    number = len(guess.explained)
    cases = f"It explains {number} failing case{'s' * (number > 1)}"
    if guess.fault is HALF:
        if number == 1:
            return f"{cases}, {guess.closest}, which takes {guess.share:.3g} times its budget in a half type alone."
        return f"{cases}, which take {guess.share:.3g} to {guess.away:.3g} times their budgets in a half type alone."
    if guess.by_size:
        times = f"{guess.share:.2g} to {guess.away:.2g} times as large as this fault's"
        return f"{cases} in float32, by their size: errors {times}, though not the same ones."
    near = f"{guess.share:.2g} of the error budget" if guess.share > 0 else "no difference at all"
    far = f"{guess.away:.3g} times the budget" if np.isfinite(guess.away) else "no finite number of budgets"
    against = f"; {len(guess.contradicted)} speak against it" if guess.contradicted else ""
    return (
        f"{cases}{against}. On {guess.closest} there is {near} "
        f"between the target and this fault, and {far} between the target and the contract."
    )


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


def separately(name: str, level: str, pattern: str | None, timeout: float = CALL_TIMEOUT) -> dict[str, Any]:
    """The document of a diagnosis made in a process of its own, since the target may hang or die; {"note": why there is
    none} where it gave none."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "diagnosis.json")
        command = [sys.executable, "-m", "conformance", "diagnose", name, "--level", level, "--json", path]
        command += ["--case", pattern] if pattern else []
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
    parser.add_argument("--case", metavar="TEXT", help="only cases whose id contains TEXT, or of function TEXT")
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
    if not cases_of(options.level, options.case):
        raise no_case(options.case, options.level, what="no case that shows in numbers")
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
            print(f"nothing to diagnose: {len(judged)} cases pass")
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
