"""Command lines whose wrong arguments are said in one line, as every other error is."""

from __future__ import annotations

import argparse
import difflib
import re
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """argparse's parser, without the usage in front of an error: that is what --help is for.

    A mistyped choice is told the near one.
    """

    def error(self, message: str) -> NoReturn:
        choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if choice:
            near = difflib.get_close_matches(choice[1], re.findall(r"[^\s,']+", choice[2]), 1)
            message += f"; did you mean {near[0]}?" if near else ""
        self.exit(2, f"{self.prog}: {message}; {self.prog} --help says more\n")
