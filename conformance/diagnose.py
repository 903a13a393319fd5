"""What is wrong with a target: its outputs held against every known fault. `main` is `conformance diagnose`.

A hypothesis is a fault of the zoo: its functions, called on the same inputs, say what a target that had it would give.
One explains a failing row where the target's results and gradients are within the budget of the fault's; one is
contradicted where the fault shows on a row and the target does something else. The share of rows explained, of those
that failed or should have, orders the guesses.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import budget, oracle, rows
from .inputs import rounded, widened
from .memory import remembered, remembering
from .rows import Case
from .runner import FAILED, _lse_dtype, arguments_of, run_case
from .targets.protocol import NotOffered, Target
from .zoo.catching import touched
from .zoo.every import all_faults
from .zoo.faults import Fault, Faulty

Arrays = dict[str, np.ndarray]
# Failing rows that every hypothesis is tried on; those that explain any are tried on all rows.
FIRST = 10
# How many guesses go on to all rows, and how many are printed.
BEST, SHOWN = 12, 3
NOT_FUNCTIONS = ("Transformer", "Trainer", "key")


@dataclass(frozen=True)
class Row:
    """A case in the dtype and kernel in which it is looked at; share: of its budget, over 1 failed."""

    case: Case
    dtype: str
    kernel: str
    share: float
    failed: bool


@dataclass(frozen=True)
class Guess:
    """explained: failing rows whose numbers the fault gives. contradicted: rows where it should show and does not, or
    shows otherwise. closest, share: the explained row with the target nearest to the fault, in shares of its budget."""

    fault: Fault
    explained: tuple[str, ...]
    contradicted: tuple[str, ...]
    closest: str
    share: float
    away: float

    @property
    def score(self) -> float:
        return len(self.explained) / max(len(self.explained) + len(self.contradicted), 1)


def rows_of(target: Target, level: str = "quick", pattern: str | None = None) -> list[Row]:
    """Every function row that the target offers, judged: failing ones in the dtype where they fail first."""
    found = []
    for case in rows.select(rows.load_cases(), level, pattern):
        if case.verb == "refuses":
            continue
        results = [result for result in run_case(case, target, level) if result.status != "not offered"]
        if not results:
            continue
        worst = next((result for result in results if result.status == FAILED), results[0])
        found.append(Row(case, worst.dtype, worst.kernel, worst.share, worst.status == FAILED))
    return found


def observe(target: Target, row: Row) -> Arrays:
    """What a target gives on a row: results and gradients by name, or the kind of its error."""
    case = row.case
    given = arguments_of(case, row.dtype, row.kernel)
    found: Arrays = {}
    try:
        with target.scope(row.dtype):
            for label, arguments in _variants(case, given, row.dtype):
                target.require(case.function, arguments)
                found |= {f"{label}{name}": x for name, x in target.call(case.function, arguments).items()}
            if case.gradients:
                cotangents = _cotangents(case, given, row.dtype)
                got = target.gradients(case.function, given, list(case.gradients), cotangents)
                found |= {f"gradient of {name}": x for name, x in got.items()}
    except NotOffered:
        pass
    except Exception as error:  # whatever a target raises is an observation
        return {"error": np.array(type(error).__name__)}
    return found


def _variants(case: Case, given: dict[str, Any], dtype: str) -> list[tuple[str, dict[str, Any]]]:
    calls = [("", given)]
    if case.unchanged is not None:
        name, place = case.unchanged["input"], case.unchanged["at"]
        for value in case.unchanged["values"]:
            moved = given[name].copy()
            moved[tuple(slice(*pair) for pair in place)] = rounded(
                np.float64({"nan": np.nan, "inf": np.inf}.get(value, value)) * np.ones(()), dtype
            )
            calls.append((f"{name} at {value}: ", {**given, name: moved}))
    return calls


def _expected(case: Case, given: dict[str, Any], dtype: str) -> oracle.Expected:
    exact = {name: widened(x) for name, x in given.items() if name != "kernel"}
    return oracle.expected(case.id, case.function, exact, list(case.gradients), dtype)


def _cotangents(case: Case, given: dict[str, Any], dtype: str) -> Arrays:
    found = _expected(case, given, dtype).cotangents
    return {name: rounded(x, _lse_dtype(dtype) if name == "lse" else dtype) for name, x in found.items()}


def bounds_of(row: Row) -> Arrays:
    """The row's budgets under the names of its observations."""

    def make() -> Arrays:
        want = _expected(row.case, arguments_of(row.case, row.dtype), row.dtype)
        return want.bounds | {f"gradient of {name}": x for name, x in want.gradient_bounds.items()}

    return remembered(("bounds", row.case.id, row.dtype), make)


def distance(got: Arrays, other: Arrays, bounds: Arrays, dtype: str) -> float:
    """The largest difference in shares of the budget; infinite where shapes, dtypes, NaN or exact values differ.

    What only `other` has is passed over: a target may have no gradients.
    """
    if not got or not set(got) <= set(other):
        return np.inf
    return max((_apart(name, x, other[name], bounds, dtype) for name, x in got.items()), default=0.0)


def _apart(name: str, x: np.ndarray, y: np.ndarray, bounds: Arrays, dtype: str) -> float:
    if x.shape != y.shape or x.dtype != y.dtype or x.dtype.kind == "U":
        return 0.0 if x.shape == y.shape and x.dtype.kind == y.dtype.kind == "U" and bool((x == y).all()) else np.inf
    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if same.all():
        return 0.0
    bound = bounds.get(name.rsplit(": ", 1)[-1])
    error = np.abs(np.subtract(a, b, out=np.zeros(a.shape), where=~same))
    if bound is None or bound.shape != a.shape or not np.isfinite(error).all():
        return np.inf
    # A fault's own result may be larger than the right one, and stand where the right one is exactly 0.
    size = np.where(np.isfinite(b), np.abs(b), 0.0)
    allowed = bound + np.mean(bound) + budget.OUTPUT * budget.UNIT[dtype] * size
    return float(np.max(np.divide(error, allowed, out=np.full(a.shape, np.inf), where=allowed > 0)[~same]))


class Bench:
    """Observations of the reference and of the zoo, made once each."""

    def __init__(self) -> None:
        self.reference = Target(oracle.reference(), "core_numpy")
        # A fault that only fails to refuse shows in no number.
        self.faults = [f for f in all_faults() if not f.refusals and not touched(f) & set(NOT_FUNCTIONS)]
        self.targets = {fault.id: Target(Faulty(fault), fault.id) for fault in self.faults}

    def of(self, name: str, row: Row) -> Arrays:
        """What the fault `name`, or "" for the reference, gives on a row."""
        plain = Row(row.case, row.dtype, "auto", 0.0, False)
        target = self.targets[name] if name else self.reference
        return remembered(("seen", name, row.case.id, row.dtype), lambda: observe(target, plain))

    def shows(self, fault: Fault, row: Row) -> bool:
        """Whether the fault changes the row's answer."""
        if row.case.function not in touched(fault):
            return False

        def make() -> bool:
            return distance(self.of(fault.id, row), self.of("", row), bounds_of(row), row.dtype) > 1.0

        return remembered(("shows", fault.id, row.case.id, row.dtype), make)


def diagnose(target: Target, judged: Sequence[Row], bench: Bench) -> list[Guess]:
    """The best guesses, best first; several faults of different functions come one after the other."""
    failing = [row for row in judged if row.failed]
    seen = {row.case.id: observe(target, row) for row in failing}
    guesses: list[Guess] = []
    left = failing
    while left and len(guesses) < SHOWN:
        found = _ranked(left, judged, seen, bench)
        if not found:
            break
        guesses.append(found[0])
        left = [row for row in left if row.case.id not in found[0].explained]
    return guesses


def _ranked(left: Sequence[Row], judged: Sequence[Row], seen: dict[str, Arrays], bench: Bench) -> list[Guess]:
    functions = {row.case.function for row in left}
    candidates = [fault for fault in bench.faults if touched(fault) & functions]
    first = _spread(left, FIRST)
    tried = {fault.id: sum(_fits(fault, row, seen, bench) for row in first) for fault in candidates}
    most = sorted((fault for fault in candidates if tried[fault.id]), key=lambda fault: -tried[fault.id])[:BEST]
    guesses = [_guess(fault, left, judged, seen, bench) for fault in most]
    return sorted(guesses, key=lambda guess: (-guess.score, -len(guess.explained), guess.share))


def _spread(left: Sequence[Row], number: int) -> list[Row]:
    """So many rows, from the first to the last."""
    if len(left) <= number:
        return list(left)
    return [left[i] for i in np.linspace(0, len(left) - 1, number).round().astype(int)]


def _fits(fault: Fault, row: Row, seen: dict[str, Arrays], bench: Bench) -> bool:
    """Within the budget of the fault, and nearer to it than to the contract."""
    if row.case.function not in touched(fault):
        return False
    near = _away(fault.id, row, seen, bench)
    return near <= 1.0 and 2.0 * near < _away("", row, seen, bench)


def _away(name: str, row: Row, seen: dict[str, Arrays], bench: Bench) -> float:
    return distance(seen[row.case.id], bench.of(name, row), bounds_of(row), row.dtype)


def _guess(fault: Fault, left: Sequence[Row], judged: Sequence[Row], seen: dict[str, Arrays], bench: Bench) -> Guess:
    explained, against, closest, share, away = [], [], "", np.inf, 0.0
    open_rows = {row.case.id for row in left}
    for row in judged:
        if row.failed and row.case.id in open_rows and _fits(fault, row, seen, bench):
            explained.append(row.case.id)
            near, far = (_away(name, row, seen, bench) for name in (fault.id, ""))
            if near < share or (near == share and np.isfinite(far) and not np.isfinite(away)):
                closest, share, away = row.case.id, near, far
        elif bench.shows(fault, row) or (row.case.id in open_rows and row.case.function in touched(fault)):
            against.append(row.case.id)
    return Guess(fault, tuple(explained), tuple(against), closest, share, away)


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


def sentence(guess: Guess) -> str:
    """The diagnosis with its evidence."""
    near = f"{guess.share:.2g} of the error budget" if guess.share > 0 else "no difference at all"
    far = f"{guess.away:.3g} times the budget" if np.isfinite(guess.away) else "no finite number of budgets"
    against = f"; {len(guess.contradicted)} rows speak against it" if guess.contradicted else ""
    return (
        f"{guess.fault.diagnosis}.\n  It explains {len(guess.explained)} failing rows{against}. On {guess.closest} "
        f"there is {near} between the target and this fault, and {far} between the target and the contract."
    )


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="conformance diagnose",
        description="Say what is wrong with a target: hold its outputs against every known fault.",
        epilog="example: conformance diagnose my_package.my_attention --case causal",
    )
    parser.add_argument("target", help="a module, as for `conformance run`")
    parser.add_argument("--level", default="quick", choices=rows.LEVELS)
    parser.add_argument("--case", metavar="TEXT", help="only cases whose id contains TEXT, or of function TEXT")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    options = parser.parse_args(argv)
    from .targets import load

    target = load(options.target)
    with remembering():
        judged = rows_of(target, options.level, options.case)
        if not judged:
            raise ValueError(f"{options.target} offers nothing that a function row could judge")
        failing = [row.case.id for row in judged if row.failed]
        if not failing:
            print(f"nothing to diagnose: {len(judged)} function rows pass")
            return 0
        guesses = diagnose(target, judged, Bench())
    explained = {name for guess in guesses for name in guess.explained}
    for number, guess in enumerate(guesses, 1):
        print(f"{number}. {sentence(guess)}")
    rest = [name for name in failing if name not in explained]
    if rest:
        print(f"no known fault explains {', '.join(rest[:8])}" + (f" and {len(rest) - 8} more" if rest[8:] else ""))
    return 1
