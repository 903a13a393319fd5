"""Command lines whose wrong arguments are said in one line, as every other error is."""

from __future__ import annotations

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """argparse's parser, without the usage in front of an error: that is what --help is for."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; {self.prog} --help says more\n")
