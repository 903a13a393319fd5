"""The suite as a pytest plugin: `pytest --pyargs conformance --target my_package.my_attention`, one test per call.

Without `--target` it does nothing. It is loaded in every pytest of an environment where the suite is installed, so it
imports nothing at the top but pytest, and takes the short options `--target` and `--level` only where `conformance` is
among the arguments: elsewhere they may belong to somebody's conftest.

A test's id is `conformance.plugin::my_package.my_attention::attention-causal[float32-auto]`: with `--pyargs` in front
it selects that test, without its last part all of a target. `-k` selects by case, function, dtype and kernel.

Each target has a process of its own (isolated.py), so that one that hangs or dies loses a test and no other.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PACKAGE = Path(__file__).resolve().parent
LEVELS = ("quick", "full", "exhaustive")
_loaded = pytest.StashKey[dict[str, Any]]()


def _add_options(group: Any, target: str, level: str) -> None:
    group.addoption(
        target, action="append", dest="conformance_targets", metavar="TARGET",
        help="judge this target by the conformance suite: a module, an entry point, 'command:...'; may be repeated",
    )  # fmt: skip
    group.addoption(
        level, dest="conformance_level", choices=LEVELS, default="quick", help="how many of the cases; default: quick"
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance")
    _add_options(group, "--conformance-target", "--conformance-level")
    group.addoption(
        "--conformance-timeout", type=float, metavar="SECONDS", default=120.0,
        help="end a target that is silent for longer in one call; default: 120; 0, or with --pdb: judge it in the "
        "process of pytest, without a limit",
    )  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(parser: pytest.Parser, args: list[str]) -> None:
    """The short names, where the suite itself is asked for."""
    asked = any(arg == "conformance" or arg.startswith("conformance.plugin") for arg in args)
    if asked and "--pyargs" in args:
        _add_options(parser.getgroup("conformance"), "--target", "--level")


def targets_of(config: pytest.Config) -> list[str]:
    return list(dict.fromkeys(getattr(config.option, "conformance_targets", None) or []))


def pytest_sessionstart(session: pytest.Session) -> None:
    """A target that cannot be loaded ends the session with its one sentence."""
    names = targets_of(session.config)
    if not names:
        return
    from .isolated import InProcess, Isolated

    level, timeout = session.config.option.conformance_level, session.config.option.conformance_timeout
    if not timeout >= 0:
        raise pytest.UsageError(f"--conformance-timeout must be 0 or a number of seconds; got {timeout:g}")
    inside = timeout == 0 or session.config.option.usepdb
    loaded = session.config.stash.setdefault(_loaded, {})
    try:
        for name in names:
            loaded[name] = InProcess(name, level) if inside else Isolated(name, level, timeout)
    except ImportError as error:
        raise pytest.UsageError(str(error)) from error


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for name, target in config.stash.get(_loaded, {}).items():
        if target.notes:
            terminalreporter.write_line(f"{name}: {'; '.join(target.notes)}")


def pytest_unconfigure(config: pytest.Config) -> None:
    for target in config.stash.get(_loaded, {}).values():
        target.end()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With a target, the suite's own tests are not what was asked for."""
    if not targets_of(config):
        return None
    path = collection_path.resolve()
    return True if PACKAGE in path.parents and path != PACKAGE / "plugin.py" else None


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if targets_of(parent.config) and file_path.resolve() == PACKAGE / "plugin.py":
        return Suite.from_parent(parent, path=file_path, nodeid="conformance.plugin")
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    names = targets_of(config)
    if names and not any(isinstance(item, Call) for item in items):
        raise pytest.UsageError(f"no case was collected for {', '.join(names)}: add `--pyargs conformance`")


class Suite(pytest.File):
    """All targets of the session."""

    def collect(self) -> Iterator[pytest.Collector]:
        for name, there in self.config.stash[_loaded].items():
            yield Judged.from_parent(self, name=name, there=there)


class Judged(pytest.Collector):
    """One target: a test per case, dtype and kernel."""

    def __init__(self, *, there: Any, **more: Any) -> None:
        super().__init__(**more)
        self.there = there

    def collect(self) -> Iterator[pytest.Item]:
        from .models import ModelCase, model_dtypes
        from .runner import calls
        from .workers import selected

        level, offer = self.config.option.conformance_level, self.there.offer
        for case in selected(level, None):
            if isinstance(case, ModelCase):
                pairs = [(dtype, "auto") for dtype in model_dtypes(case, offer, level)]
            else:
                pairs = calls(case, offer, level)
            for dtype, kernel in pairs:
                name = f"{case.id}[{dtype}-{kernel}]"
                yield Call.from_parent(self, name=name, case=case, dtype=dtype, kernel=kernel)


class WrongError(Exception):
    """What the target got wrong, in the runner's sentence."""


class Call(pytest.Item):
    """One judged call. Its share of the error budget is in the report's properties."""

    def __init__(self, *, case: Any, dtype: str, kernel: str, **more: Any) -> None:
        super().__init__(**more)
        self.case, self.dtype, self.kernel = case, dtype, kernel
        self.extra_keyword_matches.add(case.function)

    def runtest(self) -> None:
        from .isolated import judge_there
        from .runner import ABSENT, FAILED

        assert isinstance(self.parent, Judged)
        result = judge_there(self.parent.there, self.case, self.dtype, self.kernel)
        self.user_properties += [("share", result.share)] if result.share is not None else []
        self.user_properties.append(("comparisons", result.comparisons))
        if result.status == ABSENT:
            pytest.skip(f"not offered: {result.detail}")
        if result.status == FAILED:
            raise WrongError(result.detail)

    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        if not isinstance(excinfo.value, WrongError):
            return super().repr_failure(excinfo, style)
        proves = f"{', '.join(self.case.rules)}: {self.case.why}"
        return f"{self.case.function}, {self.dtype}, kernel {self.kernel}: {excinfo.value}\n{proves}"

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, f"{self.parent.name if self.parent else ''} {self.name}"
