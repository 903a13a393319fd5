"""What training refuses: every field of TrainConfig out of its range, and batches and folders that do not fit."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from three import PACKAGES, load

from core_numpy import ModelConfig, TrainConfig
from core_numpy.contract.data import split

# For each field: values that are refused, and what the sentence says after the field's name.
FIELDS = {
    "optimizer": (["adam", None, 3, np.array([1, 2])], "one of"),
    "steps": ([-1, 1.5, True, "9", np.bool_(True), np.float64(3)], "an integer"),
    "batch": ([0, -1, 2.0], "an integer"),
    "lr": ([-1e-3, float("nan"), float("inf"), "1", None, 2**1024, 1e39], "(number|float32)"),
    "betas": ([(0.9,), (0.9, 1.0), (-0.1, 0.9), [0.9, 0.9], 0.9], "two numbers"),
    "eps": ([0.0, -1e-8, float("nan"), 1e-39, 1e39], "(number|float32)"),
    "weight_decay": ([-0.1, float("inf"), 1e39], "(number|float32)"),
    "clip_norm": ([0.0, -1.0, float("nan")], "number"),
    "schedule": (["step", None], "one of"),
    "warmup": ([-1, 11, 0.5], ""),
    "final_lr": ([-1.0, float("nan")], "number"),
    "accumulate": ([0, 3, 1.0], ""),
    "precision": (["fp16", "int8", None], "one of"),
    "matmul_precision": (["high", None], "one of"),
    "remat": ([1, "yes", None], ""),
    "compile": (["yes", 1, None, np.array([1, 2])], ""),
    "seed": ([-1, 0.5, 2**64], "an integer"),
    "label_smoothing": ([-0.1, 1.0, float("nan")], "number"),
    "z_loss": ([-1.0], "number"),
    "ema": ([0.0, 1.0, -0.5], "number"),
    "parallel": ([{"rows": 2}, {"data": 0}, {"data": 1.0}, 2], "axis sizes"),
    "decay_steps": ([-1, 11], ""),
    "nonfinite": (["ignore", None], "one of"),
}


@pytest.mark.parametrize(
    ("field", "value"), [(name, x) for name, (values, _) in FIELDS.items() for x in values], ids=lambda x: str(x)[:16]
)
def test_a_field_out_of_its_range_is_refused_by_its_name(field, value):
    with pytest.raises((ValueError, TypeError), match=rf"TrainConfig\.{field} must be .*{FIELDS[field][1]}"):
        TrainConfig(**{"steps": 10, "batch": 4, field: value})


def test_the_table_names_every_field_and_a_name_that_is_none_is_refused():
    assert set(FIELDS) == {field.name for field in dataclasses.fields(TrainConfig)}
    with pytest.raises((ValueError, TypeError), match="learning_rate"):
        TrainConfig.from_dict({"learning_rate": 1.0})
    assert TrainConfig.from_dict(TrainConfig(ema=0.5).to_dict()) == TrainConfig(ema=0.5)


def test_numpys_scalars_are_pythons():
    config = TrainConfig(
        steps=np.int64(9), lr=np.float32(0.5), betas=(np.float16(0.5), 0.5), remat=np.bool_(True), ema=np.float64(0.25),
        parallel={"data": np.uint8(2)}, optimizer=np.str_("lion"),
    )  # fmt: skip
    plain = TrainConfig(steps=9, lr=0.5, betas=(0.5, 0.5), remat=True, ema=0.25, parallel={"data": 2}, optimizer="lion")
    assert config == plain and repr(config) == repr(plain)
    assert json.dumps(config.to_dict()) == json.dumps(plain.to_dict())
    model = ModelConfig(vocab=np.int32(7), width=6, heads=2, layers=1, max_length=4, layer_windows=((np.int8(2), 0),))
    assert (type(model.vocab), type(model.layer_windows[0][0])) == (int, int)


def test_float64_takes_what_float32_does_not_hold():
    assert TrainConfig(precision="float64", eps=1e-300, lr=1e300).eps == 1e-300


MODEL = ModelConfig(vocab=7, width=6, heads=2, hidden=5, layers=1, max_length=4)
GOOD = {
    "tokens": np.array([[1, 2, 3], [4, 5, 6], [0, 1, 2]]),
    "targets": np.array([[2, 3, 1], [5, 6, -100], [0, 0, 0]]),
}
BATCHES = {
    "not divisible by accumulate": ({}, {"batch": 4, "accumulate": 2}, ValueError, "multiple of accumulate"),
    "a target past the vocabulary": ({"targets": GOOD["targets"] + 1}, {}, ValueError, "targets must be from 0 to 6"),
    "a negative target": ({"targets": np.full((3, 3), -1)}, {}, ValueError, "targets must be from 0 to 6"),
    "targets of floats": ({"targets": GOOD["targets"] * 1.0}, {}, TypeError, "targets must"),
    "a token past the vocabulary": ({"tokens": GOOD["tokens"] + 1}, {}, ValueError, "tokens must be from 0 to 6"),
    "longer than the positions": (
        {"tokens": np.zeros((3, 5), int), "targets": np.zeros((3, 5), int)}, {}, ValueError, "max_length|positions"),
    "lengths past the end": ({"lengths": np.array([1, 2, 4])}, {}, ValueError, "lengths"),
    "tokens of a list": ({"tokens": GOOD["tokens"].tolist()}, {}, TypeError, "tokens must be an array; got list"),
    "lengths of a tuple": ({"lengths": (1, 2, 3)}, {}, TypeError, "kv_lengths must be an array; got tuple"),
    "no targets": ({"targets": None}, {}, ValueError, "batch must hold 'targets'"),
}  # fmt: skip


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_that_does_not_fit_is_refused_and_changes_nothing(name, package):
    changes, fields, error, words = BATCHES[name]
    B = load(package)
    trainer = B.Trainer(B.Transformer(MODEL), B.TrainConfig(**fields))
    before = B.get_params(trainer.model)
    batch = {field: x for field, x in {**GOOD, **changes}.items() if x is not None}
    with pytest.raises(error, match=words):
        trainer.step(batch)
    assert trainer.updates == trainer.batches == 0
    for parameter, x in B.get_params(trainer.model).items():
        np.testing.assert_array_equal(x, before[parameter])


def test_a_text_too_short_for_the_split_is_refused_with_its_size():
    with pytest.raises(ValueError, match=r"its validation part has 4 of 40 tokens and a window takes 9"):
        split(np.zeros(40, np.uint8), length=8)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_checkpoint_of_another_configuration_is_refused_with_the_fields_that_differ(package, tmp_path):
    B = load(package)
    train = B.TrainConfig(lr=0.5, seed=2)
    B.Trainer(B.Transformer(MODEL), train).save(tmp_path)
    other = train.replace(lr=0.25, batch=4, ema=0.9)
    with pytest.raises(ValueError) as refused:
        B.Trainer.load(tmp_path, train_config=other)
    words = (
        "is of another training: batch is 16 there and 4 here, lr is 0.5 there and 0.25 here, ema is None there and 0.9"
    )
    assert words in str(refused.value) and "seed" not in str(refused.value)
    with pytest.raises(ValueError, match=r"is of another model: vocab is 7 there and 8 here$"):
        B.Trainer.load(tmp_path, model_config=MODEL.replace(vocab=8))
    with pytest.raises(TypeError, match="train_config must be a TrainConfig or None; got ModelConfig"):
        B.Trainer.load(tmp_path, train_config=MODEL)
    assert B.Trainer.load(tmp_path, train_config=train, model_config=MODEL).config == train


@pytest.mark.parametrize("package", PACKAGES)
def test_a_layout_over_devices_is_no_other_training(package, tmp_path):
    """A checkpoint has none, so a configuration that asks for one goes with every checkpoint."""
    B = load(package)
    train = B.TrainConfig(lr=0.5)
    B.Trainer(B.Transformer(MODEL), train).save(tmp_path)
    assert B.Trainer.load(tmp_path, train_config=train.replace(parallel={"data": 2})).config == train


@pytest.mark.parametrize("package", PACKAGES)
def test_a_checkpoint_of_other_shapes_is_no_checkpoint_of_the_model(package, tmp_path):
    """A shape, a name or a dtype that is not the model's own: a silent restore of (4, 10) into (4, 20) [flax 2436]."""
    from core_numpy.contract.checkpoints import read_checkpoint, write_checkpoint

    B = load(package)
    trainer = B.Trainer(B.Transformer(MODEL), B.TrainConfig())
    path = trainer.save(tmp_path / "good")
    found = read_checkpoint(path)
    name = "blocks.0.ffn.up.weight"
    faults = {
        "shape": {**found.params, name: np.zeros((6, 10), np.float32)},
        "dtype": {**found.params, name: found.params[name].astype(np.float64)},
        "missing": {other: x for other, x in found.params.items() if other != name},
        "more": {**found.params, "blocks.1.ffn.up.weight": found.params[name]},
    }
    for fault, params in faults.items():
        write_checkpoint(tmp_path / fault, step=1, params=params, state=found.state, config=found.config,
                         train_config=found.train_config)  # fmt: skip
        with pytest.raises((ValueError, TypeError), match=r"blocks\..*ffn\.up\.weight"):
            B.Trainer.load(tmp_path / fault)
    state = {**found.state, "moment2": {**found.state["moment2"], name: np.zeros((6, 10), np.float32)}}
    write_checkpoint(tmp_path / "moment", step=1, params=found.params, state=state, config=found.config,
                     train_config=found.train_config)  # fmt: skip
    with pytest.raises((ValueError, TypeError), match=r"ffn\.up\.weight"):
        B.Trainer.load(tmp_path / "moment")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        B.Trainer.load(tmp_path / "nowhere")
