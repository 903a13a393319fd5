"""Where a race was run: what has to stand beside its figures."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

PACKAGES = ("numpy", "scipy", "torch", "jax", "jaxlib", "flax", "optax", "equinox", "keras", "transformers",
            "x-transformers", "onnxruntime")  # fmt: skip


def environment(threads: int | None = None) -> dict[str, Any]:
    """Machine, Python and versions of what is installed."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    allowed = cores()
    found: dict[str, Any] = {
        "platform": platform.platform(),
        "processor": processor(),
        "cores": allowed,
        "threads": threads or allowed,
        "python": platform.python_version(),
        "versions": versions,
    }
    if hasattr(os, "getloadavg"):
        found["load"] = round(os.getloadavg()[0], 2)  # above the contestants' own, somebody else was running
    return found


def cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """The processor's name, where the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
