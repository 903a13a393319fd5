"""What a model's token ids mean to a reader: bytes for our own models, a folder's tokenizer, or bare numbers."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .data import byte_tokens
from .tensor_file import require_package

TOKENIZER = "tokenizer.json"
BYTES = 256  # the vocabulary of a model that reads bytes
# How tokenizers write a blank and a line's end inside a piece, and how a reader is shown them.
SHOWN = str.maketrans({"Ġ": "␣", "▁": "␣", " ": "␣", "Ċ": "↵", "\n": "↵", "\t": "⇥"})


class Words:
    """Text to ids and back. Without a folder an id is a byte, or with `numbers` itself; a folder's `tokenizer.json` is
    read by `tokenizers`.
    """

    def __init__(self, folder: Path | None = None, *, numbers: bool = False) -> None:
        self._folder, self._numbers = folder, numbers
        path = None if folder is None else folder / TOKENIZER
        self._tokenizer: Any = None
        if path is not None and path.exists():
            tokenizer = require_package("tokenizers").Tokenizer
            self._tokenizer = self._asked(lambda: tokenizer.from_file(str(path)))

    def _asked(self, work: Callable[[], Any]) -> Any:
        """What `tokenizers` gives; a tokenizer may be read and still have no word for a text, nor for that."""
        try:
            return work()
        except Exception as error:  # of no type of its own
            raise ValueError(f"{self._folder}/{TOKENIZER} is damaged: {error}") from error

    @property
    def bytes(self) -> bool:
        """Whether an id is a byte."""
        return self._folder is None and not self._numbers

    def prompt(self, text: str | None, tokens: str | None) -> np.ndarray:
        """int32 ids of the text, or those of a list of numbers; at least one."""
        if tokens is not None:
            if text is not None:
                raise ValueError(f"the prompt must be text or --tokens; got both: {text!r} and {tokens!r}")
            try:
                ids = [int(each) for each in tokens.replace(",", " ").split()]
            except ValueError as error:
                raise ValueError(f'--tokens must be whole numbers such as "1 2 3"; got {tokens!r}') from error
        elif self._numbers:
            raise ValueError('this model was trained on token ids: give the prompt as such, --tokens "1 2 3"')
        elif self._folder is None:
            ids = byte_tokens("The " if text is None else text).tolist()
        elif self._tokenizer is None:
            raise ValueError(f'{self._folder} has no {TOKENIZER}: give the prompt as ids, --tokens "1 2 3"')
        else:
            ids = self._asked(lambda: self._tokenizer.encode("The " if text is None else text).ids)
        if not ids:
            raise ValueError(f"the prompt must have at least one {'byte' if self._folder is None else 'token'}")
        return np.array(ids, dtype=np.int32)

    def text(self, ids: np.ndarray) -> str:
        """What a reader sees: the text, or the numbers where no tokenizer is there."""
        if self.bytes:
            return builtins.bytes(ids.astype(np.uint8)).decode("utf-8", errors="replace")
        if self._tokenizer is None:
            return " ".join(map(str, ids.tolist()))
        return self._asked(lambda: self._tokenizer.decode(ids.tolist(), skip_special_tokens=False))

    def labels(self, ids: np.ndarray) -> list[str]:
        """What stands for each id at an axis: a byte's character, a tokenizer's piece, or the number."""
        if self._folder is None:
            signs = [chr(i).translate(SHOWN) for i in range(BYTES)]
            return [signs[i] if 32 < i < 127 or i in b" \n\t" else f"{i:02x}" for i in ids.tolist()]
        if self._tokenizer is None:
            return [str(i) for i in ids.tolist()]
        return [self._piece(i) for i in ids.tolist()]

    def _piece(self, i: int) -> str:
        piece = self._tokenizer.id_to_token(i)
        if piece is None:  # a table may have more rows than the tokenizer has words
            return str(i)
        shown = piece.translate(SHOWN)
        if shown.translate(dict.fromkeys(map(ord, "␣↵⇥"))).isascii():
            return shown
        # A byte-level piece spells what is not ASCII byte by byte: a reader knows what it decodes to.
        decoded = self._tokenizer.decode([i], skip_special_tokens=False).translate(SHOWN)
        if not decoded or "\ufffd" in decoded:
            return shown
        return "␣" + decoded if shown[0] == "␣" != decoded[0] else decoded
