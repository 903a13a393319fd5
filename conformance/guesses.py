"""What a target could have got wrong: its observations held against those of every known fault.

A hypothesis is a fault of the zoo: its functions, called on the same inputs, say what a target that had it would give.
One explains a failing row where the target's results and gradients are within the budget of the fault's; one is
contradicted where the fault shows on a row and the target does something else. The share of rows explained, of those
that failed or should have, orders the guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .memory import remembered
from .models import ModelCase
from .observations import Arrays, Row, bounds_of, distance, observe
from .reference import reference
from .targets.protocol import STRIDED, Target
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
        if not found:  # a fault in wider types may stand beside one of rounding, whose cases speak against any
            found = _ranked(_unrounded(left), _unrounded(judged), seen, bench)
        if not found:  # several faults of one function: the cases of each fail for want of the others
            found = _ranked(left, judged, seen, bench, among=True)
        if not found:
            break
        guesses.append(found[0])
        left = [row for row in left if row.case.id not in found[0].explained]
    return [*guesses, *_by_size(left, judged, seen, bench), *_rounding(left)][:SHOWN]


def _rounding(left: Sequence[Row]) -> list[Guess]:
    """Cases that fail by a few budgets in a half type alone; wider types are judged first."""
    wide = _unrounded(left)
    rounded = [row for row in left if row not in wide]
    if not rounded:
        return []
    least = min(rounded, key=lambda row: row.share)
    worst = max(rounded, key=lambda row: row.share)
    names = tuple(row.case.id for row in rounded)
    return [Guess(HALF, names, (), least.case.id, least.share, worst.share)]


def _unrounded(rows: Sequence[Row]) -> list[Row]:
    """Those that do not fail in a half type by what its rounding alone may take."""
    return [row for row in rows if row.dtype not in ("bfloat16", "float16") or not 1.0 < row.share < MOST_ROUNDING]


def _ranked(
    left: Sequence[Row], judged: Sequence[Row], seen: dict[str, Arrays], bench: Bench, among: bool = False
) -> list[Guess]:
    """The faults that explain any, best first; with `among`, as one of several: a failing case in which a fault would
    not show speaks of another one, and not against it."""
    functions = {row.case.function for row in left}
    candidates = [fault for fault in bench.faults if touched(fault) & functions]
    first = [
        *_spread([r for r in left if not _raised(r, seen)], FIRST),
        *_spread([r for r in left if _raised(r, seen)], FIRST),
    ]
    tried = {fault.id: sum(_fits(fault, row, seen, bench) for row in first) for fault in candidates}
    most = sorted((fault for fault in candidates if tried[fault.id]), key=lambda fault: -tried[fault.id])[:BEST]
    guesses = [_guess(fault, left, judged, seen, bench, among) for fault in most]
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


def _guess(
    fault: Fault, left: Sequence[Row], judged: Sequence[Row], seen: dict[str, Arrays], bench: Bench, among: bool
) -> Guess:
    explained, against, closest, share, away = [], [], "", np.inf, 0.0
    open_rows = {row.case.id for row in left}
    for row in judged:
        if row.failed and row.case.id in open_rows and _fits(fault, row, seen, bench):
            explained.append(row.case.id)
            near, far = _away(fault, row, seen, bench)
            if near < share or (near == share and np.isfinite(far) and not np.isfinite(away)):
                closest, share, away = row.case.id, near, far
        elif row.failed and _raised(row, seen):
            continue
        elif bench.shows(fault, row) or (
            not among and row.case.id in open_rows and row.case.function in touched(fault)
        ):
            against.append(row.case.id)
    return Guess(fault, tuple(explained), tuple(against), closest, share, away)


def _raised(row: Row, seen: dict[str, Arrays]) -> bool:
    """Whether the target raised where an answer was due. That says nothing against a fault that others show: the two
    may stand side by side, and errors that two programs raise are of two kinds."""
    return "error" in seen[row.case.id] and "wrote into" not in str(seen[row.case.id]["error"])


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
    others = len(guess.contradicted)
    against = f"; {others} speak{'s' * (others == 1)} against it" if others else ""
    return (
        f"{cases}{against}. On {guess.closest} there is {near} "
        f"between the target and this fault, and {far} between the target and the contract."
    )
