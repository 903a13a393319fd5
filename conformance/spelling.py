"""Arguments of a target that were meant to be ones of the contract: a misspelt name makes every case that asks for the
right one "not offered", which is no failure and easily overlooked."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Sequence
from typing import Any

from .functions import FUNCTIONS
from .reference import reference

# How alike two names must be; `is_casual` and `causal` are 0.67, `cu_seqlens` and `q_segments` 0.6.
ALIKE = 0.65
# What difflib would take for another name: torch's.
KNOWN = {"dropout_p": "dropout_rate"}


def misspelt(module: Any) -> list[str]:
    """One sentence for each function of a target that takes names that the contract has not, and lacks near ones."""
    said = []
    for function in FUNCTIONS:
        own = _parameters(getattr(module, function, None))
        contract = [*_parameters(getattr(reference(), function, None)), "kernel"]
        lacking = [name for name in contract if name not in own and name not in FUNCTIONS[function].positional]
        meant: dict[str, str] = {}
        for name in own:
            left = [one for one in lacking if one not in meant.values()]
            if name not in contract and (near := _near(name, left)):
                meant[name] = near
        if meant:
            said.append(_sentence(function, meant))
    return said


def _sentence(function: str, meant: dict[str, str]) -> str:
    what = "which is no argument" if len(meant) == 1 else "which are no arguments"
    right = _listed(list(meant.values()))
    return f"{function} takes {_listed(list(meant))}, {what} of the contract; did you mean {right}?"


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _parameters(function: Any) -> list[str]:
    """The names that can be given by name; none where a signature is hidden or takes any."""
    if not callable(function):
        return []
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a compiled callable may hide its signature
        return []
    if any(p.kind is p.VAR_KEYWORD for p in found):
        return []
    return [p.name for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def _near(name: str, lacking: Sequence[str]) -> str | None:
    """The name that was meant: the only one of which this is a longer form (`sm_scale`), or the most alike."""
    if KNOWN.get(name) in lacking:
        return KNOWN[name]
    longer = [one for one in lacking if one.replace("_", "") in name.replace("_", "")]
    if len(longer) == 1:
        return longer[0]
    found = difflib.get_close_matches(name, lacking, 1, cutoff=ALIKE)
    return found[0] if found else None
