"""Full compiles for devices that are not here: XLA:TPU through libtpu, XLA:GPU through the CUDA plugin.

Each target is compiled in a process of its own, because plug-ins are chosen before JAX starts; it sends one JSON line
for each program. Needs the extra [aot]. What is compiled is what a device would be given; nothing is run.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from ..race.process import package_environment
from . import Row

# A compile takes a minute of one core at most; on a machine that many share, as long as it takes to get that.
TIMEOUT = 1800.0


@dataclass(frozen=True)
class Place:
    """A target: the packages that compile for it, and how many devices the step is laid out over."""

    name: str
    platform: str
    packages: tuple[str, ...]
    devices: int


PLACES = (
    Place("TPU v5e, 1 chip", "tpu", ("libtpu",), 1),
    Place("TPU v5e, 4 chips", "tpu", ("libtpu",), 4),
    Place("H200, 1 device", "cuda", ("jax-cuda12-plugin", "jax-cuda12-pjrt"), 1),
    Place("H200, 8 devices", "cuda", ("jax-cuda12-plugin", "jax-cuda12-pjrt"), 8),
)


def rows() -> Iterator[Row]:
    """Every program for every place whose packages are installed."""
    for place in PLACES:
        lacking = [name for name in place.packages if not _installed(name)]
        if lacking:
            text = f"{', '.join(lacking)} not installed (pip install 'attention-conformance[aot]')"
            yield Row("train step and kernels", place.name, "compiled for", "absent", text)
        else:
            yield from _compiled(place)


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _compiled(place: Place) -> Iterator[Row]:
    # The metadata server of a cloud is asked otherwise, for minutes; with another platform first there is no topology;
    # and libtpu takes a lock on a chip that nothing here uses.
    more = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    environment = package_environment() | more
    command = [sys.executable, "-m", "conformance.devices.aot_worker", place.platform, str(place.devices)]
    try:
        run = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired as late:
        said = late.stdout or ""
        yield from _answers(said if isinstance(said, str) else said.decode(), place)
        yield Row("the next program", place.name, "compiled for", "failed", f"no end within {TIMEOUT:g} s")
        return
    rows = list(_answers(run.stdout, place))
    yield from rows
    if run.returncode != 0 or not rows:
        lines = run.stderr.strip().splitlines()
        yield Row(
            "the compiling process", place.name, "compiled for", "failed",
            f"it ended with {run.returncode}: {lines[-1][:200] if lines else 'it said nothing'}",
        )  # fmt: skip


def _answers(said: str, place: Place) -> Iterator[Row]:
    """A row for each line of JSON; one that a time-out cut in half is none."""
    for line in said.splitlines(keepends=True):
        if line.startswith("{") and line.endswith("\n"):
            found = json.loads(line)
            detail = found.pop("error", "")
            yield Row(found.pop("program"), place.name, "compiled for", "failed" if detail else "ok", detail, found)
