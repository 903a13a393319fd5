"""One process per target: frameworks do not share threads, and a target that dies takes no other with it."""

from __future__ import annotations

import multiprocessing
import os
import queue
from collections.abc import Callable, Sequence
from typing import Any

from .runner import Result

# The cases are tiny: one thread each is fastest, and sums keep one order from run to run.
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def judge_target(
    name: str, level: str, pattern: str | None, seen: Callable[[str], None] = lambda text: None
) -> tuple[list[Result], dict[str, Any]]:
    """Every selected case on the target of this name, in order, and what the target says of itself."""
    from . import models, rows
    from .surface import run_surface
    from .targets import load

    target = load(name)
    results: list[Result] = []
    for case in rows.select(rows.load_cases(), level, pattern):
        results += run_one(case, target, level)
        seen(f"{name} {case.id}")
    for model_case in models.select_models(level, pattern):
        results += models.run_model_case(model_case, target, level)
        seen(f"{name} {model_case.id}")
    if not pattern:
        results += run_surface(target)
    return results, target.describe()


def run_one(case: Any, target: Any, level: str) -> list[Result]:
    from .runner import run_case

    return list(run_case(case, target, level))


def _work(name: str, level: str, pattern: str | None, messages: Any) -> None:
    try:
        results, facts = judge_target(name, level, pattern, lambda text: messages.put(("seen", name, text)))
        messages.put(("done", name, (results, facts)))
    except BaseException as error:  # what the parent must say in one line
        kind = "missing" if isinstance(error, ImportError) else "broken"
        messages.put((kind, name, " ".join(str(error).split()) or type(error).__name__))


def judge_targets(
    names: Sequence[str], level: str, pattern: str | None, seen: Callable[[str], None], jobs: int
) -> dict[str, tuple[list[Result], dict[str, Any]]]:
    """`judge_target` for each name, `jobs` processes at a time.

    Raises ImportError where a target cannot be imported, RuntimeError where its process dies.
    """
    context = multiprocessing.get_context("spawn")
    messages = context.Queue()
    kept = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(THREADS)
    waiting = list(names)
    running: dict[str, Any] = {}
    done: dict[str, tuple[list[Result], dict[str, Any]]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                name = waiting.pop(0)
                running[name] = context.Process(target=_work, args=(name, level, pattern, messages), daemon=True)
                running[name].start()
            try:
                kind, name, value = messages.get(timeout=1.0)
            except queue.Empty:
                _raise_if_died(running, messages)
                continue
            if kind == "seen":
                seen(value)
                continue
            running.pop(name).join()
            if kind == "done":
                done[name] = value
            else:
                raise (ImportError if kind == "missing" else RuntimeError)(value)
    finally:
        for process in running.values():
            process.terminate()
        for key, old in kept.items():
            os.environ.pop(key) if old is None else os.environ.__setitem__(key, old)
    return {name: done[name] for name in names}


def _raise_if_died(running: dict[str, Any], messages: Any) -> None:
    for name, process in running.items():
        if process.exitcode not in (None, 0) and messages.empty():
            raise RuntimeError(f"the process that judged {name} died (exit code {process.exitcode})")
