"""Twenty updates in each of three frameworks, handed over by checkpoint, are the sixty of any one of them."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax")
pytest.importorskip("torch")

import backend_jax  # noqa: E402
import backend_torch  # noqa: E402
import core_numpy  # noqa: E402
from core_numpy.contract.checkpoints import read_checkpoint  # noqa: E402
from core_numpy.contract.data import batches, byte_tokens  # noqa: E402

THREE = {"torch": backend_torch, "jax": backend_jax, "numpy": core_numpy}
MODEL = core_numpy.ModelConfig(vocab=256, width=12, heads=2, layers=1, hidden=16, max_length=16, dropout=0.1,
                               positions="rotary")  # fmt: skip
# Everything that has a memory: moments, the average, the schedule, dropout's keys, micro-batches, the data's order.
TRAIN = core_numpy.TrainConfig(steps=60, batch=4, lr=1e-2, warmup=7, schedule="cosine", final_lr=1e-3, accumulate=2,
                               ema=0.95, precision="float64", seed=11, label_smoothing=0.05)  # fmt: skip
TEXT = byte_tokens("the same trajectory in three frameworks, and nothing lost on the way. " * 3)


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def stream(trainer):
    """The data from where the trainer stands, as ragged batches."""
    start = trainer.batches
    for number, batch in enumerate(batches(TEXT, batch=4, length=9, seed=TRAIN.seed, start=start), start):
        batch["targets"][number % 4, 3:] = -100
        yield batch


def go_on(trainer, steps):
    return [report["loss"] for report in trainer.fit(stream(trainer), steps=steps, progress=False)]


@cache
def straight(name):
    trainer = THREE[name].Trainer(THREE[name].Transformer(MODEL, seed=5, dtype="float64"), TRAIN)
    return go_on(trainer, 60), THREE[name].get_params(trainer.model)


@pytest.mark.parametrize("order", list(itertools.permutations(THREE)), ids="-".join)
def test_twenty_updates_in_each_by_checkpoint_are_sixty_in_any_one(order, tmp_path):
    first = THREE[order[0]]
    trainer, losses = first.Trainer(first.Transformer(MODEL, seed=5, dtype="float64"), TRAIN), []
    for place, name in enumerate(order):
        if place:
            trainer = THREE[name].Trainer.load(tmp_path)
            assert trainer.updates == trainer.batches == 20 * place and trainer.config == TRAIN
        losses += go_on(trainer, 20)
        trainer.save(tmp_path)
    params = read_checkpoint(tmp_path).params
    assert len(losses) == 60 and losses[-1] < losses[0] - 0.5  # it has moved far from where it began
    for name in THREE:
        expected, final = straight(name)
        np.testing.assert_allclose(losses, expected, rtol=1e-9, atol=0)
        assert params.keys() == final.keys()
        for parameter, x in final.items():
            np.testing.assert_allclose(params[parameter], x, rtol=1e-9, atol=1e-10, err_msg=parameter)


@pytest.mark.parametrize("last", ["numpy", "jax"])
def test_moments_the_average_and_the_loss_scale_arrive_as_torch_wrote_them(last, tmp_path):
    train = TRAIN.replace(precision="float16", steps=9, label_smoothing=0.0)
    writer = backend_torch.Trainer(backend_torch.Transformer(MODEL, seed=5), train)
    writer.loss_scale = 2.0**24  # overflows: the first updates are left out, and their batches are gone all the same
    go_on(writer, 12)
    assert writer.updates < writer.batches == 12 and writer.loss_scale < 2.0**24
    writer.save(tmp_path / "torch")
    reader = THREE[last].Trainer.load(tmp_path / "torch")
    assert (reader.updates, reader.batches) == (writer.updates, writer.batches)
    reader.save(tmp_path / "again")
    one, two = read_checkpoint(tmp_path / "torch"), read_checkpoint(tmp_path / "again")
    assert set(one.state) == {"moment1", "moment2", "ema"} and one.state.keys() == two.state.keys()
    for slot in one.state:
        for name, x in one.state[slot].items():
            assert x.any() and x.tobytes() == two.state[slot][name].tobytes()
    for name in ("loss_scale", "loss_scale_steps", "batches"):
        assert one.extra[name] == two.extra[name]
    assert one.extra["loss_scale"] == writer.loss_scale
    assert backend_torch.Trainer.load(tmp_path / "again").loss_scale == writer.loss_scale
