"""What was tried for a device, one line each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    """One thing that was tried. status: "ok", "failed", or "absent" where something that it needs is not here."""

    program: str
    target: str
    check: str
    status: str
    detail: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
