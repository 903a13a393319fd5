"""Cases as data: read from cases/*.toml and checked, so that a misspelt field cannot switch a check off."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from .functions import ATTENTION, FUNCTIONS

LEVELS = ("quick", "full", "exhaustive")
# What selects cases, as --case gives it: one text, several (any of them), or none, which is all.
Pattern = str | Sequence[str] | None
CASE_HELP = "only cases with TEXT in their id, or of function TEXT; may be repeated"
ALL = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Case:
    """One row. `rules`: what it proves, by the reference's numbered rules. `why`: the fault it is there for.

    Exactly one verb: `agrees` (with the float64 oracle; the default), `equals` (literal results by name), `refuses`
    ({type, phrase}), `unchanged` (name of an input: replacing its values by the row's `replaced` leaves
    every result and gradient bit for bit as it was). wide_weights: not for kernels that say of themselves that they
    store the weights of half types after dividing them by their sum.
    """

    id: str
    rules: tuple[str, ...]
    why: str
    function: str
    inputs: dict[str, Any]
    arguments: dict[str, Any] = field(default_factory=dict)
    equals: dict[str, Any] | None = None
    refuses: dict[str, str] | None = None
    unchanged: dict[str, Any] | None = None
    gradients: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ALL
    level: str = "quick"
    kernels: bool = False
    wide_weights: bool = False
    tolerance: float = 0.0

    @property
    def verb(self) -> str:
        return next((v for v in ("equals", "refuses", "unchanged") if getattr(self, v) is not None), "agrees")


def _case(source: str, table: dict[str, Any]) -> Case:
    known = set(Case.__dataclass_fields__)
    unknown = sorted(set(table) - known)
    missing = sorted({"id", "rules", "why", "function", "inputs"} - set(table))
    label = f"{source}: case {table.get('id', '?')!r}"
    if unknown or missing:
        raise ValueError(f"{label} has unknown fields {unknown} and lacks {missing}; fields are {sorted(known)}")
    if table["function"] not in FUNCTIONS:
        raise ValueError(f"{label} names function {table['function']!r}; known are {', '.join(FUNCTIONS)}")
    values: dict[str, Any] = {
        name: tuple(x) if name in ("rules", "gradients", "dtypes") else x for name, x in table.items()
    }
    values["arguments"] = {name: _argument(x) for name, x in table.get("arguments", {}).items()}
    if table["function"] in ATTENTION and "kernels" not in values:
        values["kernels"] = True
    case = Case(**values)
    if sum(verb is not None for verb in (case.equals, case.refuses, case.unchanged)) > 1:
        raise ValueError(f"{label} must have one verb of equals, refuses and unchanged")
    if case.refuses is not None and (not isinstance(case.refuses, dict) or set(case.refuses) != {"type", "phrase"}):
        wanted = '{ type = "ValueError", phrase = "words of the sentence" }'
        raise ValueError(f"{label} must have refuses = {wanted}; got {case.refuses!r}")
    if case.level not in LEVELS:
        raise ValueError(f"{label} has level {case.level!r}; levels are {', '.join(LEVELS)}")
    spec = FUNCTIONS[case.function]
    wrong = [name for name in case.gradients if name not in spec.differentiable]
    if wrong:
        raise ValueError(f"{label} differentiates by {wrong}; {case.function} has {spec.differentiable}")
    return case


def _argument(value: Any) -> Any:
    """TOML has no None: the string "none" stands for it, also inside a window."""
    if isinstance(value, list):
        return tuple(_argument(item) for item in value)
    return None if value == "none" else value


@cache
def load_cases() -> tuple[Case, ...]:
    """All rows of all files, in file and row order; ids are unique."""
    cases: list[Case] = []
    folder = resources.files(__package__) / "cases"
    for file in sorted(folder.iterdir(), key=lambda f: f.name):
        if file.name.endswith(".toml"):
            table = tomllib.loads(file.read_text(encoding="utf-8"))
            cases += [_case(file.name, row) for row in table.get("case", [])]
    seen: set[str] = set()
    for case in cases:
        if case.id in seen:
            raise ValueError(f"two cases have the id {case.id!r}")
        seen.add(case.id)
    return tuple(cases)


def texts_of(pattern: Pattern) -> tuple[str, ...]:
    return (pattern,) if isinstance(pattern, str) else tuple(pattern or ())


def matches(pattern: Pattern, name: str, function: str) -> bool:
    """Whether the id holds one of the texts, or the function has one as its name; without a text, every case."""
    texts = texts_of(pattern)
    return not texts or any(text in name or text == function for text in texts)


def select(cases: tuple[Case, ...], level: str, pattern: Pattern = None) -> list[Case]:
    """The cases of a level (a higher level includes the lower ones) that the pattern matches."""
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(LEVELS)}; got {level!r}")
    depth = LEVELS.index(level)
    chosen = [case for case in cases if LEVELS.index(case.level) <= depth]
    return [case for case in chosen if matches(pattern, case.id, case.function)]
