"""Command lines whose wrong arguments, and every other error, are said in one line."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """argparse's parser, without the usage in front of an error: that is what --help is for.

    A mistyped choice or option is told the near one, and an option of another verb the help of this one.
    """

    def parse_known_args(  # type: ignore[override]  # argparse's is overloaded
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """argparse hands what a verb's parser does not know up to the first one, which knows the verb no more."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [name for name in self._option_string_actions if name.startswith("--") and name != "--help"]
            near = [name for x in unknown for name in difflib.get_close_matches(x.partition("=")[0], options, 1)]
            hint = f"; did you mean {near[0]}?" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if choice:
            near = difflib.get_close_matches(choice[1], re.findall(r"[^\s,']+", choice[2]), 1)
            message += f"; did you mean {near[0]}?" if near else ""
        self.exit(2, f"{self.prog}: {message}; {self.prog} --help says more\n")


def ended(
    work: Callable[[], int], name: str, *, debug: bool, hint: Callable[[Exception], str] = lambda error: ""
) -> int:
    """The exit status of a command's work; an error is a line on standard error behind `name`, with `debug` raised.

    2 for an error, 3 where a package is not installed, 130 where Ctrl-C ended it, 141 where the reader of a pipe went
    away. `hint` gives what an error's line has besides.
    """
    try:
        return work()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:  # the outermost frame: the user gets a sentence, --debug the rest
        if debug:
            raise
        text = " ".join(str(error).split()) or type(error).__name__
        print(f"{name}: {text}{hint(error)}", file=sys.stderr)
        return 3 if isinstance(error, ImportError) else 2
