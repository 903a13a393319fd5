"""Targets: what the suite is pointed at. `load` makes one from a name; `protocol.Target` says what one can do."""

from .loading import load, wrap
from .protocol import NotOffered, Target

__all__ = ["NotOffered", "Target", "load", "wrap"]
