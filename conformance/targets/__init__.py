"""Targets: what the suite is pointed at. `load` makes one from a name; `protocol.Target` says what one can do."""

from .protocol import NotOffered, Target, load

__all__ = ["NotOffered", "Target", "load"]
