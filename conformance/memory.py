"""What the reference gave, kept while many targets are judged on the same cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_kept: dict[Any, Any] | None = None


@contextmanager
def remembering() -> Iterator[None]:
    """Inside, `remembered` computes each thing once; the cases' own ids tell them apart."""
    global _kept
    before, _kept = _kept, {} if _kept is None else _kept
    try:
        yield
    finally:
        _kept = before


def remembered(key: Any, make: Callable[[], Any]) -> Any:
    """make(), or inside `remembering` what it gave for the same key."""
    if _kept is None:
        return make()
    if key not in _kept:
        _kept[key] = make()
    return _kept[key]
