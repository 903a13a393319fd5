"""The torch trainer against the reference's, and what is native about it."""

from __future__ import annotations

import logging

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import backend_torch as B  # noqa: E402
import core_numpy as C  # noqa: E402
from backend_torch.arrays import from_numpy  # noqa: E402
from backend_torch.initial import turn  # noqa: E402
from backend_torch.optimizer import Flat, clip, global_norm, initial_state, update  # noqa: E402

CONFIG = {"vocab": 13, "width": 12, "heads": 4, "kv_heads": 2, "hidden": 10, "layers": 2, "max_length": 9}


def batches(count, rows=4, T=6, vocab=13):
    """Batches whose targets are ragged: rows end at different places, some targets are not counted."""
    made = []
    for i in range(count):
        rng = np.random.default_rng(i)
        lengths = rng.integers(1, T + 1, rows)
        targets = rng.integers(0, vocab, (rows, T))
        targets[np.arange(T) >= lengths[:, None]] = -100
        made.append({"tokens": rng.integers(0, vocab, (rows, T)), "targets": targets, "lengths": lengths})
    return made


def trainers(more=None, **train):
    config = C.ModelConfig(**{**CONFIG, **(more or {})})
    train = {"precision": "float64", "lr": 1e-2, "steps": 20, "batch": 4, **train}
    return tuple(P.Trainer(P.Transformer(config, seed=3, dtype="float64"), P.TrainConfig(**train)) for P in (C, B))


def compare(reference, trainer, tolerance=1e-9):
    want = C.get_params(reference.model)
    for name, got in B.get_params(trainer.model).items():
        np.testing.assert_allclose(got, want[name], rtol=tolerance, atol=tolerance, err_msg=name)


RUNS = {
    "adamw": ({}, {}),
    "adamw without decay": ({}, {"weight_decay": 0.0, "betas": (0.8, 0.99), "eps": 1e-3}),
    "sgd": ({}, {"optimizer": "sgd"}),
    # Without biases: the gradient of a key bias is 0 but for rounding, and lion takes its sign.
    "lion": ({"attention_bias": False}, {"optimizer": "lion", "lr": 1e-3}),
    "clipping": ({}, {"clip_norm": 0.05, "optimizer": "sgd", "lr": 1.0}),
    "never clipping": ({}, {"clip_norm": None}),
    "dropout": ({"dropout": 0.3}, {"seed": 9}),
    "dropout, accumulation, average": (
        {"dropout": 0.3},
        {"accumulate": 2, "ema": 0.9, "schedule": "cosine", "warmup": 3},
    ),
    "smoothing and z-loss": ({}, {"label_smoothing": 0.1, "z_loss": 0.01, "schedule": "wsd"}),
    "rematerialised": ({"dropout": 0.3}, {"remat": True, "accumulate": 4}),
    "gated, tied": ({"activation": "swiglu", "norm": "rms", "tie_embeddings": True, "positions": "relative"}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", list(RUNS))
def test_twenty_steps_are_the_reference(name):
    reference, trainer = trainers(*RUNS[name][:1], **RUNS[name][1])
    for batch in batches(20):
        want, got = reference.step(batch), trainer.step(batch)
        assert got["tokens"] == want["tokens"] and got["lr"] == want["lr"]
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-9)
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-9)
    compare(reference, trainer)
    for slot, buffer in trainer.state.items():
        for parameter, view in trainer.flat.views(buffer).items():
            stored = reference.state[slot][parameter]
            got = turn(trainer.model, parameter, view).numpy()
            np.testing.assert_allclose(got, stored, rtol=1e-8, atol=1e-10, err_msg=parameter)


def test_accumulation_is_the_large_batch_with_ragged_targets():
    (batch,) = batches(1)
    parameters = []
    for accumulate in (1, 2, 4):
        _, trainer = trainers(accumulate=accumulate)
        report = trainer.step(batch)
        parameters.append(B.get_params(trainer.model))
        assert report["tokens"] == int((batch["targets"] != -100).sum())
    for name, whole in parameters[0].items():
        for other in parameters[1:]:
            np.testing.assert_allclose(other[name], whole, rtol=1e-10, atol=1e-12)


def test_no_counted_target_gives_loss_zero_and_gradient_zero():
    _, trainer = trainers(weight_decay=0.0)
    (batch,) = batches(1)
    batch["targets"] = np.full_like(batch["targets"], -100)
    before = B.get_params(trainer.model)
    report = trainer.step(batch)
    assert (report["loss"], report["grad_norm"], report["tokens"]) == (0.0, 0.0, 0)
    assert all(np.array_equal(before[name], p) for name, p in B.get_params(trainer.model).items())


def one_update(p, g, t=1, lr=0.1, **train):
    """One parameter (1, n) through the optimiser, in float64."""
    config = C.TrainConfig(**train)
    weight = torch.nn.Parameter(torch.tensor([p], dtype=torch.float64))
    flat = Flat.of({"w": weight})
    state, grads = initial_state(config, flat), flat.like()
    flat.views(grads)["w"].copy_(torch.tensor([g], dtype=torch.float64))
    update(config, flat, grads, state, t=t, lr=lr)
    return weight[0].tolist()


def test_adams_eps_is_added_after_the_correction():
    # Gradient and eps 1e-8, step 1: m / (1 - b1) = 1e-8, sqrt(v / (1 - b2)) = 1e-8, so half a step.
    assert one_update([1.0], [1e-8], weight_decay=0.0) == pytest.approx([1.0 - 0.1 * 0.5], rel=1e-12)


def test_decay_is_decoupled_and_spares_biases():
    assert one_update([1.0], [0.0], lr=0.01, weight_decay=0.1) == pytest.approx([0.999], rel=1e-15)
    bias = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    flat = Flat.of({"b": bias, "w": torch.nn.Parameter(torch.ones(2, 3, dtype=torch.float64))})
    config = C.TrainConfig(weight_decay=0.1)
    update(config, flat, flat.like(), initial_state(config, flat), t=1, lr=0.01)
    assert bias.tolist() == [1.0] * 3


def test_clipping_is_exact():
    grads = torch.tensor([3e-3, 4e-3], dtype=torch.float64)
    norm = global_norm(grads).item()
    assert norm == pytest.approx(5e-3, rel=1e-15)
    assert clip(grads.clone(), norm, norm).tolist() == grads.tolist()  # at the threshold nothing happens
    clipped = clip(grads.clone(), norm, 1e-3)
    assert clipped.norm().item() == pytest.approx(1e-3, rel=1e-14)  # torch's own gives 0.99980 of it


def test_parameters_are_views_of_one_buffer_and_keep_their_values():
    model = B.Transformer(C.ModelConfig(**CONFIG), seed=1)
    before = B.get_params(model)
    trainer = B.Trainer(model, C.TrainConfig())
    assert all(np.array_equal(before[name], p) for name, p in B.get_params(model).items())
    storage = trainer.flat.data.untyped_storage().data_ptr()
    assert all(p.untyped_storage().data_ptr() == storage and p.data_ptr() % 64 == 0 for p in model.parameters())


def test_gradients_that_are_not_finite_stop_with_the_step_and_the_names():
    _, trainer = trainers()
    first, second = batches(2)
    trainer.step(first)
    with torch.no_grad():
        trainer.model.get_parameter("blocks.1.ffn.down.bias")[0] = torch.inf
    before = B.get_params(trainer.model)
    with pytest.raises(FloatingPointError, match=r"update 2 in .*embedding.weight"):
        trainer.step(second)
    assert all(np.array_equal(before[name], p, equal_nan=True) for name, p in B.get_params(trainer.model).items())


def test_gradients_that_are_not_finite_are_skipped_on_request(caplog):
    _, trainer = trainers(nonfinite="skip", ema=0.9)
    first, second = batches(2)
    bias = trainer.model.get_parameter("blocks.1.ffn.down.bias")
    with torch.no_grad():
        kept = bias[0].item()
        bias[0] = torch.inf
    with caplog.at_level(logging.WARNING):
        report = trainer.step(first)
    assert not np.isfinite(report["grad_norm"]) and trainer.updates == 0 and "update 1 left out" in caplog.text
    assert all(slot == "ema" or not buffer.any() for slot, buffer in trainer.state.items())
    with torch.no_grad():
        bias[0] = kept
    reference, _ = trainers(nonfinite="skip", ema=0.9)
    reference.step(second)
    trainer.step(second)
    compare(reference, trainer)


def test_finite_gradients_with_an_infinite_float32_norm_are_clipped_not_refused():
    model = B.Transformer(C.ModelConfig(**CONFIG))
    trainer = B.Trainer(model, C.TrainConfig(clip_norm=1.0))
    (batch,) = batches(1)
    true = trainer._gradients

    def huge(*arguments):
        loss = true(*arguments)
        trainer.grads.mul_(1e22)
        return loss

    trainer._gradients = huge
    report = trainer.step(batch)
    assert np.isfinite(report["grad_norm"]) and report["grad_norm"] > 1e20 and trainer.updates == 1


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_keeps_float32_parameters_and_follows_float32(precision):
    losses = {}
    for kind in ("float32", precision):
        model = B.Transformer(C.ModelConfig(**CONFIG), seed=3)
        trainer = B.Trainer(model, C.TrainConfig(precision=kind, lr=1e-2, batch=4))
        losses[kind] = [report["loss"] for report in trainer.fit(batches(1) * 12, 12, progress=False)]
        assert model.dtype == "float32" and trainer.updates == 12
        assert all(p.dtype == torch.float32 for p in model.parameters())
    assert losses[precision] != losses["float32"]
    np.testing.assert_allclose(losses[precision], losses["float32"], rtol=3e-2)


def test_a_float16_overflow_is_skipped_said_and_halves_the_scale(caplog):
    trainer = B.Trainer(B.Transformer(C.ModelConfig(**CONFIG)), C.TrainConfig(precision="float16"))
    trainer.loss_scale = 2.0**40
    (batch,) = batches(1)
    before = B.get_params(trainer.model)
    with caplog.at_level(logging.WARNING):
        trainer.step(batch)
    assert trainer.loss_scale == 2.0**39 and trainer.updates == 0 and "the loss scale is" in caplog.text
    assert all(np.array_equal(before[name], p) for name, p in B.get_params(trainer.model).items())
    trainer.loss_scale = 2.0**10
    assert trainer.step(batch)["grad_norm"] < 100 and trainer.updates == 1  # unscaled


def test_stopping_and_going_on_is_bit_for_bit_the_unbroken_run(tmp_path):
    data = batches(6)
    _, straight = trainers({"dropout": 0.3}, ema=0.9, accumulate=2)
    straight.fit(data, progress=False)
    _, first = trainers({"dropout": 0.3}, ema=0.9, accumulate=2)
    first.fit(data[:3], progress=False)
    first.save(tmp_path)
    second = B.Trainer.load(tmp_path)
    assert second.updates == 3 and second.config == first.config
    second.fit(data[3:], progress=False)
    assert torch.equal(second.flat.data, straight.flat.data)
    assert all(torch.equal(second.state[slot], buffer) for slot, buffer in straight.state.items())


def test_a_checkpoint_goes_to_the_reference_and_back(tmp_path):
    data = batches(6)
    reference, trainer = trainers({"dropout": 0.3, "heads": 3, "kv_heads": 3}, ema=0.9)
    for batch in data[:2]:
        reference.step(batch), trainer.step(batch)
    trainer.save(tmp_path / "torch")
    moved = C.Trainer.load(tmp_path / "torch")
    for batch in data[2:4]:
        reference.step(batch), moved.step(batch)
    moved.save(tmp_path / "numpy")
    back = B.Trainer.load(tmp_path / "numpy")
    for batch in data[4:]:
        reference.step(batch), back.step(batch)
    compare(reference, back)
    for name, view in back.flat.views(back.state["ema"]).items():
        stored = reference.state["ema"][name]
        np.testing.assert_allclose(turn(back.model, name, view).numpy(), stored, rtol=1e-9, atol=1e-10)


def test_evaluation_counts_tokens_across_batches_without_dropout_and_smoothing():
    reference, trainer = trainers({"dropout": 0.5}, label_smoothing=0.2, z_loss=0.1)
    data = batches(3)
    want, got = reference.evaluate(data), trainer.evaluate(data)
    assert got["tokens"] == want["tokens"]
    assert got["loss"] == pytest.approx(want["loss"], rel=1e-12)
    assert trainer.model.training


def test_fit_ends_where_the_batches_or_the_steps_end():
    _, trainer = trainers(steps=5)
    assert len(trainer.fit(batches(3), progress=False)) == 3
    assert len(trainer.fit(batches(9), progress=False)) == 2
    assert trainer.fit(batches(9), progress=False) == []
    assert len(trainer.fit(batches(9), 4, progress=False)) == 4


def test_batches_may_be_tensors_and_targets_are_checked_on_the_host():
    _, trainer = trainers()
    _, other = trainers()
    (batch,) = batches(1)
    assert trainer.step({k: from_numpy(v) for k, v in batch.items()}) == other.step(batch)
    for field, value in (("targets", 13), ("tokens", -1)):
        wrong = {k: v.copy() for k, v in batch.items()}
        wrong[field][0, 0] = value
        with pytest.raises(ValueError, match=f"{field} must be from 0 to 12"):
            trainer.step(wrong)
    assert trainer.updates == 1


def test_a_trainer_refuses_what_it_does_not_do():
    model = B.Transformer(C.ModelConfig(**CONFIG))
    with pytest.raises(ValueError, match=r"config\.parallel needs the processes that torchrun starts"):
        B.Trainer(model, C.TrainConfig(parallel={"data": 2}))
    with pytest.raises(TypeError, match="model must have dtype float64"):
        B.Trainer(model, C.TrainConfig(precision="float64"))
    with pytest.raises(ValueError, match="multiple of accumulate"):
        B.Trainer(model, C.TrainConfig(batch=3, accumulate=3)).step(batches(1)[0])


def test_matmul_precision_is_set_for_the_step_and_given_back(monkeypatch):
    trainer = B.Trainer(B.Transformer(C.ModelConfig(**CONFIG)), C.TrainConfig())
    seen = []
    true = trainer._gradients
    monkeypatch.setattr(
        trainer, "_gradients", lambda *a: (seen.append(torch.get_float32_matmul_precision()), true(*a))[1]
    )
    torch.set_float32_matmul_precision("high")
    try:
        trainer.step(batches(1)[0])
        assert seen == ["highest"] and torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_auto_runs_eager_on_a_cpu_and_says_so(caplog):
    with caplog.at_level(logging.INFO):
        trainer = B.Trainer(B.Transformer(C.ModelConfig(**CONFIG)), C.TrainConfig())
    assert not trainer.compiled and "compile='auto' on cpu: eager" in caplog.text


@pytest.mark.slow
# torch's own compiler still uses its old one while it is imported.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_compiled_steps_are_the_eager_steps():
    reference, _ = trainers()
    config = B.TrainConfig(**{**reference.config.to_dict(), "betas": reference.config.betas, "compile": True})
    trainer = B.Trainer(B.Transformer(reference.model.config, seed=3, dtype="float64"), config)
    assert trainer.compiled
    for batch in batches(3):
        want, got = reference.step(batch), trainer.step(batch)
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-9)
    compare(reference, trainer)


class Operations(torch.utils._python_dispatch.TorchDispatchMode):
    """What is asked of the device, by name."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name().split(".")[0])
        return func(*args, **(kwargs or {}))


# Those whose result, or its size, the host has to wait for.
READS = {f"aten::{name}" for name in ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select")}


@pytest.mark.parametrize("more", [{}, {"accumulate": 2, "optimizer": "lion", "ema": 0.9, "remat": True}])
def test_a_step_is_read_by_the_host_once_and_updates_all_parameters_at_once(more, monkeypatch):
    model = B.Transformer(C.ModelConfig(**CONFIG, dropout=0.3), seed=3)
    trainer = B.Trainer(model, C.TrainConfig(steps=9, batch=4, compile=False, **more))
    trainer.step(batches(1)[0])
    lists, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: lists.append(x.numel()) or tolist(x))
    with Operations() as seen:
        trainer.step(batches(2)[1])
    assert not READS & set(seen.names)
    assert lists == [2]  # the loss and the norm, together
    parameters = len(list(trainer.model.parameters()))
    updates = [name for name in seen.names if name in ("aten::add_", "aten::mul_", "aten::sign_", "aten::copy_")]
    assert parameters > 30 and 0 < len(updates) < 10
    assert seen.names.count("aten::_fused_adamw_") == (0 if more else 1)
