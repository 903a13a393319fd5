"""The argument space of attention (cases/space.toml): a choice of one value per factor, as a case.

`select` gives the cases of a level: the rows written by hand; from `full` on the covering rows of the space, and rows
of two arguments each; at `exhaustive` every combination of restrictions too.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from itertools import combinations, product
from typing import Any

from . import rows
from .budget import TINY
from .pairwise import Choice, allowed, completed, covering
from .rows import Case, Pattern

# The factors of which `exhaustive` has every combination of absent and present.
RESTRICTIONS = ("mask", "bias", "causal", "window", "kv_lengths", "segments", "sinks", "softcap", "dropout")
# Distributions of the values: of q, k and v each, as input descriptions without their shape (inputs.py).
DISTRIBUTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "ordinary": ({}, {}, {}),
    "hot": ({"scale": 60.0}, {"scale": 60.0}, {}),  # scores of +-1e4
    "negative": ({"distribution": "positive", "scale": 100.0}, {"distribution": "negative", "scale": 100.0}, {}),
    "dominating": ({"scale": 3.0}, {"distribution": "dominant"}, {"distribution": "wide"}),
    "ties": ({"distribution": "ties"}, {"distribution": "ties"}, {}),
    "denormal": ({}, {}, {}),  # scaled by the dtype's smallest normal number in `_values`
    "wide": ({"scale": 0.3}, {"distribution": "wide"}, {"distribution": "wide"}),
    "zero rows": ({"distribution": "zero_rows"}, {"distribution": "zero_rows"}, {"distribution": "zero_rows"}),
    "dead rows": ({}, {}, {}),  # every third query masked whole, in `_mask`
}


@dataclass(frozen=True)
class Space:
    """factors: name -> values, the plain one first. lean: the factors with fewer values where fast kernels serve.
    two: what rows of two arguments are made of. excluded: what cannot stand together."""

    factors: dict[str, tuple[Any, ...]]
    lean: dict[str, tuple[Any, ...]]
    two: dict[str, tuple[Any, ...]]
    excluded: tuple[dict[str, tuple[Any, ...]], ...]


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


@cache
def attention_space() -> Space:
    """As read from cases/space.toml; a name that is misspelt there is an error."""
    file = resources.files(__package__) / "cases" / "space.toml"
    table = tomllib.loads(file.read_text(encoding="utf-8"))
    factors = {name: _frozen(values) for name, values in table["attention"].items()}
    lean = factors | {name: _frozen(values) for name, values in table["lean"].items()}
    if wrong := [name for name in lean if set(lean[name]) - set(factors.get(name, ()))]:
        raise ValueError(f"space.toml: [lean] must name factors and values of [attention]; not so {wrong}")
    two = {name: _frozen(values) for name, values in table["two"].items()}
    if set(two) != {"arguments", "keys", "sizes"} or set(two["arguments"]) - set(factors):
        raise ValueError(f"space.toml: [two] must have arguments (factors of [attention]), keys and sizes; got {two}")
    excluded = []
    for rule in table["exclude"]["attention"]:
        named = {name: _frozen(values) for name, values in rule.items() if name != "why"}
        unknown = [n for n, values in named.items() if n not in factors or set(values) - set(factors[n])]
        if unknown or not rule.get("why"):
            raise ValueError(f"space.toml: the exclusion {rule} must say why, and name factors and values; {unknown}")
        excluded.append(named)
    return Space(factors, lean, two, tuple(excluded))


@cache
def pairwise_choices() -> tuple[Choice, ...]:
    """Rows for every two values of two factors, and for every two of the lean ones."""
    space = attention_space()
    return (*covering(space.factors, space.excluded), *covering(space.lean, space.excluded))


@cache
def restriction_choices() -> tuple[Choice, ...]:
    """Every combination of which restrictions are there; which of their values, and the other factors, take turns."""
    space = attention_space()
    found = []
    for number, present in enumerate(product((False, True), repeat=len(RESTRICTIONS))):
        fixed = {}
        for name, there in zip(RESTRICTIONS, present, strict=True):
            values = space.factors[name]
            fixed[name] = values[1 + number % (len(values) - 1)] if there else values[0]

        def turning(name: str, number: int = number) -> list[Any]:
            small = [v for v in space.factors[name] if name != "keys" or v < 1000]
            place = number % len(small)
            return small[place:] + small[:place]

        row = completed(fixed, list(space.factors), space.factors, space.excluded, turning)
        if row is not None:
            found.append(row)
    return tuple(found)


@cache
def two_choices() -> tuple[Choice, ...]:
    """One argument alone, and every two, all else plain but the lengths and head sizes, which take turns. Without
    `q_offset` the lengths are equal."""
    space = attention_space()
    plain = {name: values[0] for name, values in space.factors.items()}
    names = space.two["arguments"]
    found: list[Choice] = []
    for given in (*((name,) for name in names), *combinations(names, 2)):
        number = len(found)
        row = plain | {name: space.two[name][number % len(space.two[name])] for name in ("keys", "sizes")}
        row["function"] = ("attention", "attention_with_lse")[number % 2]
        row["dtype"] = space.factors["dtype"][number % len(space.factors["dtype"])]
        row["heads"] = space.factors["heads"][number % 3]
        for name in given:
            values = space.factors[name]
            row[name] = values[1 + number % (len(values) - 1)]
        if "q_offset" in given:
            row["queries"] = (5, 64, 129)[number % 3]
        found.append(row)
    return tuple(found)


def select(level: str, pattern: Pattern = None) -> list[Case]:
    """The function rows of a level, those of the space included, whose id or function contains the pattern."""
    cases = rows.load_cases()
    if level in ("full", "exhaustive"):
        cases += tuple(case_of(f"attention-pairs-{i:03}", c, "full") for i, c in enumerate(pairwise_choices()))
        # float32 in all of them: most kernels have it, and some nothing else.
        two = [(c, dict.fromkeys(("float32", c["dtype"]))) for c in two_choices()]
        cases += tuple(
            replace(case_of(f"attention-two-arguments-{i:03}", c, "full"), dtypes=tuple(both))
            for i, (c, both) in enumerate(two)
        )
    if level == "exhaustive":
        present = enumerate(restriction_choices())
        cases += tuple(case_of(f"attention-present-{i:03}", c, "exhaustive") for i, c in present)
    return rows.select(cases, level, pattern)


def possible(choice: Choice) -> bool:
    """Whether the choice's values can stand together; lengths that are not listed count as those that are."""
    queries = choice["queries"]
    listed = attention_space().factors["queries"]
    return allowed({**choice, "queries": queries if queries in listed else listed[-1]}, attention_space().excluded)


def case_of(name: str, choice: Choice, level: str = "full") -> Case:
    """The case in which the choice's values stand together."""
    if not possible(choice):
        raise ValueError(f"these values cannot stand together: {choice}")
    keys = choice["keys"]
    queries = keys if choice["queries"] == "same" else choice["queries"]
    heads, groups = choice["heads"]
    flat = choice["batch"] == "no heads"
    batch = () if flat else choice["batch"]
    lead = () if flat else (*batch, heads)
    size, value_size = choice["sizes"]
    q, k, v = _values(choice["distribution"], choice["dtype"])
    below = () if flat else (*batch, groups)
    inputs: dict[str, Any] = {
        "q": {"shape": [*lead, queries, size], **q},
        "k": {"shape": [*below, keys, size], **k},
        "v": {"shape": [*below, keys, value_size], **v},
    }
    if choice["function"] == "attention_weights":
        del inputs["v"]
    shape = (*batch, *(() if flat else (heads,)), queries, keys)
    inputs |= _mask(choice, shape) | _bias(choice["bias"], shape)
    inputs |= _per_batch(choice, batch, queries, keys)
    if choice["sinks"] != "none":
        inputs["sinks"] = {"shape": [] if flat else [heads]}
    arguments = _arguments(choice, queries, keys)
    if choice["dropout"] != "none":
        inputs["dropout_key"] = {"key": 11}
    return Case(
        id=name,
        rules=("attention-7", "attention-15"),
        why=f"two arguments that are right one by one and wrong together: {_said(choice)}",
        function=choice["function"],
        inputs=inputs,
        arguments=arguments,
        gradients=tuple(n for n in ("q", "k", "v", "bias", "sinks") if n in inputs),
        dtypes=(choice["dtype"],),
        level=level,
        kernels=True,
    )


def _said(choice: Choice) -> str:
    plain = {name: values[0] for name, values in attention_space().factors.items()}
    parts = [f"{name} {_short(x)}" for name, x in choice.items() if x != plain[name] and name != "function"]
    return ", ".join(parts) or "all plain"


def _short(value: Any) -> str:
    return "x".join(str(item) for item in value) or "none" if isinstance(value, tuple) else str(value)


def _values(distribution: str, dtype: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    if distribution == "denormal":
        return {"scale": TINY[dtype] / 4.0}, {}, {"scale": TINY[dtype] / 4.0}
    return DISTRIBUTIONS[distribution]


def _mask(choice: Choice, shape: tuple[int, ...]) -> dict[str, Any]:
    """A boolean array with the axes that the choice names; "dead rows" needs the queries' axis too."""
    queries, keys = shape[-2:]
    dead = choice["distribution"] == "dead rows"
    if choice["mask"] == "none" and not dead:
        return {}
    lead = [1] * (len(shape) - 2)
    if choice["mask"] == "per batch":
        lead[:-1] = shape[:-3]
    elif choice["mask"] == "per head":
        lead[-1] = shape[-3]
    elif choice["mask"] in ("none", "plain"):
        lead = []
    rest = {"of keys": [queries if dead else 1, keys], "of queries": [queries, 1]}.get(choice["mask"], [queries, keys])
    density = 1.0 if choice["mask"] == "none" else 0.7
    return {"mask": {"shape": [*lead, *rest], "density": density, **({"dead": 3} if dead else {})}}


def _bias(kind: str, shape: tuple[int, ...]) -> dict[str, Any]:
    queries, keys = shape[-2:]
    if kind == "none":
        return {}
    if kind == "per head":
        return {"bias": {"shape": [*[1] * (len(shape) - 3), *shape[-3:]]}}
    if kind == "of keys":
        return {"bias": {"shape": [*shape[:-3], *[1] * min(len(shape) - 2, 1), 1, keys]}}
    return {"bias": {"shape": [queries, keys], **({"holes": 0.3} if kind == "with holes" else {})}}


def _turns(batch: tuple[int, ...], values: list[int]) -> Any:
    """The values one after the other, in the shape of the batch axes."""
    number = 1
    for axis in batch:
        number *= axis
    flat = [values[i % len(values)] for i in range(number)]
    if not batch:
        return {"values": flat[0], "dtype": "int32"}
    return {"values": flat, "dtype": "int32", **({"reshape": list(batch)} if len(batch) > 1 else {})}


def _per_batch(choice: Choice, batch: tuple[int, ...], queries: int, keys: int) -> dict[str, Any]:
    """What has a number per batch element, or an id per position."""
    found: dict[str, Any] = {}
    if choice["q_offset"] == "per batch":
        found["q_offset"] = _turns(batch, [keys - queries, -1, 2])
    if choice["kv_lengths"] != "none":
        ragged = [keys // 2, 0, keys - 1]
        found["kv_lengths"] = _turns(batch, [keys] if choice["kv_lengths"] == "whole" else ragged)
    if choice["segments"] != "none":
        # Three documents; padding behind them on both sides, of different lengths.
        padding = (0, 0) if choice["segments"] == "packed" else (queries // 4, keys // 5)
        for name, length, tail in (("q_segments", queries, padding[0]), ("kv_segments", keys, padding[1])):
            found[name] = {"shape": [*batch, length], "segments": 3, **({"padding": tail} if tail else {})}
    return found


def _arguments(choice: Choice, queries: int, keys: int) -> dict[str, Any]:
    given: dict[str, Any] = {}
    if choice["causal"]:
        given["causal"] = True
    if choice["window"] != "none":
        given["window"] = tuple(None if side == "none" else side for side in choice["window"])
    if choice["q_offset"] not in ("none", "per batch"):
        given["q_offset"] = keys - queries if choice["q_offset"] == "end" else choice["q_offset"]
    for name in ("scale", "softcap"):
        if choice[name] != "none":
            given[name] = choice[name]
    if choice["dropout"] != "none":
        given["dropout_rate"] = choice["dropout"]
    return given
