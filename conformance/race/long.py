"""`conformance race --devices N --positions T`: attention over one long row, spread over processes of the host.

    held(n, T)    the most that any of n processes holds for q, k, v, out and the gradients beyond what it held before
    grows(n)      held(n, T) - held(n, T / 2): what twice the positions cost, without what is the same for any number

n = 1 is the whole, by `attention`. Ideally grows(n) = grows(1) / n. Every process makes the inputs of its own positions
alone, and holds what it computes against what the whole gave there.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .machine import cores, environment
from .process import WorkerFailed, package_environment
from .racing import SCHEMA, Say
from .scaling import MOST_ON_ONE, counts_of

FRAMEWORKS = ("torch", "jax")
# float32 over many keys, relative to the largest entry: measured 2e-6 at 65,536 positions.
TOLERANCE = 2e-5
MEMORY = Path("/proc/self/clear_refs")


def check_long(devices: int, positions: int, names: Sequence[str]) -> None:
    """Refuse what cannot be measured, before anybody starts."""
    limit = MOST_ON_ONE * cores()
    if not 2 <= devices <= limit or devices & (devices - 1):
        raise ValueError(
            f"with --positions devices must be a power of two from 2 to {limit}, {MOST_ON_ONE} for each of the "
            f"processors here ({cores()}); got {devices}"
        )
    # Two pieces for each process, also of half of the positions.
    if positions < 4 * devices or positions % (4 * devices):
        raise ValueError(
            f"positions must be a multiple of 4 x devices ({4 * devices}): each has two pieces, also of half of them; "
            f"got {positions}"
        )
    others = [name for name in names if name not in FRAMEWORKS]
    if others or not names:
        raise ValueError(f"--positions measures {' and '.join(FRAMEWORKS)}; got {', '.join(others) or 'nobody'}")
    if not MEMORY.exists():
        raise ValueError(f"--positions reads the peak of memory from {MEMORY.parent}, which this system does not have")


def long(devices: int, positions: int, names: Sequence[str], *, timeout: float, say: Say) -> dict[str, Any]:
    """A document as `racing.run` gives, without races: "long" is {"positions", "heads", "size", "rows"}.

    A row: {"contestant", "devices", "status", "held", "grows", "apart", "seconds"} or "reason" where it failed; bytes,
    the largest distance relative to the largest entry, seconds of the slowest for both passes.
    """
    check_long(devices, positions, names)
    rows: list[dict[str, Any]] = []
    document: dict[str, Any] = {
        "schema": SCHEMA, "environment": environment(1), "races": [], "interrupted": False,
        "long": {"positions": positions, "heads": 1, "size": 64, "rows": rows},
    }  # fmt: skip
    try:
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                for row in _rows(name, devices, positions, Path(folder), timeout):
                    rows.append(row)
                    say(f"{positions:,} positions, {row['devices']} of {devices} processes: {name} {row['status']}")
    except KeyboardInterrupt:
        say("interrupted; what was measured so far stays")
        document["interrupted"] = True
    return document


def _rows(name: str, devices: int, positions: int, folder: Path, timeout: float) -> Iterator[dict[str, Any]]:
    """One for each number of processes; without the whole there is nothing to hold the others against."""
    for count in counts_of(devices):
        row: dict[str, Any] = {"contestant": name, "devices": count, "status": "measured"}
        try:
            row |= measured(name, count, [positions // 2, positions], 2 * devices, folder, timeout)
            if row["apart"] > TOLERANCE:
                row |= {"status": "disqualified", "reason": f"apart from the whole by {row['apart']:.1e}"}
        except WorkerFailed as error:
            row |= {"status": "failed", "reason": str(error)}
        yield row
        if count == 1 and row["status"] != "measured":
            return


def measured(
    name: str, count: int, lengths: Sequence[int], pieces: int, folder: Path, timeout: float
) -> dict[str, Any]:
    """What `long_worker` says of two numbers of positions on `count` processes; the whole is kept in `folder`."""
    out = folder / f"{name}-{count}.json"
    words = ["-m", "conformance.race.long_worker", name, out, folder, pieces, *lengths]
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = str(s.getsockname()[1])
    shared = {
        **package_environment(), "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu", "WORLD_SIZE": str(count),
        "MASTER_PORT": port,
        # What is freed goes back at once, so that the peak is of what is held, and of two lengths neither finds more
        # room that is there already.
        "MALLOC_MMAP_THRESHOLD_": str(1 << 16), "MALLOC_TRIM_THRESHOLD_": str(1 << 16),
    }  # fmt: skip
    _finish([[*map(str, words)]] * count, shared, timeout)
    said = json.loads(out.read_text(encoding="utf-8"))
    half, whole = (max(row["held"][str(length)] for row in said) for length in lengths)
    return {
        "held": whole, "grows": whole - half, "apart": max(row["apart"] for row in said),
        "seconds": max(row["seconds"] for row in said),
    }  # fmt: skip


def _finish(commands: Sequence[Sequence[str]], shared: Mapping[str, str], timeout: float) -> None:
    """Run them side by side; WorkerFailed with the last words of one that failed. All have ended afterwards."""
    started: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder:
        errors = [Path(folder) / str(rank) for rank in range(len(commands))]
        try:
            for rank, words in enumerate(commands):
                with errors[rank].open("wb") as file:
                    started.append(
                        subprocess.Popen(
                            [sys.executable, *words], env={**os.environ, **shared, "RANK": str(rank)}, stderr=file,
                            stdout=subprocess.DEVNULL, start_new_session=True,
                        )
                    )  # fmt: skip
            until = time.monotonic() + timeout
            while any(process.poll() is None for process in started):
                failed = next((rank for rank, process in enumerate(started) if process.poll()), None)
                if failed is not None:
                    said = errors[failed].read_text(encoding="utf-8", errors="replace").splitlines()
                    # Not the addresses below it, where a library ends its process.
                    last = next(
                        (line for line in reversed(said) if line and not line.lstrip().startswith(("@", "***"))),
                        "no word",
                    )
                    raise WorkerFailed(f"process {failed} of {len(commands)}: {last[:300]}")
                if time.monotonic() > until:
                    raise WorkerFailed(f"no end within {timeout:g} s")
                time.sleep(0.05)
        finally:
            for process in started:
                process.kill()
                process.wait()


def long_cells(document: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The cells of the table of `LONG`; a row that failed has its reason."""
    found: list[tuple[str, ...]] = []
    rows = document["long"]["rows"]
    for row in rows:
        if row["status"] != "measured":
            found.append((row["contestant"], str(row["devices"]), f"{row['status']}: {row['reason']}"))
            continue
        whole = next(r for r in rows if r["contestant"] == row["contestant"] and r["devices"] == 1)
        found.append((
            row["contestant"], str(row["devices"]), f"{row['held'] / 1e6:.0f}", f"{row['held'] / whole['held']:.2f}",
            f"{row['grows'] / 1e6:.0f}", f"{row['grows'] / whole['grows']:.2f}", f"{1 / row['devices']:.2f}",
            f"{row['seconds']:.1f}", f"{row['apart']:.1e}" if row["devices"] > 1 else "",
        ))  # fmt: skip
    return found


LONG = ("contestant", "processes", "MB each", "of the whole's", "MB for twice the positions", "of the whole's", "ideal",
        "seconds", "apart")  # fmt: skip


def long_line(document: Mapping[str, Any]) -> str:
    """What was measured."""
    found = document["long"]
    return (
        f"causal attention over {found['positions']:,} positions, float32, {found['heads']} head of {found['size']}, "
        "forward and backward: the most memory that a process holds for it"
    )
