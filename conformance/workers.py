"""One process per target: frameworks do not share threads, and a target that dies or hangs takes no other with it.

Each target's cases are dealt out to as many processes as run at a time. A process sends each result as it has it.
One that is silent for longer than the time-out, or that dies, is ended; the case it was at fails, and a new process
goes on with the next.
"""

from __future__ import annotations

import difflib
import importlib.util
import mmap
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .rows import Pattern, matches
from .runner import FAILED, Result

# The cases are tiny: one thread each is fastest, and sums keep one order from run to run.
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
# Compiling is most of JAX's time here: at the quick level XLA skips its expensive passes. `full` compiles as users do.
QUICK = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
# Without it XLA writes code for a CPU the older way, in 0.6 of the time for a model's gradients.
EMITTERS = "xla_cpu_use_fusion_emitters"
# Seconds for one call. The slowest honest one, a compiled training step on a busy machine, takes a few.
TIMEOUT = 120.0
# Importing JAX or torch takes seconds; ten times that is a hang.
IMPORT_TIMEOUT = 180.0
# A function that hung or died this often is not asked again: three hundred time-outs would last a night.
MOST_LOST = 3
# Where the signatures stand in the order of a run: behind all cases.
SURFACE = 10**9


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def quick_settings() -> dict[str, str]:
    """The environment in which JAX compiles at the quick level; what the caller has in XLA_FLAGS stays."""
    given = os.environ.get("XLA_FLAGS", "")
    if EMITTERS in given or not _known_to_xla(EMITTERS):
        return QUICK
    return QUICK | {"XLA_FLAGS": f"{given} --{EMITTERS}=false".strip()}


@contextmanager
def on_device(device: str | None) -> Iterator[None]:
    """Where targets of torch and JAX compute, in the processes that are started inside; None: as it is."""
    from .targets.loading import DEVICE

    kept = os.environ.get(DEVICE)
    if device is not None:
        os.environ[DEVICE] = device
    try:
        yield
    finally:
        if device is not None:
            os.environ.pop(DEVICE) if kept is None else os.environ.__setitem__(DEVICE, kept)


@contextmanager
def settings_of(level: str) -> Iterator[None]:
    """The environment in which the processes of a level are started; afterwards it is as it was."""
    settings = THREADS | (quick_settings() if level == "quick" else {})
    kept = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for key, old in kept.items():
            os.environ.pop(key) if old is None else os.environ.__setitem__(key, old)


def _known_to_xla(flag: str) -> bool:
    """Whether the installed XLA has the flag: it ends the process where it meets one that it does not know."""
    found = importlib.util.find_spec("jaxlib")
    for folder in (found.submodule_search_locations or []) if found else []:
        for library in Path(folder).glob("libjax_common*"):
            with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return content.find(flag.encode()) >= 0
    return False


def selected(level: str, pattern: Pattern, suite: str | None = None) -> list[Any]:
    """The cases of a run, in order: function rows, then models and training; or those of an outside suite."""
    from . import models, space, suites

    if suite is not None:
        return list(suites.load(suite).cases(level, pattern))
    return [*space.select(level, pattern), *models.select_models(level, pattern)]


def no_case(pattern: str, level: str, suite: str | None = None, what: str = "no case") -> ValueError:
    """The error for a text that selects nothing: with the level that has it, or with what it was meant to be."""
    deepest = selected("exhaustive", None, suite)
    deeper = [case.level for case in deepest if matches(pattern, case.id, case.function)
              and getattr(case, "level", level) != level]  # fmt: skip
    if deeper:
        return ValueError(
            f"{what} of level {level} has {pattern!r} in its id; level {deeper[0]} has: --level {deeper[0]}"
        )
    names = dict.fromkeys([*(case.id for case in deepest), *(case.function for case in deepest)])
    near = [name for name in difflib.get_close_matches(pattern, names, 3) if pattern not in name]
    meant = f"; did you mean {' or '.join(near)}?" if near else ""
    return ValueError(f"{what} has {pattern!r} in its id, and no function has that name{meant}")


def results_of(case: Any, target: Any, level: str) -> Iterator[Result]:
    """The results of one case of any kind."""
    from .memory import remembering
    from .models import ModelCase, run_model_case
    from .runner import run_case
    from .suites import OutsideCase

    with remembering():  # the reference's answer, for all kernels of a dtype
        if isinstance(case, OutsideCase):
            yield from case.judge(target, level)
        elif isinstance(case, ModelCase):
            yield from run_model_case(case, target, level)
        else:
            yield from run_case(case, target, level)
    target.tidy()


def judge_target(
    name: str,
    level: str,
    pattern: Pattern,
    seen: Callable[[str], None] = lambda text: None,
    suite: str | None = None,
) -> tuple[list[Result], dict[str, Any]]:
    """Every selected case on the target of this name, in this process, and what the target says of itself."""
    from .surface import run_surface
    from .targets import load

    target = load(name)
    results: list[Result] = []
    for case in selected(level, pattern, suite):
        results += results_of(case, target, level)
        seen(f"{name} {case.id}")
    if not pattern and suite is None:
        results += run_surface(target)
    return results, described(target)


def described(target: Any) -> dict[str, Any]:
    """What a target says of itself; under "notes" what it should be told (spelling.py)."""
    from .spelling import misspelt

    notes = misspelt(target.module)
    return target.describe() | ({"notes": notes} if notes else {})


def _work(name: str, level: str, pattern: Pattern, suite: str | None, skip: set[int], pipe: Any) -> None:
    """What a process does: ("ready", name of the target), then per case ("case", i), ("result", r)..., then "done"."""
    from .surface import run_surface
    from .targets import load

    set_apart()
    try:
        target = load(name)
        pipe.send(("ready", target.name))
        for index, case in enumerate(selected(level, pattern, suite)):
            if index in skip:
                continue
            pipe.send(("case", index))
            try:
                for result in results_of(case, target, level):
                    pipe.send(("result", result))
            except KeyboardInterrupt:  # nobody's at the keyboard: that does not reach this process's group
                pipe.send(("result", lost_call(case, target.name, "KeyboardInterrupt, raised by the target")))
        pipe.send(("case", SURFACE))
        if not pattern and suite is None and SURFACE not in skip:
            for result in run_surface(target):
                pipe.send(("result", result))
        pipe.send(("done", described(target)))
    except BaseException as error:  # what the parent must say in one line
        kind = "missing" if isinstance(error, ImportError) else "broken"
        pipe.send((kind, " ".join(str(error).split()) or type(error).__name__))


def set_apart() -> None:
    """What a target's process does first: it heads a group, so that a hanging target's own children end with it; what
    the target prints does not end up in a JSON document; and where whoever asked is killed, it ends too."""
    if hasattr(os, "setsid"):
        os.setsid()
    os.dup2(2, 1)
    parent = multiprocessing.parent_process()

    def watch() -> None:
        assert parent is not None
        parent.join()
        if hasattr(os, "killpg"):
            os.killpg(os.getpgrp(), signal.SIGKILL)
        os._exit(1)

    if parent is not None:
        threading.Thread(target=watch, daemon=True).start()


def end_process(process: Any) -> None:
    """Ends a process that made itself the head of its group, and whatever it started."""
    if process.is_alive():
        with suppress(ProcessLookupError, PermissionError, AttributeError):
            if os.getpgid(process.pid) == process.pid:
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    process.join()


@dataclass(eq=False)
class _Run:
    """A target on its way: what it has given so far, and the process that is at it now."""

    name: str
    cases: list[Any]
    others: frozenset[int] = frozenset()
    target: str = ""
    results: dict[int, list[Result]] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)
    at: int = SURFACE
    ready: bool = False
    facts: dict[str, Any] | None = None
    process: Any = None
    pipe: Any = None
    deadline: float = 0.0

    def start(self, context: Any, level: str, pattern: Pattern, suite: str | None) -> None:
        self.pipe, theirs = context.Pipe(duplex=False)
        arguments = (self.name, level, pattern, suite, self.others | set(self.results), theirs)
        self.process = context.Process(target=_work, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self.ready, self.at, self.deadline = False, SURFACE, time.monotonic() + IMPORT_TIMEOUT

    def end(self) -> None:
        end_process(self.process)
        self.pipe.close()

    def lose(self, why: str) -> None:
        """The case it was at fails, and those of a function that was lost too often."""
        if not self.ready or self.at == SURFACE:
            raise (RuntimeError if self.ready else ImportError)(f"target {self.name!r}: its process {why}")
        case = self.cases[self.at]
        self.results[self.at].append(lost_call(case, self.target, f"its process {why}"))
        self.lost[case.function] = self.lost.get(case.function, 0) + 1
        if self.lost[case.function] < MOST_LOST:
            return
        why = f"was not asked: {MOST_LOST} cases of {case.function} were lost before"
        for index, other in enumerate(self.cases):
            if other.function == case.function and index not in self.results and index not in self.others:
                self.results[index] = [lost_call(other, self.target, why)]


def _dealt(name: str, cases: list[Any], parts: int) -> list[_Run]:
    """One run per part, each with every `parts`-th case; the first has the signatures too."""
    runs = []
    for part in range(parts):
        others = {i for i in range(len(cases)) if i % parts != part} | ({SURFACE} if part else set())
        runs.append(_Run(name, cases, frozenset(others)))
    return runs


def _joined(runs: list[_Run]) -> tuple[list[Result], dict[str, Any]]:
    """The results of a target's parts in the order of its cases, and what it says of itself."""
    found = sorted((index, part) for part, run in enumerate(runs) for index in run.results)
    return [result for index, part in found for result in runs[part].results[index]], runs[0].facts or {}


def lost_call(case: Any, target: str, why: str, dtype: str = "any", kernel: str = "any") -> Result:
    """The failure of a call, or of all calls of a case, of which there is no answer."""
    return Result(
        case=case.id, rules=case.rules, function=case.function, target=target, dtype=dtype, kernel=kernel,
        status=FAILED, share=None, where="", comparisons=0, detail=why, seconds=0.0,
    )  # fmt: skip


def judge_targets(
    names: Sequence[str],
    level: str,
    pattern: Pattern,
    seen: Callable[[str], None],
    jobs: int,
    timeout: float = TIMEOUT,
    suite: str | None = None,
    unusable: Callable[[str, Exception], None] | None = None,
) -> dict[str, tuple[list[Result], dict[str, Any]]]:
    """`judge_target` for each name, `jobs` processes at a time.

    ImportError where a target cannot be imported, RuntimeError where it breaks the suite itself: raised, or given to
    `unusable` with the target's name; then the others go on, and the answer lacks this one.
    """
    context = multiprocessing.get_context("spawn")
    cases = selected(level, pattern, suite)
    # A target that few cases are asked of is not worth importing twice.
    parts = {name: _dealt(name, cases, max(1, min(jobs, len(cases) // 20))) for name in names}
    waiting = [run for name in names for run in parts[name]]
    running: list[_Run] = []
    try:
        with settings_of(level):
            while waiting or running:
                while waiting and len(running) < jobs:
                    running.append(waiting.pop(0))
                    running[-1].start(context, level, pattern, suite)
                multiprocessing.connection.wait([run.pipe for run in running], timeout=0.5)
                for run in [run for run in running if run.name in parts]:
                    try:
                        over = _listen(run, seen, timeout)
                    except (ImportError, RuntimeError) as error:
                        if unusable is None:
                            raise
                        unusable(run.name, error)
                        _leave(parts.pop(run.name), waiting, running)
                        break
                    if over:
                        run.end()
                        if run.facts is None:
                            run.start(context, level, pattern, suite)
                        else:
                            running.remove(run)
    finally:
        for run in running:
            run.end()
    return {name: _joined(runs) for name, runs in parts.items()}


def _leave(parts: list[_Run], waiting: list[_Run], running: list[_Run]) -> None:
    """End the parts of a target that cannot be used."""
    for run in parts:
        if run in running:
            run.end()
            running.remove(run)
        elif run in waiting:
            waiting.remove(run)


def _listen(run: _Run, seen: Callable[[str], None], timeout: float) -> bool:
    """Take what the process has sent; whether it is to be ended, because it is done or lost."""
    try:
        while run.pipe.poll():
            kind, value = run.pipe.recv()
            if _take(run, kind, value, seen):
                return True
            run.deadline = time.monotonic() + timeout
    except EOFError:
        run.process.join()
        code = run.process.exitcode
        run.lose(f"died ({signal.Signals(-code).name if code < 0 else f'exit code {code}'})")
        return True
    if time.monotonic() > run.deadline:
        run.lose(f"gave no answer within {timeout if run.ready else IMPORT_TIMEOUT:g} seconds and was ended")
        return True
    return False


def _take(run: _Run, kind: str, value: Any, seen: Callable[[str], None]) -> bool:
    if kind == "ready":
        run.ready, run.target = True, value
    elif kind == "case":
        if value != SURFACE:
            seen(f"{run.name} {run.cases[value].id}")
        run.at = value
        run.results[value] = []
    elif kind == "result":
        run.results[run.at].append(value)
    elif kind == "done":
        run.facts = value
        return True
    else:
        raise (ImportError if kind == "missing" else RuntimeError)(value)
    return False
