"""`conformance run --fuzz SECONDS`: random cases over the argument space; what fails is made small and printed.

Draw number i of a seed is the same case on every machine. A failing one is shrunk: arguments are dropped and axes
shortened while it fails in the same way, so that what is left names the arguments that it takes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from .pairwise import Choice, completed
from .rows import Case
from .runner import FAILED, Result, four_digits, judge_call
from .space import attention_space, case_of, possible
from .targets.protocol import NotOffered, Target

# So many different failures are shrunk and printed; more of them would hardly be read.
MOST = 10
# Judged calls that a failure's shrinking may take: a way from the largest case to the smallest takes about sixty.
SHRINKING = 200
_RAISED = re.compile(r"\w+(Error|Exception|Exit): ")


@dataclass(frozen=True)
class Failure:
    """case: the shrunk one. result: its judgement. whole: shrinking came to its end before the time did."""

    case: Case
    result: Result
    whole: bool

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.case.id,
            "dtype": self.result.dtype,
            "kernel": self.result.kernel,
            "detail": self.result.detail,
            "share": four_digits(self.result.share),
            "shrunk": self.whole,
            "row": to_toml(self.case),
        }


def drawn(target: Target, seed: int, number: int) -> tuple[Choice, str]:
    """Draw `number` of a seed: a choice that the target's functions and dtypes allow, and the name of a kernel."""
    space = attention_space()
    draw = np.random.Generator(np.random.Philox(key=[seed, number]))
    factors = dict(space.factors)
    # A target with `attention` alone is asked for the log-sum-exp too, and judged by its output.
    lone = target.offers("attention")
    functions = [f for f in factors["function"] if target.offers(f) or (lone and f == "attention_with_lse")]
    if not functions:
        raise LookupError(f"target {target.name!r} has no attention function, which random cases are drawn for")
    factors["function"] = tuple(functions)
    for name, arguments in _ARGUMENTS.items():
        if not any(_takes(target, function, arguments) for function in functions):
            factors[name] = factors[name][:1]
    factors["dtype"] = tuple(d for d in factors["dtype"] if d in target.dtypes())
    order = [list(factors)[i] for i in draw.permutation(len(factors))]
    # Half of the draws leave each argument out: with all of them at once little is left to see.
    plain = {name: draw.random() < 0.5 for name in factors}

    def ranked(name: str) -> list[Any]:
        values = factors[name]
        mixed = [values[i] for i in draw.permutation(len(values))]
        return [values[0], *mixed] if plain[name] and name not in ("keys", "queries", "dtype", "function") else mixed

    choice = completed({}, order, factors, space.excluded, ranked)
    assert choice is not None  # every factor has a plain value, and those stand together
    kernels = target.kernels()
    return _moved(choice, draw), kernels[int(draw.integers(len(kernels)))]


# The arguments that a factor's values need; what a target does not take is left out of its draws.
_ARGUMENTS = {
    "mask": ("mask",), "bias": ("bias",), "causal": ("causal",), "window": ("window",), "q_offset": ("q_offset",),
    "kv_lengths": ("kv_lengths",), "segments": ("q_segments", "kv_segments"), "sinks": ("sinks",), "scale": ("scale",),
    "softcap": ("softcap",), "dropout": ("dropout_rate", "dropout_key"),
}  # fmt: skip


def _takes(target: Target, function: str, arguments: tuple[str, ...]) -> bool:
    try:
        target.require(function if target.offers(function) else "attention", dict.fromkeys(arguments))
    except NotOffered:
        return False
    return True


def _moved(choice: Choice, draw: np.random.Generator) -> Choice:
    """In half of the draws lengths, head sizes and numbers of their own in the place of the listed ones."""
    if draw.random() < 0.5:
        return choice
    moved = dict(choice)
    if choice["keys"] < 1000:
        moved["keys"] = int(draw.integers(1, 161))
    if choice["queries"] != "same":
        moved["queries"] = int(draw.integers(1, 101))
    # Small ones of any kind, and those of models: kernels cut heads into tiles of 16 to 128.
    large = draw.random() < 0.5
    moved["sizes"] = tuple(8 * int(draw.integers(4, 33)) if large else int(draw.integers(1, 25)) for _ in range(2))
    if choice["scale"] != "none":
        moved["scale"] = round(float(draw.uniform(-1.5, 1.5)), 3)
    if choice["softcap"] != "none":
        moved["softcap"] = round(float(10.0 ** draw.uniform(-1, 2)), 3)
    if choice["dropout"] != "none":
        moved["dropout"] = round(float(draw.uniform(0.01, 0.99)), 3)
    return moved


def fuzz(
    target: Target,
    seed: int,
    *,
    until: Callable[[], bool],
    start: int = 0,
    seen: Callable[[int, Case], None] = lambda number, case: None,
) -> Iterator[tuple[int, Result, Failure | None]]:
    """Draws from number `start` on until `until()`: each with its result and, where it failed in a new way, the failure
    made small. `seen` is told of each case before it is judged."""
    shrunk: set[str] = set()
    number = start
    while not until():
        choice, kernel = drawn(target, seed, number)
        case = case_of(f"fuzz-{seed}-{number}", choice)
        seen(number, case)
        result = judge_call(case, target, case.dtypes[0], kernel)
        failure = None
        if result.status == FAILED and len(shrunk) < MOST:
            failure = shrink(target, choice, case, result, until=until, seen=partial(seen, number))
            alike = _alike(failure)
            failure = None if alike in shrunk else failure
            shrunk.add(alike)
        yield number, result, failure
        number += 1


def as_found(case: Case) -> Case:
    """The case as a row of its own."""
    why = case.why.replace("two arguments that are right one by one and wrong together", "found by fuzzing")
    return replace(case, why=why, level="quick")


def _alike(failure: Failure) -> str:
    """What two failures have in common that are likely one fault: the arguments that are left, not their values."""
    case = failure.case
    return f"{case.function} {sorted(case.inputs)} {sorted(case.arguments)} {failure.result.where.split('[')[0]}"


def shrink(
    target: Target,
    choice: Choice,
    case: Case,
    result: Result,
    *,
    until: Callable[[], bool],
    seen: Callable[[Case], None] = lambda case: None,
) -> Failure:
    """The smallest choice found that still fails in the same way: greedy, factor by factor, until none gives way."""
    raised, tries, whole = bool(_RAISED.match(result.detail)), 0, True
    going = True
    while going:
        going = False
        for name in ("distribution", *_ORDER):
            for value in _smaller(name, choice, target):
                if until() or tries >= SHRINKING:
                    whole = going = False
                    break
                other = {**choice, name: value}
                if not possible(other):
                    continue
                tries += 1
                small = case_of(case.id, other)
                seen(small)
                again = judge_call(small, target, small.dtypes[0], result.kernel)
                if again.status == FAILED and bool(_RAISED.match(again.detail)) == raised:
                    choice, case, result, going = other, small, again, True
                    break
            if not whole:
                break
    return Failure(as_found(case), result, whole)


# Restrictions first, then types, then sizes: each argument that goes makes the rest faster.
_ORDER = (
    "dropout", "softcap", "scale", "sinks", "segments", "kv_lengths", "bias", "mask", "window", "q_offset", "causal",
    "dtype", "function", "batch", "heads", "queries", "keys", "sizes",
)  # fmt: skip


# Of these every plainer value is tried, of the others the plainest alone.
_LADDERS = ("dtype", "function", "q_offset", "window")


def _smaller(name: str, choice: Choice, target: Target) -> list[Any]:
    """Values to try in the place of the choice's, the smallest or plainest first."""
    now = choice[name]
    if name in _SIZES:
        return _SIZES[name](now)
    values = attention_space().factors[name]
    if name == "dtype":
        values = tuple(d for d in values if d in target.dtypes())
    elif name == "function":
        values = tuple(f for f in values if target.offers(f))
    if now not in values:  # a number of its own
        return [values[0]]
    place = values.index(now)
    return list(values[:place] if name in _LADDERS else values[: min(place, 1)])


def _shorter(now: Any) -> list[int]:
    """Lengths below; "same" follows the keys."""
    steps = (1, 2, 3, 4, 5, 7, 9, 17, now // 2, now - 1) if now != "same" else ()
    return sorted({n for n in steps if 0 < n < now})


def _head_sizes(now: tuple[int, int]) -> list[tuple[int, int]]:
    tried = ((1, 1), (2, 1), (4, 1), (now[0], 1), (1, now[1]))
    return [(d, e) for d, e in tried if (d, e) < now and e <= now[1]]


def _fewer_axes(now: Any) -> list[tuple[int, ...]]:
    return [value for value in ((), (2,)) if value != now and (now == "no heads" or len(value) < len(now))]


_SIZES: dict[str, Callable[[Any], list[Any]]] = {
    "keys": _shorter,
    "queries": _shorter,
    "sizes": _head_sizes,
    "batch": _fewer_axes,
    "heads": lambda now: [value for value in ((1, 1), (2, 2), (2, 1), (4, 2)) if value < now],
}


def to_toml(case: Case) -> str:
    """The case as a row to paste into a file of cases."""
    plain = Case("", (), "", "", {})
    lines = ["[[case]]"]
    for name in Case.__dataclass_fields__:
        value = getattr(case, name)
        if value != getattr(plain, name) and name != "kernels":
            lines.append(f"{name} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_toml(item)}" for name, item in value.items()) + " }"
    return repr(value)


def clock(seconds: float) -> Callable[[], bool]:
    """Whether so many seconds have passed since now."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() >= end
