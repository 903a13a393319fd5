"""The JAX trainer against the reference's, step by step and in its files, and what is native about it."""

from __future__ import annotations

import logging

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

import jax.numpy as jnp  # noqa: E402

import backend_jax as B  # noqa: E402
import core_numpy as C  # noqa: E402
from backend_jax import optimizer  # noqa: E402
from backend_jax.program import traced  # noqa: E402

CONFIG = C.ModelConfig(vocab=7, width=6, heads=2, hidden=5, layers=1, max_length=9, dropout=0.25)
PLAIN = CONFIG.replace(dropout=0.0)
TRAIN = C.TrainConfig(steps=20, batch=4, lr=3e-2, warmup=3, schedule="cosine", precision="float64", clip_norm=0.5)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def batches(count, *, rows=4, T=5, lengths=False):
    rng = np.random.default_rng(4)
    made = []
    for _ in range(count):
        batch = {"tokens": rng.integers(0, 7, (rows, T)), "targets": rng.integers(0, 7, (rows, T))}
        # Ragged: the first rows count fewer targets, so that a mean of means would be another number.
        batch["targets"][0, 1:] = -100
        batch["targets"][1, 3:] = -100
        if lengths:
            batch["lengths"] = np.array([1, 3, T, T])
        made.append(batch)
    return made


def trainer_of(package, config, train, seed=2):
    dtype = "float64" if train.precision == "float64" else "float32"
    return package.Trainer(package.Transformer(config, seed=seed, dtype=dtype), train)


def same(got, want, tolerance):
    assert list(got) == list(want)
    for name, x in got.items():
        assert x.dtype == want[name].dtype
        np.testing.assert_allclose(x, want[name], rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize(
    "change",
    [
        {"accumulate": 2, "ema": 0.9, "label_smoothing": 0.1, "z_loss": 0.01},
        {"optimizer": "sgd", "weight_decay": 0.2},
        {"optimizer": "lion", "lr": 1e-3, "clip_norm": None},
    ],
    ids=["adamw", "sgd", "lion"],
)
def test_twenty_updates_are_the_references(change, x64):
    train = TRAIN.replace(**change)
    # A key's bias shifts all scores of a row alike: its gradient is rounding alone, and lion takes the sign of it.
    config = CONFIG.replace(attention_bias=train.optimizer != "lion")
    reference, trainer = trainer_of(C, config, train), trainer_of(B, config, train)
    before = trainer.traces
    for batch in batches(20):
        want, got = reference.step(batch), trainer.step(batch)
        assert got == pytest.approx(want, rel=1e-9) and got["tokens"] == want["tokens"] == 14
    same(B.get_params(trainer.model), C.get_params(reference.model), 1e-9)
    for slot, arrays in reference.state.items():
        same({name: np.asarray(x) for name, x in trainer.state[slot].items()}, arrays, 1e-9)
    assert trainer.traces - before == 1
    data = batches(3, lengths=True)
    assert trainer.evaluate(data) == pytest.approx(reference.evaluate(data), rel=1e-9)


def test_each_set_of_fields_and_shapes_is_traced_once():
    trainer = trainer_of(B, PLAIN, C.TrainConfig(steps=9, batch=4, eps=2e-8))
    for batch in [*batches(2), *batches(2, lengths=True), *batches(1), *batches(1, lengths=True)]:
        trainer.step(batch)
    assert trainer.traces == 2


def test_a_step_gives_back_the_memory_of_what_it_replaces():
    trainer = trainer_of(B, PLAIN, C.TrainConfig(steps=9, batch=4, eps=2e-8))  # compiled for the test before
    given = (trainer._gathered(), trainer._state, trainer._arrays(batches(1)[0]))
    old = jax.tree.leaves(given[:2])
    assert len(old) == 3 * len(trainer._params)  # with both moments
    lowered = trainer._program.step.lower(*given, np.uint32(1), np.float32(1), np.float32(1))
    assert lowered.as_text().count("tf.aliasing_output") == len(old)
    trainer.step(batches(1)[0])
    assert all(x.is_deleted() for x in old)


def test_trainers_that_differ_only_on_the_host_share_a_compiled_step():
    first = C.TrainConfig(steps=9, batch=4, lr=1e-3, eps=3e-8)
    host = {"lr": 1e-2, "warmup": 2, "schedule": "linear", "final_lr": 1e-4, "steps": 5, "seed": 3, "nonfinite": "skip"}
    for made, train in enumerate((first, first.replace(**host))):
        trainer, reference = trainer_of(B, PLAIN, train), trainer_of(C, PLAIN, train)
        assert trainer.traces == made
        for batch in batches(3):
            assert trainer.step(batch) == pytest.approx(reference.step(batch), rel=1e-4)
        assert trainer.traces == 1
    # The seed draws the dropout: it stays in the key where there is any.
    assert traced(first, True) != traced(first.replace(seed=3), True)


def test_saving_and_loading_changes_nothing(tmp_path, x64):
    train = TRAIN.replace(ema=0.9, optimizer="adamw", accumulate=2, label_smoothing=0.1, z_loss=0.01)
    data = batches(6)
    straight, first = trainer_of(B, CONFIG, train), trainer_of(B, CONFIG, train)
    straight.fit(data, progress=False)
    first.fit(data[:3], progress=False)
    first.save(tmp_path)
    second = B.Trainer.load(tmp_path)
    assert second.updates == 3
    second.fit(data[3:], progress=False)
    for name, x in B.get_params(straight.model).items():
        assert np.array_equal(x, B.get_params(second.model)[name])
    # The file is everybody's: the reference goes on from it as well.
    third = C.Trainer.load(tmp_path)
    third.fit(data[3:], progress=False)
    same(B.get_params(second.model), C.get_params(third.model), 1e-9)
    third.save(tmp_path / "core")
    assert B.Trainer.load(tmp_path / "core").updates == 6


def test_a_gradient_that_is_not_finite_stops_or_is_left_out(caplog):
    train = C.TrainConfig(steps=5, batch=4)
    model = B.Transformer(PLAIN)
    B.set_params(model, {**B.get_params(model), "blocks.0.ffn.up.bias": np.full(5, np.nan, np.float32)})
    trainer = B.Trainer(model, train)
    before = B.get_params(model)
    with pytest.raises(FloatingPointError, match=r"update 1 in .*embedding\.weight"):
        trainer.step(batches(1)[0])
    same(B.get_params(model), before, 0)
    skipping = B.Trainer(model, train.replace(nonfinite="skip"))
    report = skipping.step(batches(1)[0])
    assert np.isnan(report["grad_norm"]) and skipping.updates == 0
    assert "left out" in caplog.text
    same(B.get_params(model), before, 0)


def test_float16_overflow_halves_the_scale_and_says_so(caplog):
    trainer = trainer_of(B, PLAIN, C.TrainConfig(steps=5, batch=4, precision="float16"))
    trainer.loss_scale = 2.0**30
    with caplog.at_level(logging.WARNING):
        trainer.step(batches(1)[0])
    assert trainer.loss_scale == 2.0**29 and trainer.updates == 0 and "the loss scale is" in caplog.text
    trainer.loss_scale = 2.0**10
    report = trainer.step(batches(1)[0])
    assert trainer.updates == 1
    exact = trainer_of(C, PLAIN, C.TrainConfig(steps=5, batch=4)).step(batches(1)[0])
    assert report["loss"] == pytest.approx(exact["loss"], rel=5e-3)
    assert report["grad_norm"] == pytest.approx(exact["grad_norm"], rel=2e-2)


def test_bfloat16_keeps_float32_masters():
    trainer = trainer_of(B, PLAIN, C.TrainConfig(steps=5, batch=4, precision="bfloat16", lr=1e-4))
    start = B.get_params(trainer.model)["head.weight"]
    report = trainer.step(batches(1)[0])
    moved = B.get_params(trainer.model)["head.weight"]
    # The first update of Adam moves by the learning rate, far less than bfloat16 could hold at these sizes.
    assert moved.dtype == np.float32 and 5e-5 < np.abs(moved - start).max() < 2e-4
    exact = trainer_of(C, PLAIN, C.TrainConfig(steps=5, batch=4)).step(batches(1)[0])
    assert report["loss"] == pytest.approx(exact["loss"], rel=2e-2) and report["loss"] != exact["loss"]


def test_remat_and_eager_steps_are_the_plain_step():
    results = []
    for change in ({}, {"remat": True}, {"compile": False}):
        trainer = trainer_of(B, PLAIN, C.TrainConfig(steps=5, batch=4, lr=1e-3, **change))
        results.append(trainer.fit(batches(2), progress=False))
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            assert got == pytest.approx(want, rel=1e-5)


def test_a_trainer_leaves_arrays_that_others_hold():
    model = B.Transformer(PLAIN)
    held = model.embedding.weight[...]
    B.Trainer(model, C.TrainConfig(steps=2, batch=4)).step(batches(1)[0])
    assert held.shape == (7, 6) and not np.array_equal(held, model.embedding.weight[...])


def test_ids_and_targets_out_of_range_are_refused_before_the_step():
    trainer = trainer_of(B, PLAIN, C.TrainConfig(steps=2, batch=4))
    before = trainer.traces
    for field, wrong in (("tokens", 7), ("tokens", -1), ("targets", 7), ("targets", -1)):
        batch = batches(1)[0]
        batch[field][2, 2] = wrong
        with pytest.raises(ValueError, match=f"{field} must be from 0 to 6"):
            trainer.step({name: jnp.asarray(x) for name, x in batch.items()})
    assert trainer.updates == 0 and trainer.traces == before


def update_once(g, *, p=0.0, **change):
    train = C.TrainConfig(**{"lr": 1.0, "weight_decay": 0.0, **change})
    params, grads = {"w": jnp.full((1, 1), p)}, {"w": jnp.full((1, 1), g)}
    new, _ = optimizer.update(train, params, grads, optimizer.initial_state(train, params), t=1, lr=train.lr)
    return float(new["w"][0, 0])


def test_adams_eps_stands_outside_the_corrected_root():
    assert update_once(1e-8, eps=1e-8, betas=(0.9, 0.999)) == pytest.approx(-0.5, rel=1e-5)


def test_decay_is_decoupled():
    assert update_once(0.0, p=1.0, lr=0.01, weight_decay=0.1) == pytest.approx(0.999, rel=1e-6)


def test_clipping_is_exact_and_survives_its_edges():
    grads = {"w": jnp.array([3e-3, 4e-3])}
    norm = optimizer.global_norm(grads)
    clipped = optimizer.clip(grads, norm, 1e-3)["w"]
    np.testing.assert_allclose(clipped, [6e-4, 8e-4], rtol=3e-7)
    assert np.array_equal(optimizer.clip(grads, norm, 1.0)["w"], grads["w"])
    zero = {"w": jnp.zeros(2)}
    assert np.array_equal(optimizer.clip(zero, optimizer.global_norm(zero), 1.0)["w"], [0.0, 0.0])
    # Squares of 3e20 overflow float32, the norm does not.
    huge = {"a": jnp.full(1, 3e20), "b": jnp.full(2, 3e20)}
    assert float(optimizer.global_norm(huge)) == pytest.approx(3e20 * 3**0.5, rel=1e-6)


def test_the_bias_correction_is_right_in_float32():
    # 1 - 0.999 in float32 is 1.00005e-3: the second moment would be off by 5e-5.
    assert float(optimizer._correction(0.999, 1, jnp.dtype("float32"))) == pytest.approx(1e-3, rel=2e-7)
    assert float(optimizer._correction(0.0, 3, jnp.dtype("float32"))) == 1.0


def test_adamw_is_optaxs():
    optax = pytest.importorskip("optax")
    train = C.TrainConfig(lr=0.1, eps=1e-3, weight_decay=0.3)
    params = {"w": jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)}
    other = optax.adamw(0.1, b1=0.9, b2=0.95, eps=1e-3, weight_decay=0.3)
    ours, theirs, state, slots = params, params, other.init(params), optimizer.initial_state(train, params)
    for t in range(1, 4):
        grads = {"w": jnp.sin(jnp.arange(6.0) * t).reshape(2, 3)}
        ours, slots = optimizer.update(train, ours, grads, slots, t=t, lr=0.1)
        updates, state = other.update(grads, state, theirs)
        theirs = optax.apply_updates(theirs, updates)
    np.testing.assert_allclose(ours["w"], theirs["w"], rtol=1e-5)
