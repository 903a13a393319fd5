"""What a run is trained on: a text as bytes, or a file of token ids by memory map."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .data import byte_tokens, default_text, read_text, read_tokens

# Ids are handed to a model as int32.
_LARGEST = 2**31 - 1


@dataclass(frozen=True)
class Source:
    """Tokens, how many kinds there may be, what to call them, and a digest that a resumed run compares."""

    tokens: np.ndarray
    vocab: int
    label: str
    unit: str  # "byte" or "token"
    digest: str


def open_source(text: str | None, data: str | None, *, vocab: int | None = None) -> Source:
    """A text (None: the default one), or a file of ids; their vocabulary is `vocab`, or the largest id and one."""
    if data is None:
        raw, label = (default_text().encode(), "CPython's help topics") if text is None else (read_text(text), text)
        return Source(byte_tokens(raw), 256, label, "byte", hashlib.sha256(raw).hexdigest())
    if text is not None:
        raise ValueError(f"--text and --data exclude each other; got {text!r} and {data!r}")
    tokens = read_tokens(data, vocab=_LARGEST if vocab is None else vocab)
    if vocab is None:
        # In pieces: the file may be larger than the memory.
        vocab = 1 + max(int(tokens[begin : begin + (1 << 24)].max()) for begin in range(0, tokens.size, 1 << 24))
    with open(Path(data), "rb") as file:
        return Source(tokens, vocab, data, "token", hashlib.file_digest(file, "sha256").hexdigest())
