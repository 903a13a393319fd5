"""What a run writes down: one JSON line per update, and TensorBoard events where `tensorboard` is installed."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class RunLog:
    """`log.jsonl` in the run's folder, and beside it an events file; opened for more lines, closed by `with`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, path = name, folder / "log.jsonl"
        cut = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed in __exit__)
        if cut:  # by the death of an earlier process: what comes now has a line of its own
            self._file.write("\n")
        self._events = _event_writer(folder)

    def write(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps({**row, "backend": self.name}) + "\n")
        if self._events is not None:
            self._events(row)

    def flush(self) -> None:
        self._file.flush()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *details: object) -> None:
        self._file.close()
        if self._events is not None:
            self._events(None)


def read_curve(path: Path) -> list[tuple[int, float]]:
    """Step and loss of a log; of a step logged twice, by a run that was resumed earlier, the later line.

    A last line that is cut off, by the death of its process, does not count.
    """
    rows: dict[int, float] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        rows[row["step"]] = row["loss"]
    return sorted(rows.items())


def _event_writer(folder: Path) -> Any:
    """A function that writes a row's numbers as scalars, and closes at None; None without the package."""
    try:
        proto = importlib.import_module("tensorboard.compat.proto.event_pb2")
        summary = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        writer = importlib.import_module("tensorboard.summary.writer.event_file_writer").EventFileWriter(str(folder))
    except ImportError:
        return None

    def write(row: Mapping[str, Any] | None) -> None:
        if row is None:
            writer.close()
            return
        values = [
            summary.Summary.Value(tag=f"train/{name}", simple_value=value)
            for name, value in row.items()
            if name != "step" and isinstance(value, int | float)
        ]
        event = proto.Event(wall_time=time.time(), step=row["step"], summary=summary.Summary(value=values))
        writer.add_event(event)

    return write
