"""Saving in the background: what is written is the state of the call, steps go on meanwhile, and no error is lost."""

from __future__ import annotations

import logging
import signal
import sys
import threading

import numpy as np
import pytest
from three import PACKAGES, load

from core_numpy import ModelConfig, TrainConfig
from core_numpy.contract import checkpoints
from core_numpy.contract.checkpoints import read_checkpoint, write_checkpoint

MODEL = ModelConfig(vocab=7, width=6, heads=2, hidden=5, layers=1, max_length=9)
TRAIN = TrainConfig(steps=20, batch=2, lr=1e-2, ema=0.5)
BATCH = {"tokens": np.array([[1, 2, 3], [4, 5, 6]]), "targets": np.array([[2, 3, 1], [5, 6, -100]])}


@pytest.fixture(params=PACKAGES)
def B(request):
    return load(request.param)


def trained(B, steps, **fields):
    trainer = B.Trainer(B.Transformer(MODEL, seed=1), TRAIN.replace(**fields))
    trainer.fit([BATCH] * steps, progress=False)
    return trainer


@pytest.fixture
def gate(monkeypatch):
    """A disk that takes its time: nothing is written before the gate is set."""
    gate, entered = threading.Event(), threading.Event()
    gate.writers = 0

    def write(*arguments, **more):
        gate.writers += 1
        entered.set()
        assert gate.wait(60)
        return write_checkpoint(*arguments, **more)

    monkeypatch.setattr(checkpoints, "write_checkpoint", write)
    gate.entered = entered
    yield gate
    gate.set()


def test_steps_go_on_while_a_checkpoint_is_written_and_do_not_show_in_it(B, tmp_path, gate):
    trainer, twin = trained(B, 2), trained(B, 2)
    twin._saver.save = lambda folder, background, **snapshot: write_checkpoint(folder, **snapshot)
    path = trainer.save(tmp_path / "in the background", background=True)
    assert path == tmp_path / "in the background" / "step-00000002" and gate.entered.wait(60)
    trainer.fit([BATCH] * 3, progress=False)
    assert trainer.updates == 5 and not path.exists()
    gate.set()
    trainer.wait()
    twin.save(tmp_path / "at once")
    one, two = read_checkpoint(path), read_checkpoint(tmp_path / "at once")
    assert (one.step, one.extra) == (two.step, two.extra) == (2, one.extra)
    for name, x in one.params.items():
        assert x.tobytes() == two.params[name].tobytes()
        for slot in ("moment1", "moment2", "ema"):
            assert one.state[slot][name].tobytes() == two.state[slot][name].tobytes()


def test_a_second_save_waits_for_the_first(B, tmp_path, gate):
    trainer = trained(B, 1)
    trainer.save(tmp_path, background=True)
    second = threading.Thread(target=trainer.save, args=(tmp_path / "second",))
    second.start()
    second.join(0.2)
    assert second.is_alive() and gate.writers == 1
    gate.set()
    second.join(60)
    assert not second.is_alive() and gate.writers == 2 and read_checkpoint(tmp_path).step == 1


def test_a_run_that_was_laid_out_over_devices_goes_on_without_them(B, tmp_path):
    from inspect import signature

    trainer = trained(B, 1)
    write_checkpoint(tmp_path, step=1, params=B.get_params(trainer.model), config=MODEL,
                     train_config=TRAIN.replace(parallel={"data": 2}),
                     state={slot: B.get_params(trainer.model) for slot in ("moment1", "moment2", "ema")})  # fmt: skip
    assert B.Trainer.load(tmp_path).config.parallel is None
    known = ["path", "device", "parallel", "train_config", "model_config"]
    assert list(signature(B.Trainer.load).parameters) == known
    with pytest.raises(ValueError, match="parallel"):
        B.Trainer.load(tmp_path, parallel={"data": 0})


def full(*arguments, **more):
    raise OSError(28, "No space left on device")


def test_a_trainer_has_the_same_names_and_signatures_in_the_three():
    from inspect import isfunction, signature

    names = ["step", "fit", "evaluate", "save", "wait", "load", "ema"]
    shapes = []
    for package in PACKAGES:
        trainer = load(package).Trainer
        public = [name for name in names if hasattr(trainer, name)]
        assert public == names and isinstance(trainer.ema, property)
        methods = [getattr(trainer, name) for name in names if name != "ema"]
        shapes.append([[(p.name, p.kind, p.default) for p in signature(m).parameters.values()] for m in methods])
        extra = {name for name, x in vars(trainer).items() if isfunction(x) and not name.startswith("_")} - {*names}
        assert extra <= {"accumulate"}  # torch's, of micro-batches that are on the device already
    assert shapes[0] == shapes[1] == shapes[2]


def test_an_error_in_the_background_is_raised_once_by_the_next_step_or_wait(B, tmp_path, monkeypatch, caplog):
    trainer = trained(B, 1)
    trainer.save(tmp_path)
    for call in (lambda: trainer.step(BATCH), trainer.wait, lambda: trainer.save(tmp_path)):
        with monkeypatch.context() as patch:
            patch.setattr("os.fsync", full)
            with caplog.at_level(logging.ERROR):
                trainer.save(tmp_path, background=True)
                trainer._saver._thread.join()
        assert "the save in the background failed: " in caplog.text
        with pytest.raises(OSError, match=r"cannot write the checkpoint .*step-0000000.: No space left on device"):
            call()
        trainer.step(BATCH)  # it was said once, and training can go on
        caplog.clear()
    assert trainer.updates == 4 and read_checkpoint(tmp_path).step == 1


def test_a_gradient_that_is_not_finite_names_the_last_checkpoint(B, tmp_path):
    for saved in (False, True):
        trainer = trained(B, 1)
        if saved:
            path = trainer.save(tmp_path)
        params = B.get_params(trainer.model)
        params["blocks.0.ffn.up.weight"][0, 0] = np.nan
        B.set_params(trainer.model, params)
        words = f"The last good checkpoint is {path}" if saved else "Nothing was saved before"
        with pytest.raises(FloatingPointError, match=words):
            trainer.step(BATCH)
    assert B.Trainer.load(tmp_path).updates == 1


def test_the_average_is_given_under_canonical_names_and_can_be_set(B, tmp_path):
    trainer = B.Trainer(B.Transformer(MODEL, seed=1), B.TrainConfig(lr=1e-2, ema=0.75, compile=False))
    start = B.get_params(trainer.model)
    assert list(trainer.ema) == list(start)
    trainer.step(BATCH)
    average, now = trainer.ema, B.get_params(trainer.model)
    for name, x in average.items():
        assert x.dtype == now[name].dtype and x.shape == now[name].shape
        np.testing.assert_allclose(x, 0.75 * start[name] + 0.25 * now[name], atol=1e-7, err_msg=name)
    again = B.Trainer.load(trainer.save(tmp_path)).ema
    assert all(again[name].tobytes() == x.tobytes() for name, x in average.items())
    average["norm.weight"][:] = 7.0  # a copy: the trainer's own stays
    assert not (trainer.ema["norm.weight"] == 7.0).any()
    B.set_params(trainer.model, trainer.ema)
    assert B.Trainer(trainer.model, B.TrainConfig()).ema is None


@pytest.mark.parametrize(
    "package", ["core_numpy", "backend_torch", pytest.param("backend_jax", marks=pytest.mark.slow)]
)
def test_a_batch_that_is_left_out_is_not_taken_again_after_a_resume(package, tmp_path):
    B = load(package)
    trainer = trained(B, 1, nonfinite="skip")
    params = B.get_params(trainer.model)
    B.set_params(trainer.model, {name: np.full_like(x, np.nan) for name, x in params.items()})
    trainer.step(BATCH)
    trainer.save(tmp_path)
    loaded = B.Trainer.load(tmp_path)
    assert (loaded.updates, loaded.batches) == (trainer.updates, trainer.batches) == (1, 2)
    B.set_params(loaded.model, params)
    loaded.step(BATCH)
    assert (loaded.updates, loaded.batches) == (2, 3)


@pytest.mark.parametrize("steps", [None, 3])
def test_fit_goes_on_to_the_last_update_whatever_was_left_out(B, steps, caplog):
    trainer = B.Trainer(B.Transformer(MODEL, seed=1), TRAIN.replace(steps=3, nonfinite="skip"))
    sound = B.get_params(trainer.model)

    def stream():
        for number in range(9):
            # The second batch meets a NaN.
            B.set_params(trainer.model, {name: x * np.nan for name, x in sound.items()} if number == 1 else sound)
            yield BATCH

    with caplog.at_level(logging.WARNING):
        reports = trainer.fit(stream(), steps, progress=False)
    assert "update 2 left out: gradients that are not finite in embedding.weight" in caplog.text
    assert (trainer.updates, trainer.batches, len(reports)) == ((3, 4, 4) if steps is None else (2, 3, 3))


@pytest.fixture
def heard():
    """What a shell starts in the background ignores Ctrl-C, and pytest with it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_waits_for_the_update_in_hand(B, monkeypatch, heard):
    """What is saved after it is the state between two updates, never parameters of one and the count of another."""
    trainer, straight = trained(B, 1), trained(B, 2)
    before = signal.getsignal(signal.SIGINT)
    # In the middle of an update, where parameters have moved and it is not yet counted.
    owner, name = {
        "core_numpy": (sys.modules["core_numpy.training"], "update"),
        "backend_torch": (sys.modules.get("backend_torch.training"), "update"),
        "backend_jax": (trainer, "_publish"),
    }[B.__name__]
    plain = getattr(owner, name)

    def interrupted(*arguments, **more):
        found = plain(*arguments, **more)
        signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit([BATCH] * 3, progress=False)
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is before
    assert (trainer.updates, trainer.batches) == (2, 2)
    for name, x in B.get_params(straight.model).items():
        assert x.tobytes() == B.get_params(trainer.model)[name].tobytes()
        assert x.tobytes() != B.get_params(trained(B, 1).model)[name].tobytes() or "key.bias" in name


def test_what_another_framework_compiled_goes_on_in_numpy_and_back(tmp_path):
    C = load("core_numpy")
    trainer = trained(C, 1)
    trainer.config = trainer.config.replace(compile=True)  # as torch or JAX would have saved it
    trainer.save(tmp_path)
    again = C.Trainer.load(tmp_path)
    again.step(BATCH)
    assert again.updates == 2 and read_checkpoint(again.save(tmp_path)).train_config.compile is True
    with pytest.raises(ValueError, match="NumPy has no compiler"):
        C.Trainer(again.model, again.config)
