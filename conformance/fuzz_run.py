"""`conformance run --fuzz`: each target in a process of its own, which is ended where it hangs or dies."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .summary import of_itself
from .workers import IMPORT_TIMEOUT, MOST_LOST, THREADS, described, end_process

SCHEMA = 2


@dataclass
class Fuzzed:
    """What came of one target: how many draws were judged, how many of them failed, and the failures made small."""

    name: str
    target: str = ""
    draws: int = 0
    failed: int = 0
    absent: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


def _work(name: str, seed: int, start: int, seconds: float, pipe: Any) -> None:
    """What a process does: ("ready", name), then per judged case ("at", (number, row)), per draw ("draw", ...)."""
    from .fuzz import as_found, clock, fuzz, to_toml
    from .runner import ABSENT, FAILED
    from .targets import load

    if hasattr(os, "setsid"):
        os.setsid()
    os.dup2(2, 1)
    try:
        target = load(name)
        pipe.send(("ready", target.name))
        steps = fuzz(
            target,
            seed,
            until=clock(seconds),
            start=start,
            seen=lambda number, case: pipe.send(("at", (number, case.id, to_toml(as_found(case))))),
        )
        for number, result, failure in steps:
            found = failure.to_dict() if failure else None
            pipe.send(("draw", (number, result.status == FAILED, result.status == ABSENT, found)))
        pipe.send(("done", described(target)))
    except BaseException as error:
        kind = "missing" if isinstance(error, ImportError | LookupError) else "broken"
        pipe.send((kind, " ".join(str(error).split()) or type(error).__name__))


def fuzz_target(name: str, seed: int, seconds: float, timeout: float, seen: Callable[[], None]) -> Fuzzed:
    """Random cases on the target until the time is over; a case in which it hangs or dies is a failure.

    Raises ImportError where the target cannot be imported or has no attention.
    """
    found, start, lost = Fuzzed(name), 0, 0
    end = 0.0
    while lost < MOST_LOST:
        left = seconds if not end else end - time.monotonic()
        if left <= 0:
            break
        done, end, at, why = _listen(found, seed, start, left, timeout, end, seen)
        if done:
            break
        # The case it was at: as it was drawn, or as far as it was made small.
        number, case_id, row = at
        found.draws += 1
        found.failed += 1
        found.failures.append(
            {"id": case_id, "dtype": "any", "kernel": "any", "detail": f"its process {why}", "share": None,
             "shrunk": False, "row": row}
        )  # fmt: skip
        start, lost = number + 1, lost + 1
    return found


def _listen(
    found: Fuzzed, seed: int, start: int, seconds: float, timeout: float, end: float, seen: Callable[[], None]
) -> tuple[bool, float, Any, str]:
    """One process to its end: whether it came there by itself, when the time is over, the case it was at, and why."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe(duplex=False)
    process: Any = context.Process(target=_work, args=(found.name, seed, start, seconds, theirs), daemon=True)
    process.start()
    theirs.close()
    at: Any = None
    deadline = time.monotonic() + IMPORT_TIMEOUT
    try:
        while True:
            if not pipe.poll(0.2):
                if time.monotonic() > deadline:
                    why = "gave no answer within "
                    why += f"{timeout:g} seconds and was ended" if at else "the time for importing it and was ended"
                    break
                continue
            try:
                kind, value = pipe.recv()
            except EOFError:
                process.join()
                why = f"died (exit code {process.exitcode})"
                break
            deadline = time.monotonic() + timeout
            if kind == "ready":
                found.target, end = value, end or time.monotonic() + seconds
            elif kind == "at":
                at = value
            elif kind == "draw":
                _count(found, value)
                seen()
            elif kind == "done":
                found.facts = value
                return True, end, at, ""
            else:
                raise (ImportError if kind == "missing" else RuntimeError)(value)
    finally:
        end_process(process)
        pipe.close()
    if at is None:
        raise ImportError(f"target {found.name!r}: its process {why}")
    return False, end, at, why


def _count(found: Fuzzed, value: tuple[int, bool, bool, dict[str, Any] | None]) -> None:
    _, failed, absent, failure = value
    found.draws += 1
    found.failed += failed
    found.absent += absent
    if failure is not None:
        found.failures.append(failure)


def run_fuzz(names: Sequence[str], seed: int, seconds: float, timeout: float, json: str | None) -> int:
    """Fuzz each target in turn, print what was found and write the document; the exit status."""
    from . import summary

    kept = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(THREADS)
    found: list[Fuzzed] = []
    unusable: dict[str, ImportError] = {}
    try:
        for name in names:
            try:
                found.append(_with_bar(name, seed, seconds, timeout, json == "-"))
            except ImportError as error:
                unusable[name] = error
                if len(names) > 1:
                    print(f"conformance run: {error}; the other targets go on", file=sys.stderr)
    finally:
        for key, old in kept.items():
            os.environ.pop(key) if old is None else os.environ.__setitem__(key, old)
    if not found:
        raise next(iter(unusable.values()))
    if json:
        summary.write_json(json, document(found, seed, seconds))
    if json != "-":
        _print(found)
    if unusable:
        print(f"conformance run: {', '.join(unusable)}: not judged", file=sys.stderr)
        return 3
    return int(any(one.failed or not one.draws for one in found))


def _with_bar(name: str, seed: int, seconds: float, timeout: float, quiet: bool) -> Fuzzed:
    if quiet or not sys.stderr.isatty():
        return fuzz_target(name, seed, seconds, timeout, lambda: None)
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task, begun = bar.add_task(f"fuzzing {name}", total=seconds), time.monotonic()
        return fuzz_target(name, seed, seconds, timeout, lambda: bar.update(task, completed=time.monotonic() - begun))


def document(found: Sequence[Fuzzed], seed: int, seconds: float) -> dict[str, Any]:
    """The JSON document: per target the counts and every different failure with its row."""
    return {
        "schema": SCHEMA,
        "seed": seed,
        "seconds": seconds,
        "targets": {
            one.target or one.name: {
                "draws": one.draws,
                "failed": one.failed,
                "not offered": one.absent,
                "failures": one.failures,
                "about": of_itself(one.facts),
                **({"notes": one.facts["notes"]} if "notes" in one.facts else {}),
            }
            for one in found
        },
    }


def _print(found: Sequence[Fuzzed]) -> None:
    for one in found:
        for failure in one.failures:
            small = "" if failure["shrunk"] else " (not made as small as it can be)"
            print(f"# {one.target}, {failure['dtype']}, kernel {failure['kernel']}: {failure['detail']}{small}")
            print(failure["row"])
        if "notes" in one.facts:
            print(f"conformance run: {one.target}: {'; '.join(one.facts['notes'])}", file=sys.stderr)
        kinds = len(one.failures)
        ways = f" in {kinds} different way{'s' * (kinds > 1)}" if kinds else ""
        print(f"{one.target}: {one.draws} random cases, {one.failed} failed{ways}, {one.absent} not offered")
