"""Checkpoints written by a thread while training goes on: what all three trainers save with; and whole updates.

The caller takes the snapshot, so what is written is the state at the moment of the call whatever the next steps do.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


@contextmanager
def whole() -> Iterator[None]:
    """Ctrl-C comes after the block: an update of which half is done is neither saved nor gone on from. Twice, at once.

    A program's own handler is left in place, as are signals in other threads, where Python lets nobody take them.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    pressed: list[int] = []

    def handle(number: int, frame: Any) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if pressed:
            raise KeyboardInterrupt


class Saver:
    """Writes one checkpoint at a time. `last` is the newest one that is whole on the disk, or None.

    An error of the thread is logged when it happens and raised once, by the next `check`, `wait` or `save`. The thread
    is no daemon: a program that ends waits for it.
    """

    def __init__(self, last: Path | None = None) -> None:
        self.last = last
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, folder: Any, *, background: bool, **snapshot: Any) -> Path:
        """Write the snapshot (`write_checkpoint`'s arguments); gives the path that it has, or in a while will have.

        A save that is still being written is waited for: two would take twice the memory and write in any order.
        """
        from .checkpoints import checkpoint_path, write_checkpoint  # what every trainer imports should be little

        self.wait()
        if not background:
            self.last = write_checkpoint(folder, **snapshot)
            return self.last
        self._thread = threading.Thread(target=self._run, args=(lambda: write_checkpoint(folder, **snapshot),))
        self._thread.start()
        return checkpoint_path(folder, snapshot["step"])

    def check(self) -> None:
        """Raise what a save in the background has failed with; never waits."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self) -> None:
        """Return once nothing is being written; raise what it has failed with."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def _run(self, write: Callable[[], Path]) -> None:
        try:
            self.last = write()
        except BaseException as error:  # handed to the trainer, whatever it is
            log.error("the save in the background failed: %s", error)
            self._error = error
