"""Checkpoints that several processes wrote: put together whole, or refused by name."""

from __future__ import annotations

import json

import numpy as np
import pytest

import core_numpy as C
from core_numpy.contract.checkpoints import checkpoint_path, finish_shards, read_checkpoint
from core_numpy.contract.shards import MODEL_SLOT, open_shards, shard_name, write_shard

CONFIG = C.ModelConfig(vocab=5, width=4, heads=2, layers=1, max_length=6)


@pytest.fixture
def written(tmp_path):
    """A trainer's state, written by three processes: rows, columns, and what one has alone."""
    trainer = C.Trainer(C.Transformer(CONFIG, seed=1), C.TrainConfig())
    rng = np.random.default_rng(0)
    params = {name: rng.standard_normal(p.shape).astype(np.float32) for name, p in C.get_params(trainer.model).items()}
    slots = {MODEL_SLOT: params, "moment1": {n: 2 * p for n, p in params.items()},
             "moment2": {n: p * p for n, p in params.items()}}  # fmt: skip

    def pieces(rank):
        found = {}
        for slot, arrays in slots.items():
            for name, x in arrays.items():
                if name == "embedding.weight":
                    rows = [slice(0, 2), slice(2, 3), slice(3, 5)][rank]
                    found[slot, name] = [((rows.start, 0), x[rows])]
                elif x.ndim == 2 and rank < 2:
                    half = x.shape[1] // 2
                    found[slot, name] = [((0, 0), x[:, :half])] if rank == 0 else [((0, half), x[:, half:])]
                elif x.ndim == 1 and rank == 2:
                    found[slot, name] = [((0,), x)]
        return found

    path = checkpoint_path(tmp_path, 7)
    directory = open_shards(tmp_path, path)
    entries = {shard_name(rank): write_shard(directory, rank, pieces(rank)) for rank in range(3)}

    def finish(lacking=None, twice=None):
        shards = {file: entry for file, entry in entries.items() if file != lacking}
        if twice is not None:
            shards[shard_name(9)] = entries[twice]
        shapes = {name: list(x.shape) for name, x in params.items()}
        return finish_shards(
            directory, path, step=7, shards=shards, wholes=dict.fromkeys(slots, shapes), config=CONFIG,
            train_config=C.TrainConfig(), extra={"batches": 9},
        )  # fmt: skip

    return tmp_path, slots, directory, finish


def test_pieces_of_several_processes_are_one_checkpoint(written):
    folder, slots, _, finish = written
    finish()
    found = read_checkpoint(folder)
    assert found.step == 7 and found.config == CONFIG and found.extra == {"batches": 9}
    assert found.params.keys() == slots[MODEL_SLOT].keys() and found.state.keys() == {"moment1", "moment2"}
    for slot, arrays in ({MODEL_SLOT: found.params} | found.state).items():
        for name, x in arrays.items():
            assert x.dtype == np.float32 and np.array_equal(x, slots[slot][name]), (slot, name)
    trainer = C.Trainer.load(folder)
    assert trainer.updates == 7 and trainer.batches == 9


def test_before_the_last_process_is_done_there_is_no_checkpoint(written):
    folder, _, directory, _ = written
    assert directory.is_dir() and not list(folder.glob("step-*"))
    with pytest.raises(ValueError, match="holds no checkpoint"):
        read_checkpoint(folder)


def test_a_damaged_shard_is_named(written):
    folder, _, _, finish = written
    file = finish() / shard_name(1)
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with (
        pytest.warns(RuntimeWarning, match="shard-00001.safetensors is damaged"),
        pytest.raises(ValueError, match="every one is damaged"),
    ):
        read_checkpoint(folder)


def test_a_lost_shard_is_named(written):
    _, _, _, finish = written
    path = finish()
    (path / shard_name(2)).unlink()
    with pytest.raises(ValueError, match=r"lacks the file shard-00002\.safetensors"):
        read_checkpoint(path)


def test_a_piece_that_nobody_wrote_is_named(written):
    from core_numpy.contract.checkpoints import MANIFEST, _render

    _, _, _, finish = written
    path = finish()
    document = json.loads((path / MANIFEST).read_text())
    del document["digest"], document["shards"][shard_name(1)]
    (path / MANIFEST).write_bytes(_render(document))
    with pytest.raises(ValueError, match=r"of model/blocks\.0\.attention\.key\.weight there are 8 numbers, not 16"):
        read_checkpoint(path)


def test_processes_that_did_not_write_everything_make_no_checkpoint_and_older_ones_stay(written):
    folder, _, directory, finish = written
    older = C.Trainer(C.Transformer(CONFIG, seed=1), C.TrainConfig()).save(folder)
    with pytest.raises(
        ValueError, match=r"step-00000007 is not made: of model/embedding\.weight there are 16 numbers, not 20"
    ):
        finish(lacking=shard_name(1))
    assert not directory.exists() and read_checkpoint(folder).path == older


def test_a_piece_that_two_processes_wrote_is_refused_before_there_is_a_checkpoint(written):
    folder, _, _, finish = written
    with pytest.raises(ValueError, match=r"of model/embedding\.weight there are two pieces that begin at 0,0"):
        finish(twice=shard_name(0))
    assert not list(folder.glob("step-*"))
