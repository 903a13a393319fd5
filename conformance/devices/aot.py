"""Full compiles for devices that are not here: XLA:TPU through libtpu, XLA:GPU through the CUDA plugin.

Each target is compiled in a process of its own, because plug-ins are chosen before JAX starts; it sends a JSON line
where a program begins and one where it ends. A program that takes too long, or that takes the process with it, is one
failed row: another process goes on behind it. Needs the extra [aot]. What is compiled is what a device would be given;
nothing is run.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

from ..race.process import package_environment
from .rows import Row

# Seconds for one program. The step takes 13 s of one core for a TPU chip, everything else less; on a machine that many
# share, as long as it takes to get that.
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
    """A row as soon as a program is compiled; behind one that never ended a new process goes on."""
    done: int | None = 0
    while done is not None:
        with tempfile.TemporaryFile() as errors:
            process = _start(place, done, errors)
            try:
                done = yield from _followed(process, place, done, errors)
            finally:
                process.kill()
                process.wait()


def _start(place: Place, skip: int, errors: Any) -> subprocess.Popen[str]:
    # The metadata server of a cloud is asked otherwise, for minutes; with another platform first there is no topology;
    # and libtpu takes a lock on a chip that nothing here uses.
    more = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    command = [sys.executable, "-m", "conformance.devices.aot_worker", place.platform, str(place.devices), str(skip)]
    environment = {**os.environ, **package_environment(), **more}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)


def _followed(process: subprocess.Popen[str], place: Place, done: int, errors: Any) -> Generator[Row, None, int | None]:
    """The rows of one process; returns how many programs are done where another one has to go on, else None."""
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_listen, args=(process.stdout, lines), daemon=True).start()
    program, first = "", done
    while True:
        try:
            line = lines.get(timeout=TIMEOUT)
        except queue.Empty:
            text = f"not compiled within {TIMEOUT:g} s; it was given up"
            yield Row(program or "the compiling process", place.name, "compiled for", "failed", text)
            return done + 1 if program else None
        if not line.endswith("\n"):  # the end, or a line that the end cut in half
            break
        if not line.startswith("{"):
            continue
        found = json.loads(line)
        if "begins" in found:
            program = found["begins"]
            continue
        detail, program = found.pop("error", ""), ""
        yield Row(found.pop("program"), place.name, "compiled for", "failed" if detail else "ok", detail, found)
        done += 1
    status = process.wait()
    if status == 0 and not program and done > first:
        return None
    errors.seek(0)
    words = errors.read().decode(errors="replace").strip().splitlines()
    text = f"its process ended with {status}: {words[-1][:200] if words else 'it said nothing'}"
    yield Row(program or "the compiling process", place.name, "compiled for", "failed", text)
    return done + 1 if program else None


def _listen(stream: Any, lines: queue.Queue[str]) -> None:
    with stream:
        for line in stream:
            lines.put(line)
    lines.put("")
