"""One target in a process of its own, asked call by call: what the pytest plugin and `conformance diagnose` ask.

Where the target hangs or dies that call is lost, and the next one gets a new process.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .memory import remembering
from .runner import Result
from .workers import IMPORT_TIMEOUT, MOST_LOST, end_process, lost_call, set_apart, settings_of


@dataclass(frozen=True)
class Offer:
    """What `runner.calls` and `models.model_dtypes` want to know of a target that is elsewhere; notes: what its author
    should be told (spelling.py)."""

    name: str
    compiles: bool
    served: tuple[str, ...]
    listed: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def dtypes(self) -> tuple[str, ...]:
        return self.served

    def kernels(self) -> list[str]:
        return list(self.listed)


class LostError(Exception):
    """There is no answer; the message says why."""


def _serve(name: str, pipe: Any) -> None:
    """What the process does: ("ready", offer), then an answer for each question."""
    from .spelling import misspelt
    from .targets import load

    set_apart()
    try:
        target = load(name)
        said = tuple(misspelt(target.module))
        offer = Offer(target.name, target.compiles, tuple(target.dtypes()), tuple(target.kernels()), said)
    except Exception as error:
        pipe.send(("missing", _sentence(error)))
        return
    pipe.send(("ready", offer))
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:  # whoever asked is gone
            return
        try:
            with remembering():
                answer = "answer", function(target, *arguments)
        except KeyboardInterrupt:  # nobody's at the keyboard: that does not reach this process's group
            answer = "lost", "KeyboardInterrupt, raised by the target"
        except BaseException as error:
            answer = "broken", _sentence(error)
        pipe.send(answer)
        target.tidy()


def _sentence(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class Isolated:
    """The target of this name; ImportError, in one sentence, where it cannot be imported."""

    def __init__(self, name: str, level: str, timeout: float) -> None:
        self.name, self.level, self.timeout = name, level, timeout
        self.process: Any = None
        self.lost: dict[str, int] = {}
        self.offer = self._start()
        self.notes = self.offer.notes

    def ask(self, about: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """function(target, *arguments), there; LostError where there is no answer. A name that it is `about` is not
        asked any more when it was lost too often."""
        if self.lost.get(about, 0) >= MOST_LOST:
            raise LostError(f"was not asked: {MOST_LOST} calls of {about} were lost before")
        if self.process is None:
            self._start()
        answered = False
        try:
            kind, value = self._answer(self.timeout, (function, arguments))
            answered = kind != "gone"
        finally:  # a Ctrl-C or a time limit of pytest's too: a late answer must not be taken for the next one's
            if not answered:
                self.end()
        if kind == "answer":
            return value
        if kind == "broken":
            raise RuntimeError(value)
        self.lost[about] = self.lost.get(about, 0) + 1
        raise LostError(value)

    def end(self) -> None:
        if self.process is not None:
            end_process(self.process)
            self.pipe.close()
            self.process = None

    def _start(self) -> Offer:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(self.name, theirs), daemon=True)
        with settings_of(self.level):
            self.process.start()
        theirs.close()
        try:
            kind, value = self._answer(IMPORT_TIMEOUT)
        except BaseException:
            self.end()
            raise
        if kind != "ready":
            self.end()
            raise ImportError(value if kind == "missing" else f"target {self.name!r}: {value}")
        return value

    def _answer(self, timeout: float, asked: Any = None) -> tuple[str, Any]:
        """What the process sends, or ("gone", why)."""
        try:
            if asked is not None:
                self.pipe.send(asked)
            if self.pipe.poll(timeout):
                return self.pipe.recv()
            return "gone", f"its process gave no answer within {timeout:g} seconds and was ended"
        except (EOFError, ConnectionError):
            self.process.join()
            code = self.process.exitcode
            return "gone", f"its process died ({signal.Signals(-code).name if code < 0 else f'exit code {code}'})"


class InProcess:
    """The same in this process, for debuggers and coverage: what hangs here hangs pytest."""

    def __init__(self, name: str, level: str) -> None:
        from .spelling import misspelt
        from .targets import load

        self.offer, self.level = load(name), level
        self.notes = tuple(misspelt(self.offer.module))

    def ask(self, about: str, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(self.offer, *arguments)

    def end(self) -> None:
        """Nothing was started."""


def judge_any(target: Any, case: Any, dtype: str, kernel: str, level: str) -> Result:
    """One call of a case of either kind."""
    from .models import ModelCase, judge_model_case
    from .runner import judge_call

    if isinstance(case, ModelCase):
        return judge_model_case(case, target, dtype, level)
    return judge_call(case, target, dtype, kernel)


def judge_there(there: Isolated | InProcess, case: Any, dtype: str, kernel: str) -> Result:
    """One call, judged; one of which there is no answer fails."""
    try:
        return there.ask(case.function, judge_any, case, dtype, kernel, there.level)
    except LostError as lost:
        return lost_call(case, there.offer.name, str(lost), dtype, kernel)
