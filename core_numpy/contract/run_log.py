"""What a run writes down: JSON lines of updates and of measurements, and TensorBoard events where it is installed."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

UPDATES, VALIDATION = "log.jsonl", "validation.jsonl"


class RunLog:
    """`log.jsonl` (updates) and `validation.jsonl` (measurements on the held-out part) in the run's folder, and beside
    them an events file; opened for more lines, closed by `with`.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self._updates, self._measured = _append(folder / UPDATES), _append(folder / VALIDATION)
        self._events = _event_writer(folder)

    def write(self, row: Mapping[str, Any]) -> None:
        self._add(self._updates, row, "train")

    def measured(self, row: Mapping[str, Any]) -> None:
        self._add(self._measured, row, "validation")
        with _named(self._measured):
            self._measured.flush()

    def _add(self, file: TextIO, row: Mapping[str, Any], tag: str) -> None:
        with _named(file):
            file.write(json.dumps({**row, "backend": self.name}) + "\n")
        if self._events is not None:
            self._events(row, tag)

    def flush(self) -> None:
        with _named(self._updates):
            self._updates.flush()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *details: object) -> None:
        with ExitStack() as all_of_them:  # whichever of them cannot be written to
            if self._events is not None:
                all_of_them.callback(self._events, None, "")
            for file in (self._measured, self._updates):
                all_of_them.enter_context(_named(file))
                all_of_them.callback(file.close)


def read_curve(path: Path) -> list[tuple[int, float]]:
    """Step and loss of either log; of a step logged twice, by a run that was resumed earlier, the later line.

    No file is no points. A line that is cut off, by the death of its process, does not count.
    """
    rows: dict[int, float] = {}
    if not path.exists():
        return []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        step, loss = (row.get("step"), row.get("loss")) if isinstance(row, dict) else (None, None)
        if type(step) is not int or not isinstance(loss, (int, float)):
            raise ValueError(f"{path} is damaged: line {number} has no whole number `step` and no number `loss`")
        rows[step] = float(loss)
    return sorted(rows.items())


@contextmanager
def _named(file: TextIO) -> Iterator[None]:
    """An error of the disk says which file it is about."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"cannot write {file.name}: {error.strerror}") from error


def _append(path: Path) -> TextIO:
    cut = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (RunLog closes it)
    if cut:  # by the death of an earlier process: what comes now has a line of its own
        file.write("\n")
    return file


def _event_writer(folder: Path) -> Any:
    """A function that writes a row's numbers as scalars, and closes at None; None without the package."""
    try:
        proto = importlib.import_module("tensorboard.compat.proto.event_pb2")
        summary = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        writer = importlib.import_module("tensorboard.summary.writer.event_file_writer").EventFileWriter(str(folder))
    except ImportError:
        return None

    def write(row: Mapping[str, Any] | None, tag: str) -> None:
        if row is None:
            writer.close()
            return
        values = [
            summary.Summary.Value(tag=f"{tag}/{name}", simple_value=value)
            for name, value in row.items()
            if name != "step" and isinstance(value, int | float)
        ]
        event = proto.Event(wall_time=time.time(), step=row["step"], summary=summary.Summary(value=values))
        writer.add_event(event)

    return write
