"""The contestants: each module of this package lists some in CONTESTANTS, so that a new one is one small file.

What several share stands in modules whose names begin with an underscore.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil

from .base import Contestant, Running

__all__ = ["Contestant", "Running", "all_contestants", "chosen", "missing"]


def all_contestants() -> dict[str, Contestant]:
    """Name -> contestant, ours first. Importing them imports no framework."""
    found: dict[str, Contestant] = {}
    names = (module.name for module in pkgutil.iter_modules(__path__))
    modules = sorted(name for name in names if name != "base" and not name.startswith("_"))
    for name in sorted(modules, key=lambda name: name != "ours"):
        for contestant in importlib.import_module(f"{__name__}.{name}").CONTESTANTS:
            if contestant.name in found:
                raise ValueError(f"two contestants have the name {contestant.name!r}")
            found[contestant.name] = contestant
    return found


# Words that stand for several; ours alone is the default.
WORDS = {
    "ours": lambda c: c.ours,
    "peers": lambda c: not c.ours and c.architectures[0] not in ("lstm", "gru"),
    "recurrent": lambda c: c.architectures[0] in ("lstm", "gru"),
    "torch-class": lambda c: c.framework == "torch" and c.architectures[0] not in ("lstm", "gru"),
    "jax-class": lambda c: c.framework == "jax" and c.architectures[0] not in ("lstm", "gru"),
    "all": lambda c: True,
}


def chosen(text: str) -> list[str]:
    """The names that a comma-separated list of names and WORDS means, in the order of `all_contestants`.

    "peers" is ours too: a race without us would answer no question. ValueError for what is neither.
    """
    known, wanted = all_contestants(), [word.strip() for word in text.split(",") if word.strip()]
    unknown = [word for word in wanted if word not in known and word not in WORDS]
    if unknown or not wanted:
        came = ", ".join(map(repr, unknown)) or "nothing"
        raise ValueError(f"unknown contestant {came}; known are {', '.join(known)} and the words {', '.join(WORDS)}")
    tests = [WORDS[word] for word in wanted if word in WORDS] + ([WORDS["ours"]] if "peers" in wanted else [])
    return [name for name, c in known.items() if name in wanted or any(test(c) for test in tests)]


def missing(contestant: Contestant) -> list[str]:
    """The modules that a contestant needs and this Python lacks."""
    return [name for name in contestant.requires if importlib.util.find_spec(name) is None]
