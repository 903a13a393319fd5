"""The contestants: each module of this package lists some in CONTESTANTS, so that a new one is one small file."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil

from .base import Contestant, Running

__all__ = ["Contestant", "Running", "all_contestants", "missing"]


def all_contestants() -> dict[str, Contestant]:
    """Name -> contestant, ours first. Importing them imports no framework."""
    found: dict[str, Contestant] = {}
    modules = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "base")
    for name in sorted(modules, key=lambda name: name != "ours"):
        for contestant in importlib.import_module(f"{__name__}.{name}").CONTESTANTS:
            if contestant.name in found:
                raise ValueError(f"two contestants have the name {contestant.name!r}")
            found[contestant.name] = contestant
    return found


def missing(contestant: Contestant) -> list[str]:
    """The modules that a contestant needs and this Python lacks."""
    return [name for name in contestant.requires if importlib.util.find_spec(name) is None]
