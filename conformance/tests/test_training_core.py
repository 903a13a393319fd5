"""Optimisers, accumulation, precision, resuming: `core_numpy.training`, with numbers redone on paper."""

from __future__ import annotations

import math
import platform
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from core_numpy import (
    ModelConfig,
    TrainConfig,
    Trainer,
    Transformer,
    get_params,
    loss_and_gradients,
    pairs,
    set_params,
)
from core_numpy.contract.schedule import learning_rate
from core_numpy.optimizer import clip, global_norm, initial_state, update
from core_numpy.random import fold_in, key

ROOT = Path(__file__).resolve().parents[2]

CONFIG = ModelConfig(vocab=11, width=6, heads=2, layers=2, max_length=8, hidden=10)
PLAIN = {"schedule": "constant", "warmup": 0, "clip_norm": None, "weight_decay": 0.0, "precision": "float64"}


def batch_of(rows=4, seed=0):
    """Ragged: the rows count 1, 2, 3, ... targets."""
    rng = np.random.default_rng(seed)
    tokens, targets = rng.integers(0, 11, (rows, 5)), rng.integers(0, 11, (rows, 5))
    targets[np.arange(5) >= 1 + np.arange(rows)[:, None]] = -100
    return {"tokens": tokens, "targets": targets}


def trainer(model=CONFIG, *, seed=0, **fields):
    config = TrainConfig(**{"steps": 10, "batch": 4, "precision": "float64", **fields})
    return Trainer(
        Transformer(model, seed=seed, dtype="float64" if config.precision == "float64" else "float32"), config
    )


def one(config, p, g, state=None, t=1, lr=0.01):
    """One update of a single parameter."""
    state = initial_state(config, {"p": p}) if state is None else state
    params, state = update(config, {"p": p}, {"p": g}, state, t=t, lr=lr)
    return params["p"], state


def same(first, second):
    assert list(first) == list(second)
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])


def test_a_step_on_one_counted_target_has_its_loss_and_gradient():
    run, batch = trainer(), batch_of(rows=1)
    assert (batch["targets"] >= 0).sum() == 1
    loss, grads = loss_and_gradients(run.model, batch)
    report = run.step(batch)
    assert report["tokens"] == 1 and report["loss"] == pytest.approx(float(loss), rel=1e-12)
    assert report["grad_norm"] == pytest.approx(float(global_norm(grads)), rel=1e-12)


def test_eps_stands_outside_the_root_after_the_correction():
    config = TrainConfig(**PLAIN, eps=1e-8, betas=(0.9, 0.999))
    p, _ = one(config, np.zeros((1, 1)), np.full((1, 1), 1e-8), lr=1.0)
    np.testing.assert_allclose(p, -0.5, rtol=1e-12)


def test_adamw_follows_its_formula_for_three_updates():
    config = TrainConfig(**{**PLAIN, "weight_decay": 0.1}, eps=1e-3, betas=(0.9, 0.95))
    p, state, m, v, expected = np.full((1, 1), 2.0), None, 0.0, 0.0, 2.0
    for t, g in enumerate((0.5, -1.0, 0.25), start=1):
        p, state = one(config, p, np.full((1, 1), g), state, t)
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        correct = m / (1 - 0.9**t) / (math.sqrt(v / (1 - 0.95**t)) + 1e-3)
        expected -= 0.01 * (correct + 0.1 * expected)
        np.testing.assert_allclose(p, expected, rtol=1e-14)


def test_decay_is_decoupled_and_spares_vectors():
    config = TrainConfig(**{**PLAIN, "weight_decay": 0.1})
    for optimizer in ("adamw", "sgd", "lion"):
        decayed, _ = one(config.replace(optimizer=optimizer), np.ones((1, 1)), np.zeros((1, 1)))
        np.testing.assert_allclose(decayed, 0.999, rtol=1e-15)
        spared, _ = one(config.replace(optimizer=optimizer), np.ones(1), np.zeros(1))
        np.testing.assert_array_equal(spared, 1.0)


def test_sgd_and_lion_follow_their_formulas():
    sgd = TrainConfig(**PLAIN, optimizer="sgd", betas=(0.5, 0.9))
    p, state = one(sgd, np.zeros(1), np.ones(1), lr=0.1)
    p, state = one(sgd, p, np.full(1, 2.0), state, t=2, lr=0.1)
    np.testing.assert_allclose(p, -0.1 * (1.0 + 2.5), rtol=1e-15)
    lion = TrainConfig(**PLAIN, optimizer="lion", betas=(0.5, 0.75))
    p, state = one(lion, np.zeros(1), np.ones(1), lr=0.1)
    np.testing.assert_allclose(state["moment1"]["p"], 0.25)
    # 0.5 * 0.25 - 0.5 * 0.2 > 0: the moment's sign still wins, then 0.75 * 0.25 - 0.25 * 0.2.
    p, state = one(lion, p, np.full(1, -0.2), state, t=2, lr=0.1)
    np.testing.assert_allclose(p, -0.2, rtol=1e-15)
    np.testing.assert_allclose(state["moment1"]["p"], 0.1375)


def test_clipping_is_exact_and_only_above_the_limit():
    grads = {"a": np.array([3e-3]), "b": np.array([[4e-3]])}
    norm = global_norm(grads)
    assert norm == pytest.approx(5e-3, rel=1e-15)
    clipped = clip(grads, norm, 1e-3)
    assert global_norm(clipped) == pytest.approx(1e-3, rel=1e-15)
    same(clip(grads, norm, norm), grads)
    zeros = {"a": np.zeros(2)}
    same(clip(zeros, global_norm(zeros), 1e-30), zeros)


def test_the_average_starts_as_the_parameters():
    config = TrainConfig(**PLAIN, optimizer="sgd", ema=0.75)
    _, state = one(config, np.ones(1), np.ones(1), lr=0.5)
    np.testing.assert_allclose(state["ema"]["p"], 0.75 * 1.0 + 0.25 * 0.5, rtol=1e-15)


def test_a_step_reports_what_it_did():
    one_trainer = trainer(lr=0.01, schedule="cosine", warmup=2, clip_norm=0.5)
    batch = batch_of()
    loss, grads = loss_and_gradients(one_trainer.model, batch)
    report = one_trainer.step(batch)
    assert report["loss"] == pytest.approx(loss, rel=1e-14) and report["tokens"] == 1 + 2 + 3 + 4
    assert report["grad_norm"] == pytest.approx(global_norm(grads), rel=1e-12)
    assert report["lr"] == learning_rate(one_trainer.config, 1) == 0.005
    assert one_trainer.updates == 1 and one_trainer.step(batch)["lr"] == 0.01


def test_accumulation_equals_the_large_batch():
    for dropout in (0.0, 0.3):
        whole = trainer(CONFIG.replace(dropout=dropout))
        results = []
        for accumulate in (1, 2, 4):
            parts = trainer(CONFIG.replace(dropout=dropout), accumulate=accumulate)
            report = parts.step(batch_of())
            results.append((report, get_params(parts.model)))
        assert [r["tokens"] for r, _ in results] == [10, 10, 10]
        if dropout:  # another mask for each micro-batch: the results must differ
            assert results[0][0]["loss"] != results[1][0]["loss"]
            continue
        for report, params in results:
            assert report["loss"] == pytest.approx(results[0][0]["loss"], rel=1e-13)
            assert report["grad_norm"] == pytest.approx(results[0][0]["grad_norm"], rel=1e-11)
            for name, p in params.items():
                np.testing.assert_allclose(p, results[0][1][name], rtol=0, atol=1e-9)
        assert whole.updates == 0


def test_a_micro_batch_without_targets_adds_nothing():
    batch = batch_of()
    batch["targets"][2:] = -100
    report = trainer(accumulate=2).step(batch)
    assert report["tokens"] == 3 and report["loss"] == pytest.approx(trainer().step(batch)["loss"], rel=1e-13)
    batch["targets"][:] = -100
    nothing = trainer(weight_decay=0.0)
    before = get_params(nothing.model)
    report = nothing.step(batch)
    assert report["loss"] == report["grad_norm"] == report["tokens"] == 0
    same(get_params(nothing.model), before)


def test_dropout_differs_between_updates_and_is_repeated_by_the_seed():
    model = CONFIG.replace(dropout=0.5)
    losses = [[r["loss"] for r in trainer(model, lr=0.0, seed=0).fit([batch_of()] * 3)] for _ in range(2)]
    assert losses[0] == losses[1] and len(set(losses[0])) == 3
    other = Trainer(Transformer(model, dtype="float64"), TrainConfig(steps=3, lr=0.0, precision="float64", seed=1))
    assert other.step(batch_of())["loss"] != losses[0][0]


def test_each_micro_batch_drops_with_the_key_of_its_update_and_number():
    model, batch = CONFIG.replace(dropout=0.5), batch_of()
    learner = Trainer(
        Transformer(model, dtype="float64"), TrainConfig(lr=0.0, precision="float64", accumulate=2, seed=6)
    )
    for t in (1, 2):
        parts = [{name: x[2 * m : 2 * m + 2] for name, x in batch.items()} for m in (0, 1)]
        keys = [fold_in(fold_in(key(6), t), m) for m in (0, 1)]
        losses = [
            loss_and_gradients(learner.model, part, dropout_key=k)[0] for part, k in zip(parts, keys, strict=True)
        ]
        expected = (3 * losses[0] + 7 * losses[1]) / 10
        assert learner.step(batch)["loss"] == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lion"])
def test_a_reloaded_trainer_goes_on_as_if_it_had_not_stopped(tmp_path, optimizer):
    fields = {"optimizer": optimizer, "ema": 0.9, "schedule": "cosine", "steps": 6, "lr": 0.01, "accumulate": 2}
    model = CONFIG.replace(dropout=0.2)
    batches = [batch_of(seed=n) for n in range(6)]
    straight = trainer(model, **fields)
    reports = straight.fit(batches)
    stopped = trainer(model, **fields)
    stopped.fit(batches[:3])
    stopped.save(tmp_path)
    resumed = Trainer.load(tmp_path)
    assert resumed.updates == 3 and resumed.config == stopped.config and resumed.model.config == model
    assert resumed.fit(batches[3:]) == reports[3:]
    same(get_params(resumed.model), get_params(straight.model))
    for slot, arrays in straight.state.items():
        same(resumed.state[slot], arrays)


def test_a_step_that_is_not_finite_stops_or_is_left_out():
    for what in ("stop", "skip"):
        broken = trainer(nonfinite=what)
        broken.step(batch_of())
        params = get_params(broken.model)
        params["blocks.1.ffn.up.weight"][0, 0] = np.nan
        set_params(broken.model, params)
        state = {slot: dict(arrays) for slot, arrays in broken.state.items()}
        if what == "stop":
            with pytest.raises(FloatingPointError, match=r"at update 2 in embedding\.weight, positions\.weight"):
                broken.step(batch_of())
        else:
            assert not math.isfinite(broken.step(batch_of())["grad_norm"])
        assert broken.updates == 1
        same(get_params(broken.model), params)
        for slot, arrays in state.items():
            same(broken.state[slot], arrays)


@pytest.mark.parametrize(("precision", "dtype"), [("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16)])
def test_a_pass_reads_the_rounded_parameters_and_updates_the_kept_ones(precision, dtype):
    low = trainer(precision=precision, optimizer="sgd", clip_norm=None, weight_decay=0.0, lr=1e-6, betas=(0.0, 0.9))
    before = get_params(low.model)
    rounded = Transformer(CONFIG, dtype="float64")
    set_params(rounded, {name: p.astype(dtype).astype(np.float64) for name, p in before.items()})
    loss, grads = loss_and_gradients(rounded, batch_of())
    assert low.step(batch_of())["loss"] == pytest.approx(loss, rel=1e-13)
    for name, p in get_params(low.model).items():
        assert p.dtype == np.float32
        wanted = (before[name].astype(np.float64) - 1e-6 * grads[name]).astype(np.float32)
        np.testing.assert_allclose(p, wanted, rtol=1.2e-7, atol=1e-12)


def test_recomputing_blocks_changes_no_bit():
    model = CONFIG.replace(dropout=0.2, positions="relative")
    one_trainer, again = trainer(model), trainer(model, remat=True)
    assert one_trainer.fit([batch_of()] * 2) == again.fit([batch_of()] * 2)
    same(get_params(one_trainer.model), get_params(again.model))


def test_weights_are_kept_for_the_gradients_or_made_again_and_these_are_the_same(monkeypatch):
    config = ModelConfig(vocab=7, width=8, heads=4, kv_heads=2, layers=2, max_length=9, dropout=0.3, positions="alibi")
    model, rng = Transformer(config, seed=3), np.random.default_rng(1)
    batch = {
        "tokens": rng.integers(0, 7, (3, 9)),
        "targets": rng.integers(0, 7, (3, 9)),
        "lengths": np.array([9, 4, 7]),
    }
    home, kept = sys.modules["core_numpy.attention"], []
    keeps = home._keeps
    monkeypatch.setattr(home, "_keeps", lambda pairs: kept.append(keeps(pairs)) or kept[-1])
    passes = []
    # Parts of one head and blocks of two queries: what was kept is found again in the order in which it was made.
    for most, cells, rows in ((1 << 22, 1 << 16, 64), (3 * 4 * 81, 1, 2), (3 * 4 * 81 - 1, 1, 2)):
        monkeypatch.setattr(home, "KEPT", most)
        monkeypatch.setattr(pairs, "CELLS", cells)
        monkeypatch.setattr(pairs, "ROWS", rows)
        passes.append(loss_and_gradients(model, batch, dropout_key=key(5)))
    assert kept == [True] * 4 + [False] * 2
    loss, grads = passes[0]
    for other, found in passes[1:]:
        assert other == pytest.approx(loss, rel=1e-14)
        for name, g in grads.items():
            np.testing.assert_allclose(found[name], g, rtol=1e-6, atol=1e-8, err_msg=name)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has its own rules")
def test_a_pass_finds_the_memory_of_the_one_before():
    code = """
import resource, numpy as np, core_numpy as C
model = C.Transformer(C.ModelConfig(vocab=32, width=64, heads=4, layers=2, max_length=64))
x = np.zeros((16, 64), int)
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    C.loss_and_gradients(model, {"tokens": x, "targets": x})
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    first, *_, last = map(int, run.stdout.split())
    # Some 9000 pages of 4 KiB in each pass, were they given back.
    assert last < first / 10


def test_evaluation_weighs_tokens_and_has_no_dropout_smoothing_or_z_loss():
    model = CONFIG.replace(dropout=0.5)
    one_trainer = trainer(model, label_smoothing=0.1, z_loss=0.1)
    batches = [batch_of(rows=2), batch_of(rows=5, seed=1)]
    counts = [3, 15]
    losses = [loss_and_gradients(one_trainer.model, batch)[0] for batch in batches]
    result = one_trainer.evaluate(batches)
    assert result["tokens"] == sum(counts)
    expected = sum(n * loss for n, loss in zip(counts, losses, strict=True)) / sum(counts)
    assert result["loss"] == pytest.approx(expected, rel=1e-14)


def test_fit_ends_at_the_last_update_or_where_the_batches_do():
    one_trainer = trainer(steps=3)
    assert len(one_trainer.fit([batch_of()] * 2)) == 2
    assert len(one_trainer.fit([batch_of()] * 9)) == 1
    assert one_trainer.fit([batch_of()]) == [] and one_trainer.updates == 3
    assert len(one_trainer.fit([batch_of()] * 9, steps=2)) == 2 and one_trainer.updates == 5


def test_fit_takes_no_batch_that_it_does_not_use():
    left = iter([batch_of()] * 3)
    trainer(steps=2).fit(left)
    assert len(list(left)) == 1


def test_training_learns_to_repeat():
    rng = np.random.default_rng(0)
    model = ModelConfig(vocab=7, width=16, heads=2, layers=1, max_length=8, positions="rotary")
    learner = Trainer(Transformer(model), TrainConfig(steps=60, lr=0.02, batch=8))

    def stream():
        while True:
            tokens = rng.integers(0, 7, (8, 6))
            yield {
                "tokens": tokens,
                "targets": np.roll(tokens, 1, axis=1) * (np.arange(6) > 0) - 100 * (np.arange(6) == 0),
            }

    reports = learner.fit(stream())
    assert len(reports) == 60
    assert abs(reports[0]["loss"] - math.log(7)) < 0.1 and reports[-1]["loss"] < 0.3


def test_packed_batches_with_positions_are_taken():
    batch = {**batch_of(), "segments": np.zeros((4, 5), np.int32), "positions": np.tile(np.arange(5), (4, 1))}
    plain, packed = trainer(), trainer(accumulate=2)
    assert packed.step(batch)["loss"] == pytest.approx(plain.step(batch_of())["loss"], rel=1e-13)


GOOD = batch_of()


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: trainer().step(GOOD["tokens"]), TypeError, "batch must be a dict"),
        (lambda: trainer().step({"tokens": GOOD["tokens"]}), ValueError, "batch must hold 'targets'"),
        (lambda: trainer().step({**GOOD, "mask": GOOD["tokens"]}), ValueError, "nothing else; got mask"),
        (lambda: trainer().step({**GOOD, "targets": GOOD["targets"][:, :4]}), ValueError, "targets must have shape"),
        (lambda: trainer().step({**GOOD, "targets": GOOD["targets"] + 11}), ValueError, "targets must be from 0 to 10"),
        (lambda: trainer().step({**GOOD, "tokens": GOOD["tokens"] + 11}), ValueError, "tokens must be from 0 to 10"),
        (lambda: trainer(batch=3, accumulate=3).step(GOOD), ValueError, r"multiple of accumulate \(3\) rows; got 4"),
        (lambda: trainer().fit(GOOD), TypeError, "batches must be an iterable of batches"),
        (lambda: Trainer(Transformer(CONFIG), TrainConfig(precision="float64")), TypeError, "dtype float64"),
        (
            lambda: Trainer(Transformer(CONFIG, dtype="bfloat16"), TrainConfig()),
            TypeError,
            "model must have dtype float32",
        ),
        (lambda: trainer(CONFIG.replace(head="none")), ValueError, "model must have head='lm' or 'classifier'"),
        (lambda: trainer(compile=True), ValueError, "compile must be 'auto' or False"),
        (lambda: trainer(parallel={"data": 2}), ValueError, "parallel must be None"),
    ],
)
def test_wrong_batches_and_configurations_are_refused_by_name(call, error, words):
    with pytest.raises(error, match=words):
        call()
