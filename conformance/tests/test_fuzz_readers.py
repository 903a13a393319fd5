"""Every reader of files, given files that were damaged at random: clear errors and nothing else.

`FUZZ_SECONDS` (default 20) is how long each reader is tried; the seed is fixed, so that a failure comes back.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("safetensors")

import core_numpy
from conformance import curves, vectors
from conformance.lab import pages
from conformance.race import documents, racing
from core_numpy.contract.checkpoints import checkpoint_path, finish_shards, read_checkpoint
from core_numpy.contract.config import ModelConfig, TrainConfig
from core_numpy.contract.data import read_text, read_tokens
from core_numpy.contract.files import load_config, load_params, save_params
from core_numpy.contract.run_log import UPDATES, VALIDATION
from core_numpy.contract.settings import stored_settings
from core_numpy.contract.shards import MODEL_SLOT, open_shards, shard_name, write_shard
from core_numpy.contract.words import Words

pytestmark = pytest.mark.slow

SECONDS = float(os.environ.get("FUZZ_SECONDS", "20"))
# What a reader may say. A KeyError, an IndexError, a RecursionError or a struct.error is a hole in its checks.
CLEAR = (ValueError, TypeError, OSError)
CONFIG = ModelConfig(vocab=11, width=4, heads=2, layers=1, max_length=8)
# Pieces that readers of JSON and of headers with lengths stumble over.
PIECES = [b"", b"null", b"-1", b"1e999", b"NaN", b"[]", b"{}", b'""', b"18446744073709551615", b"\xff\xfe", b"\x00" * 8]
PIECES += [b"[" * 2000, b'{"a":' * 500, b"../../x", b"/etc/passwd", b"true", b"0.5", b"\xff" * 8]


def safetensors_file(folder: Path) -> Callable[[], Any]:
    path = folder / "p.safetensors"
    save_params(path, {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "y": np.zeros(1)}, config=CONFIG)
    return lambda: (load_params(path), load_config(path))


def checkpoint(folder: Path) -> Callable[[], Any]:
    model = core_numpy.Transformer(CONFIG)
    path = core_numpy.Trainer(model, TrainConfig(steps=3)).save(folder)
    return lambda: (read_checkpoint(folder), read_checkpoint(path))


def pretrained(folder: Path) -> Callable[[], Any]:
    core_numpy.Transformer(CONFIG).save_pretrained(folder, family="gpt2")
    return lambda: core_numpy.Transformer.from_pretrained(folder)


def sharded(folder: Path) -> Callable[[], Any]:
    core_numpy.Transformer(CONFIG).save_pretrained(folder, family="gpt2", max_shard_size=600)
    return lambda: core_numpy.Transformer.from_pretrained(folder)


def tokens(folder: Path) -> Callable[[], Any]:
    np.save(folder / "t.npy", np.arange(64, dtype=np.uint16))
    return lambda: np.asarray(read_tokens(folder / "t.npy", vocab=64)).sum()


def text(folder: Path) -> Callable[[], Any]:
    (folder / "t.txt").write_text("a text that is long enough to be split in two parts", encoding="utf-8")
    return lambda: read_text(folder / "t.txt")


def written_vectors(folder: Path) -> Callable[[], Any]:
    vectors.write(folder / "v", "quick", "gelu")
    return lambda: vectors.read_manifest(folder / "v")


def answers(folder: Path) -> Callable[[], Any]:
    vectors.write(folder / "v", "quick", "gelu-tanh")
    shutil.copytree(folder / "v" / "expected", folder / "a")
    return lambda: vectors.check(folder / "v", folder / "a")


def curve(folder: Path) -> Callable[[], Any]:
    rows = [{"step": n, "loss": 3.0 / n, "tokens": 10, "lr": 1e-3, "grad_norm": 1.0} for n in range(1, 9)]
    for name in (UPDATES, VALIDATION):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "run.json").write_text(json.dumps({"backend": "core_numpy", "size": "tiny"}), encoding="utf-8")
    return lambda: curves.read_run(folder)


def run_settings(folder: Path) -> Callable[[], Any]:
    model = core_numpy.Transformer(CONFIG)
    core_numpy.Trainer(model, TrainConfig(steps=3)).save(folder / "run")
    said = {"text": "a.txt", "steps": 3, "length": 8, "lr": 1e-3, "seed": 0, "checkpoint_every": 5, "digest": "x"}
    (folder / "run" / "run.json").write_text(json.dumps(said), encoding="utf-8")
    return lambda: stored_settings(read_checkpoint(folder / "run"))


def shards(folder: Path) -> Callable[[], Any]:
    path = checkpoint_path(folder, 7)
    directory = open_shards(folder, path)
    params = core_numpy.get_params(core_numpy.Transformer(CONFIG))
    shapes = {name: list(x.shape) for name, x in params.items()}
    wholes = dict.fromkeys((MODEL_SLOT, "moment1", "moment2"), shapes)
    pieces = {(slot, name): [((0,) * x.ndim, x)] for slot in wholes for name, x in params.items()}
    entries = {shard_name(0): write_shard(directory, 0, pieces)}
    finish_shards(
        directory, path, step=7, shards=entries, wholes=wholes, config=CONFIG, train_config=TrainConfig(), extra={}
    )
    return lambda: read_checkpoint(folder)


def race_result(folder: Path) -> Callable[[], Any]:
    row = {"status": "raced", "rounds": [0.5, 0.25], "median": 0.4}
    races = [{"task": {"name": "x"}, "contestants": {"torch": row}, "verdict": "torch wins"}]
    found = {"schema": racing.SCHEMA, "environment": {"cores": 2}, "races": races}
    (folder / "race.json").write_text(json.dumps(found), encoding="utf-8")
    return lambda: documents.read(str(folder / "race.json"))


def lab_result(folder: Path) -> Callable[[], Any]:
    (folder / "lab.json").write_text(json.dumps({"schema": 1, "experiments": {"a": {}}}), encoding="utf-8")
    (folder / "a.png").write_bytes(b"png")
    return lambda: pages.read_results(folder)


def tokenizer(folder: Path) -> Callable[[], Any]:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, "a")).save(str(folder / "tokenizer.json"))
    return lambda: Words(folder).prompt("a", None)


READERS = [
    safetensors_file, checkpoint, pretrained, sharded, tokens, text, written_vectors, answers, curve, run_settings,
    shards, race_result, lab_result, tokenizer,
]  # fmt: skip


def damaged(raw: bytes, draw: random.Random) -> bytes:
    """Bits flipped, pieces cut out, doubled or put in, the end lost."""
    data = bytearray(raw)
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        at = draw.randrange(len(data) + 1)
        kind = draw.randrange(5)
        if kind == 0 and data:
            data[min(at, len(data) - 1)] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del data[at : at + draw.choice((1, 2, 8, 64))]
        elif kind == 2:
            data[at:at] = data[at : at + draw.choice((1, 8, 64))]
        elif kind == 3:
            data[at : at + draw.choice((0, 1, 4, 8))] = draw.choice(PIECES)
        else:
            del data[at:]
    return bytes(data)


def check_reader(make: Callable[[Path], Callable[[], Any]], folder: Path, seconds: float) -> tuple[int, int]:
    """Damage one file after the other for so long; how often there was an error, and how often none."""
    sound = folder / "sound"
    sound.mkdir()
    read = make(sound)
    read()
    files = {path: path.read_bytes() for path in sorted(sound.rglob("*")) if path.is_file()}
    draw, refused, accepted, end = random.Random(0), 0, 0, time.monotonic() + seconds
    while time.monotonic() < end:
        path = draw.choice(list(files))
        path.write_bytes(damaged(files[path], draw))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                read()
            accepted += 1
        except CLEAR as error:
            assert str(error).strip(), f"an error without words: {error!r}"
            refused += 1
        except BaseException as error:
            kept = folder.parent / f"{make.__name__}-{path.name}"
            shutil.copy(path, kept)
            raise AssertionError(f"{type(error).__name__} from {make.__name__}: {kept}") from error
        path.write_bytes(files[path])
    read()
    return refused, accepted


@pytest.mark.timeout(0)
@pytest.mark.parametrize("make", READERS, ids=lambda make: make.__name__)
def test_a_reader_of_damaged_files_gives_clear_errors_and_nothing_else(make, tmp_path):
    refused, accepted = check_reader(make, tmp_path, SECONDS)
    assert refused + accepted > 20
    assert refused > 0 or make in (text, answers)  # any bytes are a text; a wrong answer is a verdict, no error
