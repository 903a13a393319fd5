"""The parent's end of a worker: start it, ask it, end it."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from typing import Any


class WorkerFailed(Exception):
    """The worker answered with an error, died or took too long; the text says which."""


def package_environment() -> dict[str, str]:
    """An environment in which a child imports this package, whether it is installed or merely lies in a folder."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


class Process:
    """One worker process, of a module that is a `worker.serve`. Commands are answered one by one; none is sent while
    another is out."""

    def __init__(
        self, *, threads: int | None, timeout: float, variables: Mapping[str, str] | None = None,
        module: str = "conformance.race.worker",
    ) -> None:  # fmt: skip
        self.timeout = timeout
        environment = {**package_environment(), **(variables or {})}
        if threads is not None:
            environment["RACE_THREADS"] = str(threads)
            for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
                environment[name] = str(threads)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - it lives until close()
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environment,
            start_new_session=True,  # Ctrl-C is the parent's; it ends its workers itself
        )  # fmt: skip
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None  # a pipe was asked for
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """Send a command and wait for its answer; WorkerFailed says why there is none."""
        self.send(command)
        return self.answer(command["do"])

    def send(self, command: dict[str, Any]) -> None:
        """Half of `ask`: where several processes work together, all are sent to before one is waited for."""
        assert self._process.stdin is not None  # a pipe was asked for
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it is gone: `answer` finds the end of its output

    def answer(self, what: str) -> dict[str, Any]:
        """The other half: what it answers to command `what`."""
        try:
            line = self._answers.get(timeout=self.timeout)
        except queue.Empty:
            self.close()
            raise WorkerFailed(f"no answer to {what!r} within {self.timeout:g} s") from None
        if not line:
            raise WorkerFailed(f"its process ended ({self._process.wait()}): {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerFailed(str(answer["error"]))
        return answer

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def close(self) -> None:
        """End the process; one that does not stop by itself is killed."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            try:
                self._process.stdin.write('{"do": "stop"}\n')
                self._process.stdin.close()
            except OSError:
                pass  # it is gone already
        try:
            self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()
