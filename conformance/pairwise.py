"""Rows that let any two values of any two factors meet, few of them, always the same ones.

Cohen et al., "The AETG system: an approach to testing based on combinatorial design", 1997: a greedy row starts from a
pair that has not met yet and takes, factor by factor, the value that brings the most new pairs; the best of a few such
rows is kept. For factors of 10 and 9 values there must be 90 rows; the greedy ones are few more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

Choice = dict[str, Any]
Factors = Mapping[str, Sequence[Any]]
Excluded = Sequence[Mapping[str, Sequence[Any]]]
# Rows tried for each one kept. More than this shortens the list by a row or two.
TRIES = 6


def allowed(choice: Mapping[str, Any], excluded: Excluded) -> bool:
    """Whether no exclusion has one of its values in every factor that it names; a partial choice may be asked too."""
    return not any(all(name in choice and choice[name] in values for name, values in rule.items()) for rule in excluded)


def pairs_of(choice: Choice) -> Iterator[tuple[tuple[str, Any], tuple[str, Any]]]:
    """The pairs that meet in a row, in the factors' order."""
    return combinations(choice.items(), 2)


def all_pairs(factors: Factors, excluded: Excluded) -> list[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Every pair of values of two factors that some allowed row has, in the factors' order."""
    found = []
    for (a, left), (b, right) in combinations(factors.items(), 2):
        for x in left:
            for y in right:
                if completed({a: x, b: y}, list(factors), factors, excluded, lambda name: factors[name]):
                    found.append(((a, x), (b, y)))
    return found


def completed(fixed: Choice, order: Sequence[str], factors: Factors, excluded: Excluded, ranked: Any) -> Choice | None:
    """`fixed` with a value for every factor of `order`, each the first of `ranked(name)` that can be had; None where
    there is no such row."""
    if not allowed(fixed, excluded):
        return None
    name = next((name for name in order if name not in fixed), None)
    if name is None:
        return {name: fixed[name] for name in factors}
    for value in ranked(name):
        row = completed({**fixed, name: value}, order, factors, excluded, ranked)
        if row is not None:
            return row
    return None


def covering(factors: Factors, excluded: Excluded = (), seed: int = 0) -> list[Choice]:
    """Rows in which every pair of `all_pairs` meets at least once. The same arguments give the same rows."""
    open_pairs = dict.fromkeys(all_pairs(factors, excluded))
    draw = np.random.Generator(np.random.Philox(seed))
    rows: list[Choice] = []
    while open_pairs:
        first = next(iter(open_pairs))
        tried = [_grown(dict(first), factors, excluded, open_pairs, draw) for _ in range(TRIES)]
        best = max(tried, key=lambda row: sum(pair in open_pairs for pair in pairs_of(row)))
        for pair in pairs_of(best):
            open_pairs.pop(pair, None)
        rows.append(best)
    return rows


def _grown(
    fixed: Choice, factors: Factors, excluded: Excluded, open_pairs: Mapping[Any, Any], draw: np.random.Generator
) -> Choice:
    """A row from the values in `fixed`, the other factors in random order, each with the value that is worth most."""
    order = [name for name in (list(factors)[i] for i in draw.permutation(len(factors))) if name not in fixed]
    place = {name: i for i, name in enumerate(factors)}
    known = dict(fixed)

    def worth(name: str, value: Any) -> int:
        new = (name, value)
        return sum(
            ((other, new) if place[other[0]] < place[name] else (new, other)) in open_pairs for other in known.items()
        )

    for name in order:
        values = list(factors[name])
        values = [values[i] for i in draw.permutation(len(values))]
        for value in sorted(values, key=lambda value: -worth(name, value)):
            if completed({**known, name: value}, list(factors), factors, excluded, lambda other: factors[other]):
                known[name] = value
                break
    return {name: known[name] for name in factors}
