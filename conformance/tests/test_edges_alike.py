"""Edges that each framework has its own words for: devices, numbers beyond float32, NaN, a package that is missing."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from three import PACKAGES, load, to

from core_numpy import BlockConfig, ModelConfig, TrainConfig

EVERY = pytest.mark.parametrize("package", PACKAGES)
MODEL = ModelConfig(vocab=5, width=4, heads=2, layers=0, max_length=6, positions="none")
TOKENS = np.arange(12).reshape(2, 6) % 5
BATCH = {"tokens": TOKENS, "targets": (TOKENS + 1) % 5}


@EVERY
@pytest.mark.parametrize("name", ["quantum", "cpu:x", "cpu:-1", "cuda:99", "xpu:99", ""])
def test_a_device_that_is_not_there_is_a_value_error_that_names_the_argument(package, name):
    B = load(package)
    for make in (
        lambda: B.Transformer(MODEL, device=name),
        lambda: B.Block(BlockConfig(width=4, heads=2), device=name),
        lambda: B.KVCache(MODEL.replace(layers=1), 1, device=name),
    ):
        with pytest.raises(ValueError, match=rf"device must be .*'cpu'.*; got '{name}'"):
            make()
    with pytest.raises(TypeError, match=r"device must be None.*; got 1\.5"):
        B.Transformer(MODEL, device=1.5)


@EVERY
def test_a_device_by_its_name_is_where_things_are(package):
    B = load(package)
    for name in ("cpu", None):
        logits = B.Transformer(MODEL, device=name)(to(package, TOKENS))
        assert "cpu" in str(getattr(logits, "device", "cpu")).lower() and logits.shape == (2, 6, 5)
    if package != "core_numpy":
        arrays = sys.modules[f"{package}.arrays"]
        assert np.array_equal(arrays.to_numpy(arrays.from_numpy(TOKENS, device="cpu")), TOKENS)


def huge(package: str, clip_norm: float | None) -> tuple[dict, np.ndarray]:
    """A step whose gradients are finite in float32 and whose norm is not; sgd, so that an update is the gradient."""
    B = load(package)
    # Only the head's bias says anything, and says it surely: its gradient is the scale at two ids, plus and minus.
    config = MODEL.replace(head_bias=True, logit_scale=3e38)
    model = B.Transformer(config, seed=3)
    params = {name: np.zeros_like(p) for name, p in B.get_params(model).items()}
    params["head.bias"][2] = 100 / 3e38
    B.set_params(model, params)
    train = {"optimizer": "sgd", "betas": (0.0, 0.9), "lr": 1.0, "weight_decay": 0.0, "clip_norm": clip_norm}
    trainer = B.Trainer(model, TrainConfig(batch=2, compile="auto", **train))
    report = trainer.step({"tokens": TOKENS, "targets": np.ones_like(TOKENS)})
    assert trainer.updates == 1
    return report, B.get_params(model)["head.bias"]


@EVERY
def test_finite_gradients_are_clipped_by_a_norm_that_float32_does_not_hold(package):
    norm = 3e38 * 2**0.5
    assert norm > float(np.finfo(np.float32).max)
    report, bias = huge(package, 1.0)
    assert report["grad_norm"] == pytest.approx(norm, rel=1e-5)
    np.testing.assert_allclose(bias, [0, 0.5**0.5, -(0.5**0.5), 0, 0], rtol=1e-5, atol=1e-4)
    report, bias = huge(package, None)
    assert report["grad_norm"] == pytest.approx(norm, rel=1e-5)
    np.testing.assert_allclose(bias, [0, 3e38, -3e38, 0, 0], rtol=1e-5, atol=1e-4)


@EVERY
def test_an_evaluation_that_is_not_finite_names_the_parameters_that_are_not(package):
    B = load(package)
    model = B.Transformer(MODEL, seed=3)
    trainer = B.Trainer(model, TrainConfig(batch=2))
    params = B.get_params(model)
    sound = trainer.evaluate([BATCH])["loss"]
    assert np.isfinite(sound)
    broken = {name: np.array(x) for name, x in params.items()}
    broken["norm.bias"][1] = np.nan
    broken["head.weight"][0, 2] = np.inf
    B.set_params(model, broken)
    with pytest.raises(
        FloatingPointError, match=r"loss of an evaluation .*NaN or infinity in norm\.bias, head\.weight$"
    ):
        trainer.evaluate([BATCH])
    broken = params | {"norm.bias": np.full_like(params["norm.bias"], 3e38)}
    B.set_params(model, broken | {"head.weight": np.where(params["head.weight"] > 0, 3e38, -3e38).astype(np.float32)})
    if package != "core_numpy":  # which computes in float64
        with pytest.raises(FloatingPointError, match=r"must be finite; got .* every parameter is finite: it overflows"):
            trainer.evaluate([BATCH])
    B.set_params(model, params)
    assert trainer.evaluate([BATCH])["loss"] == sound


@pytest.mark.parametrize("package", ["core_numpy", "backend_torch"])
def test_bfloat16_without_its_package_is_one_sentence_that_says_what_to_install(package, monkeypatch):
    B = load(package)
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    mask = to(package, np.eye(3, dtype=bool))
    calls = [lambda: B.get_params(B.Transformer(MODEL, dtype="bfloat16"))]
    if package == "core_numpy":
        calls += [lambda: B.mask_to_bias(mask, "bfloat16"), lambda: B.alibi_slopes(4, dtype="bfloat16")]
    for call in calls:
        with pytest.raises(ImportError, match=r"^this needs the package ml-dtypes: pip install ml-dtypes"):
            call()
