"""Text as bytes, windows in a random order that resumes from one integer, packed documents, the course's task."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .checks.common import came, require_int, require_number
from .checks.random import check_seed
from .shuffle import permutation, places_of, random_words

Batch = dict[str, np.ndarray]
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".html", ".json", ".csv", ".tex")
IGNORED = -100  # the target that no loss counts
LARGEST_ID = 2**31 - 1  # batches are int32
# Up to so many windows their order is drawn at once, 8 MB; beyond it each place is computed when it is read.
ORDERED = 1 << 20


def default_text() -> str:
    """The English documentation topics inside every CPython, joined in the order of their names: no download.

    About 465,000 characters; they differ between Python versions.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ValueError("this Python ships without pydoc_data, the default text: give one with --text FILE") from error
    return "\n\n".join(topics[name].strip() for name in sorted(topics)) + "\n"


def read_text(path: str | os.PathLike[str]) -> bytes:
    """A file's bytes, in whatever encoding; of a directory, its text files' bytes in the order of their paths.

    What training runs have written below a directory is no text of it: a resumed run would find another text.
    Refused: nothing there, nothing in it, a directory without text files.
    """
    path = Path(path)
    if path.is_dir():
        found = [file for file in path.rglob("*") if file.suffix.lower() in TEXT_SUFFIXES and file.is_file()]
        written = {file.parent for file in found if _of_a_run(file)}
        files = sorted(file for file in found if written.isdisjoint(file.parents))
        if not files:
            raise ValueError(f"{path} holds no text files ({', '.join(TEXT_SUFFIXES)})")
        text = b"\n\n".join(file.read_bytes() for file in files)
    elif path.exists():
        text = path.read_bytes()
    else:
        raise FileNotFoundError(f"{path} does not exist: expected a text file or a directory of text files")
    if not text.strip():
        raise ValueError(f"{path} is empty: there is nothing to learn from")
    return text


def _of_a_run(file: Path) -> bool:
    """Whether a file marks its folder as a training run's, or as a checkpoint."""
    if file.name == "run.json":
        return (file.parent / "log.jsonl").is_file()
    return file.name == "checkpoint.json" and file.parent.name.startswith("step-")


def byte_tokens(text: str | bytes) -> np.ndarray:
    """One token per byte (UTF-8 of a str): uint8, the vocabulary is 256."""
    if not isinstance(text, str | bytes):
        raise TypeError(f"text must be str or bytes; got {type(text).__name__}")
    return np.frombuffer(text.encode() if isinstance(text, str) else text, dtype=np.uint8)


def read_tokens(path: str | os.PathLike[str], *, vocab: int) -> np.ndarray:
    """A file of token ids by memory map: .npy with one axis of integers, or .bin/.uint16 of raw little-endian uint16.

    Every id is checked to be from 0 to vocab - 1.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: expected a .npy, .bin or .uint16 file of token ids")
    if path.suffix == ".npy":
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        except Exception as error:  # the header is Python text: whatever its parser says of a damaged one
            raise ValueError(f"{path} is not a sound .npy file of numbers: {error}") from error
        if not isinstance(tokens, np.ndarray):
            tokens.close()
            raise ValueError(f"{path} is an archive of arrays (.npz) by its contents; expected one array")
    elif path.suffix in (".bin", ".uint16"):
        if path.stat().st_size % 2 or not path.stat().st_size:
            raise ValueError(f"{path} has {path.stat().st_size} bytes; uint16 tokens take two bytes each")
        tokens = np.memmap(path, dtype="<u2", mode="r")
    else:
        raise ValueError(f"{path} must end in .npy, .bin or .uint16 to be read as token ids")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not tokens.size:
        raise ValueError(f"{path} must hold one non-empty axis of integers; got {tokens.dtype} {tokens.shape}")
    for begin in range(0, tokens.size, 1 << 24):  # in pieces: the file may be larger than the memory
        piece = tokens[begin : begin + (1 << 24)]
        if piece.min() < 0 or piece.max() >= vocab:
            where = begin + int(np.argmax((piece < 0) | (piece >= vocab)))
            raise ValueError(f"{path} has token {tokens[where]} at {where}; the vocabulary is {vocab}")
    return tokens


def _check_tokens(tokens: Any) -> None:
    """A text's ids: one axis of integers, in either byte order."""
    if not isinstance(tokens, np.ndarray) or tokens.dtype.kind not in "iu":
        raise TypeError(f"tokens must be a NumPy array of integers; got {came(tokens)}")
    if tokens.ndim != 1:
        raise ValueError(f"tokens must have one axis, a text's ids in their order; got {came(tokens)}")


def _check_int32(name: str, ids: np.ndarray) -> None:
    if ids.size and not np.can_cast(ids.dtype, np.int32) and int(ids.max()) > LARGEST_ID:
        raise ValueError(f"{name} must be ids below 2**31, batches are int32; got {ids.max()}")


def split(tokens: np.ndarray, *, length: int, share: float = 0.9) -> tuple[np.ndarray, np.ndarray]:
    """Training and validation tokens: the first `share` and the rest, both long enough for one window."""
    _check_tokens(tokens)
    length = require_int("length", length, 1)
    if not 0.0 < require_number("share", share, "a number above 0 and below 1") < 1.0:
        raise ValueError(f"share must be a number above 0 and below 1; got {share!r}")
    cut = int(len(tokens) * share)
    for name, part in (("training", cut), ("validation", len(tokens) - cut)):
        if part < length + 1:
            raise ValueError(
                f"the text is too short: its {name} part has {part} of {len(tokens)} tokens and a window takes "
                f"{length + 1}; give a longer text or a shorter length"
            )
    return tokens[:cut], tokens[cut:]


def _window_count(tokens: np.ndarray, length: int) -> int:
    _check_tokens(tokens)
    length = require_int("length", length, 1)
    if len(tokens) < length + 1:
        raise ValueError(f"the text is shorter than one window: {len(tokens)} tokens, a window takes {length + 1}")
    return (len(tokens) - 1) // length


def _cut(tokens: np.ndarray, windows: np.ndarray, length: int) -> Batch:
    index = windows[:, None] * length + np.arange(length + 1)
    rows = tokens[index]
    _check_int32("tokens", rows)
    rows = rows.astype(np.int32)
    # Copies: who writes -100 into the targets must not write it into the tokens.
    return {"tokens": rows[:, :-1].copy(), "targets": rows[:, 1:].copy()}


class Batches:
    """Endless batches of windows; `position` counts those given and is all that a resumed run needs.

    Window i is tokens[i * length : (i + 1) * length], its targets one further on. Epoch e goes through all windows
    in the order `permutation(seed, e, windows)`, of more than `ORDERED` windows in that of `places_of`; a batch may
    reach over the end of an epoch, so none is smaller.
    """

    def __init__(self, tokens: np.ndarray, *, batch: int, length: int, seed: int, start: int = 0) -> None:
        self.windows = _window_count(tokens, length)
        self.tokens, self.length = tokens, length
        self.batch = require_int("batch", batch, 1)
        check_seed(seed)
        self.seed = int(seed)
        self.position = require_int("start", start, 0)
        self._epoch, self._order = -1, np.zeros(0, np.int64)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Batch:
        first = self.position * self.batch
        self.position += 1
        numbers = np.arange(first, first + self.batch)
        windows = np.empty(self.batch, np.int64)
        for epoch in np.unique(numbers // self.windows):
            here = numbers // self.windows == epoch
            windows[here] = self._places(int(epoch), numbers[here] % self.windows)
        return _cut(self.tokens, windows, self.length)

    def _places(self, epoch: int, numbers: np.ndarray) -> np.ndarray:
        if self.windows > ORDERED:
            return places_of(self.seed, epoch, self.windows, numbers)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, permutation(self.seed, epoch, self.windows)
        return self._order[numbers]


def batches(tokens: np.ndarray, *, batch: int, length: int, seed: int, start: int = 0) -> Batches:
    """Endless training batches {"tokens", "targets"} of int32 (batch, length), beginning with number `start`."""
    return Batches(tokens, batch=batch, length=length, seed=seed, start=start)


def evaluation_batches(tokens: np.ndarray, *, batch: int, length: int, limit: int | None = None) -> Iterator[Batch]:
    """Every window once, in order; the last batch may have fewer rows. `limit` bounds the number of batches."""
    windows, batch = _window_count(tokens, length), require_int("batch", batch, 1)
    limit = None if limit is None else require_int("limit", limit, 0)
    for number, first in enumerate(range(0, windows, batch)):
        if number == limit:
            return
        yield _cut(tokens, np.arange(first, min(first + batch, windows)), length)


def pack_documents(documents: Sequence[Any], length: int) -> Batch:
    """Several documents in each row: "tokens", "segments", "positions", "targets", each int32 (rows, length).

    A document longer than a row is cut into pieces of `length`. Pieces fill rows in order, each whole in one row; what
    is left of a row is padding (token 0, segment -1, position 0, target -100). Positions count from 0 in each piece,
    segments in each row. A target is the document's next token, also where a piece was cut; its last token has -100.
    """
    length = require_int("length", length, 1)
    rows: list[Batch] = []
    used = length
    for number, document in enumerate(documents):
        ids = np.asarray(document)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise TypeError(f"documents[{number}] must be one axis of integers; got {ids.dtype} {ids.shape}")
        if ids.size and ids.min() < 0:
            raise ValueError(f"documents[{number}] must be ids of at least 0; got {ids.min()}")
        _check_int32(f"documents[{number}]", ids)
        following = np.append(ids[1:], IGNORED) if ids.size else ids
        for begin in range(0, ids.size, length):
            size = min(length, ids.size - begin)
            if used + size > length:
                rows.append(_empty_row(length))
                used, segment = 0, 0
            place, piece = slice(used, used + size), slice(begin, begin + size)
            row = rows[-1]
            row["tokens"][place], row["targets"][place] = ids[piece], following[piece]
            row["segments"][place], row["positions"][place] = segment, np.arange(size)
            used, segment = used + size, segment + 1
    if not rows:
        raise ValueError("documents must hold at least one token")
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def _empty_row(length: int) -> Batch:
    fill = {"tokens": 0, "segments": -1, "positions": 0, "targets": IGNORED}
    return {name: np.full(length, value, np.int32) for name, value in fill.items()}


def repeat_task(n: int, *, seed: int) -> Batch:
    """The course's task: eight digits from 1 to 9; target 1 where the first digit comes again later, else 0.

    Balanced by construction: n // 2 rows get a repeat planted at a random place (chance may add more), the others
    draw their digits from the eight that are not the first. tokens int32 (n, 8), targets int32 (n,).
    """
    n = require_int("n", n, 1)
    words = random_words(seed, 0, n * 9).reshape(n, 9)
    first = (words[:, 0] % np.uint64(9)).astype(np.int32) + 1
    # A step of 1 to 8 around the circle of nine digits never comes back to the first.
    other = (words[:, 1:8] % np.uint64(8)).astype(np.int32) + 1
    any_digit = (words[:, 1:8] % np.uint64(9)).astype(np.int32) + 1
    place = (words[:, 8] % np.uint64(7)).astype(np.int64)
    targets = (permutation(seed, 1, n) < n // 2).astype(np.int32)
    rest = np.where(targets[:, None] == 1, any_digit, (first[:, None] - 1 + other) % 9 + 1)
    repeated = np.flatnonzero(targets)
    rest[repeated, place[repeated]] = first[repeated]
    return {"tokens": np.concatenate([first[:, None], rest], axis=1).astype(np.int32), "targets": targets}


class Prefetch:
    """Reads `size` items ahead in a background thread; gives the same items, and the source's error where it came.

    `close()`, or leaving a `with` block, ends the thread.
    """

    def __init__(self, source: Iterable[Any], size: int = 2) -> None:
        self._queue: queue.Queue[tuple[str, Any]] = queue.Queue(require_int("size", size, 1))
        self._stop = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._read, args=(iter(source),), daemon=True)
        self._thread.start()

    def _read(self, source: Iterator[Any]) -> None:
        try:
            for item in source:
                if not self._put(("item", item)):
                    return
        except BaseException as error:  # handed to the reader, whatever it is
            self._put(("error", error))
        else:
            self._put(("end", None))

    def _put(self, message: tuple[str, Any]) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(message, timeout=0.1)  # wakes up to see whether it was closed
            except queue.Full:
                continue
            return True
        return False

    def __iter__(self) -> Prefetch:
        return self

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        kind, item = self._queue.get()
        if kind == "item":
            return item
        self.close()
        if kind == "error":
            raise item
        raise StopIteration

    def close(self) -> None:
        self._ended = True
        self._stop.set()
        self._thread.join(timeout=1.0)  # a source that hangs must not hang its reader's end; the thread is a daemon

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()


def prefetch(iterator: Iterable[Any], size: int = 2) -> Prefetch:
    """The same items, read ahead in a background thread."""
    return Prefetch(iterator, size)
