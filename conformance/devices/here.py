"""What is on this machine, and the suite and the race run on a device of it."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Time for all of it on one GPU, seconds: each command gets what is left.
BUDGET = 480.0


def environment() -> dict[str, Any]:
    """Python, machine and the frameworks' versions and devices."""
    from ..race.machine import environment as machine

    return {**machine(), "devices": devices()}


def devices() -> list[str]:
    """Accelerators that a framework here sees, as "cuda" or "tpu"; each is asked in a process of its own."""
    probes = {
        "torch": "import torch; print('cuda' if torch.cuda.is_available() else '')",
        "jax": "import jax; print(*sorted({d.platform for d in jax.devices()} - {'cpu'}))",
    }
    found: list[str] = []
    for framework, code in probes.items():
        if importlib.util.find_spec(framework) is None:
            continue
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        found += [{"gpu": "cuda"}.get(name, name) for name in run.stdout.split()]
    return list(dict.fromkeys(found))


def found() -> str | None:
    """The first accelerator, or None."""
    return next(iter(devices()), None)


def commands(device: str, folder: Path) -> list[tuple[str, list[str]]]:
    """What is run on a device, in the order of what matters most."""
    python = [sys.executable, "-m", "conformance"]
    targets = {"cuda": ["torch", "jax"], "tpu": ["jax"], "cpu": ["torch", "jax"]}.get(device, ["torch"])
    targets = [name for name in targets if importlib.util.find_spec(name) is not None]
    size = "tiny" if device == "cpu" else "small"
    return [
        ("suite", [*python, "run", *targets, "--level", "quick", "--json", str(folder / "suite.json")]),
        ("race", [*python, "race", "--size", size, "--with", ",".join(targets), "--device", device, "--rounds", "5",
                  "--json", str(folder / "race.json")]),
    ]  # fmt: skip


def run(device: str, say: Callable[[str], None], *, quiet: bool = False) -> dict[str, Any]:
    """The suite and the race on a device, inside the budget; gives their documents and a line.

    quiet: what they print goes to standard error.
    """
    document: dict[str, Any] = {"device": device, "failed": False}
    started, words = time.monotonic(), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for what, command in commands(device, folder):
            left = BUDGET - (time.monotonic() - started)
            say(f"{what} on {device}, {left:.0f} s left")
            status = _timed(command, device, left, quiet)
            document["failed"] |= status != 0
            file = folder / f"{what}.json"
            document[what] = {"status": status, "seconds": round(time.monotonic() - started, 1)}
            if file.is_file():
                document[what]["document"] = json.loads(file.read_text(encoding="utf-8"))
            words.append(f"{what} {'passed' if status == 0 else 'ran out of time' if status is None else 'FAILED'}")
    document["machine"] = platform.node() and platform.machine()
    return document | {"summary": ", ".join(words), "seconds": round(time.monotonic() - started, 1)}


def _timed(command: list[str], device: str, left: float, quiet: bool) -> int | None:
    """The exit status; None where the time was up."""
    environment = {**os.environ, "CONFORMANCE_DEVICE": device}
    if device == "cpu":
        environment["JAX_PLATFORMS"] = "cpu"
    try:
        printed = sys.stderr.fileno() if quiet else None
        return subprocess.run(command, env=environment, timeout=max(left, 1.0), stdout=printed).returncode
    except subprocess.TimeoutExpired:
        return None
