"""`conformance completion SHELL`: a script that completes verbs, options, choices and files in bash, zsh or tcsh."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from core_numpy.contract.arguments import Parser
from core_numpy.contract.missing import missing

SHELLS = ("bash", "zsh", "tcsh")
PATHS = {"FILE", "DIR", "FOLDER", "PATH"}


class _Found(Exception):
    """Carries a verb's parser out of the verb."""


def main(argv: Sequence[str]) -> int:
    """`python -m conformance completion`: 0 done, 2 a wrong argument."""
    options = _parser().parse_args(argv)
    print(script(options.shell))
    return 0


def _parser() -> argparse.ArgumentParser:
    # No --json: what is printed is for a program already, the shell.
    parser = Parser(
        prog="conformance completion",
        description="A script for your shell that completes verbs, options, choices and files.",
        epilog='example: eval "$(conformance completion bash)"',
    )
    parser.add_argument("shell", choices=SHELLS)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def script(shell: str) -> str:
    """The completion script of the whole command for one of `SHELLS`."""
    try:
        import shtab
    except ImportError:
        raise missing("completion needs shtab", "tools") from None
    return shtab.complete(whole(shtab.FILE), shell)


def whole(files: Any) -> argparse.ArgumentParser:
    """One parser of all verbs; `files` marks the arguments that are paths."""
    from .__main__ import VERBS

    parser = Parser(prog="conformance", description="One meaning of attention, proven.")
    parser.add_argument("--version", action="store_true")
    verbs = parser.add_subparsers()
    for name, text in VERBS.items():
        found = parser_of(name)
        verb = verbs.add_parser(name, help=text, parents=[found], add_help=False, conflict_handler="resolve")
        for action in verb._actions:
            if action.metavar in PATHS:
                action.complete = files  # type: ignore[attr-defined]
    return parser


def parser_of(verb: str) -> Parser:
    """The parser of a verb."""
    from . import __main__ as command

    return caught(command.run if verb == "run" else importlib.import_module(f".{verb}", __package__).main)


def caught(main: Callable[[list[str]], Any]) -> Parser:
    """The parser of a command: what its `main` calls first."""

    def catch(self: argparse.ArgumentParser, *_: Any, **__: Any) -> Any:
        raise _Found(self)

    kept = argparse.ArgumentParser.parse_args
    argparse.ArgumentParser.parse_args = catch  # type: ignore[method-assign]
    try:
        main([])
    except _Found as found:
        return found.args[0]
    finally:
        argparse.ArgumentParser.parse_args = kept  # type: ignore[method-assign]
    raise RuntimeError(f"{main} has no parser")
