"""Public fault reports about training, each with the test that answers it; those that no other file has are here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from three import PACKAGES, back, load, to

from core_numpy import BlockConfig, ModelConfig, TrainConfig
from core_numpy.contract.files import load_params, save_params

# What was reported where, and which tests would fail with that fault: one for every package, or one for each.
ANSWERS = {
    "pytorch 124464": ("test_training_reports", "test_without_a_key_nothing_is_dropped_whatever_the_rate"),
    "pytorch 42929": ("test_training_reports", "test_weights_are_those_before_dropout"),
    "transformers 28059": ("test_training_reports", "test_training_drops_with_another_mask_in_each_update_and_layer"),
    "pytorch 41477, core": ("test_training_core", "test_eps_stands_outside_the_root_after_the_correction"),
    "pytorch 41477, torch": ("test_training_torch", "test_adams_eps_is_added_after_the_correction"),
    "pytorch 41477, jax": ("test_training_jax", "test_adams_eps_stands_outside_the_corrected_root"),
    "optax 417, core": ("test_training_core", "test_decay_is_decoupled_and_spares_vectors"),
    "optax 417, torch": ("test_training_torch", "test_decay_is_decoupled_and_spares_biases"),
    "optax 417, jax": ("test_training_jax", "test_decay_is_decoupled"),
    "spd 643, core": ("test_training_core", "test_clipping_is_exact_and_only_above_the_limit"),
    "spd 643, torch": ("test_training_torch", "test_clipping_is_exact"),
    "spd 643, jax": ("test_training_jax", "test_clipping_is_exact_and_survives_its_edges"),
    "optax 1752": ("test_training_reports", "test_gradients_of_zero_are_clipped_to_zero"),
    "pytorch 46849, torch": ("test_training_torch",
                             "test_finite_gradients_with_an_infinite_float32_norm_are_clipped_not_refused"),
    "pytorch 46849, jax": ("test_training_jax", "test_clipping_is_exact_and_survives_its_edges"),
    "maxtext 5143": ("test_training_reports", "test_a_norm_of_half_precision_gradients_is_that_of_float32"),
    "transformers 24725": ("test_training_reports", "test_micro_batches_weigh_what_they_count"),
    "maxdiffusion 484, core": ("test_training_core", "test_a_reloaded_trainer_goes_on_as_if_it_had_not_stopped"),
    "maxdiffusion 484, torch": ("test_training_torch", "test_stopping_and_going_on_is_bit_for_bit_the_unbroken_run"),
    "maxdiffusion 484, jax": ("test_training_jax", "test_saving_and_loading_changes_nothing"),
    "the_well 77": ("test_training_handover", "test_twenty_updates_in_each_by_checkpoint_are_sixty_in_any_one"),
    "pytorch 86274": ("test_training_reports", "test_no_two_layers_start_alike"),
    "safetensors 598": ("test_training_reports",
                        "test_bfloat16_goes_from_torch_through_a_file_to_jax_and_back_bit_for_bit"),
    "mlx 3363": ("test_files", "test_an_unsound_file_is_one_error_naming_file_and_reason"),
    "flax 2436": ("test_training_refusals", "test_a_checkpoint_of_other_shapes_is_no_checkpoint_of_the_model"),
    "flax 1631": ("test_training_refusals", "test_a_checkpoint_of_other_shapes_is_no_checkpoint_of_the_model"),
    "vllm 12366": ("test_files", "test_a_pickle_is_refused_and_its_code_does_not_run"),
    "nanoVLM 204": ("test_training_reports", "test_packed_documents_train_as_if_each_were_alone"),
    "jax 12008": ("test_training_reports", "test_a_step_computes_its_products_as_the_configuration_says"),
    "optax: label -1": ("test_training_refusals", "test_a_batch_that_does_not_fit_is_refused_and_changes_nothing"),
}  # fmt: skip

EVERY = pytest.mark.parametrize("package", PACKAGES)
# Compiling a JAX step takes seconds: where torch and NumPy say the same, on request.
SOME = pytest.mark.parametrize(
    "package", [pytest.param(p, marks=pytest.mark.slow if p == "backend_jax" else ()) for p in PACKAGES]
)
MODEL = ModelConfig(vocab=11, width=12, heads=3, layers=2, max_length=9, dropout=0.5)
TOKENS = np.arange(12).reshape(2, 6) % 11


@pytest.mark.parametrize("report", ANSWERS)
def test_the_test_that_answers_a_report_exists(report):
    file, name = ANSWERS[report]
    assert f"def {name}(" in (Path(__file__).parent / f"{file}.py").read_text(encoding="utf-8")


@EVERY
def test_without_a_key_nothing_is_dropped_whatever_the_rate(package):
    B = load(package)
    model, plain = B.Transformer(MODEL, seed=1), B.Transformer(MODEL.replace(dropout=0.0), seed=1)
    if package == "backend_torch":
        model.eval(), plain.eval()
    first, second, want = (back(m(to(package, TOKENS))) for m in (model, model, plain))
    assert first.tobytes() == second.tobytes() == want.tobytes()
    x = to(package, np.ones((3, 4), np.float32))
    assert not back(B.dropout(x, 1.0, B.key(0))).any()
    with pytest.raises(ValueError, match="key"):
        B.dropout(x, 0.5, None)


@EVERY
def test_weights_are_those_before_dropout(package):
    B = load(package)
    q, k = (to(package, np.random.default_rng(n).standard_normal((1, 2, 5, 4)).astype(np.float32)) for n in (0, 1))
    weights = back(B.attention_weights(q, k, causal=True, dropout_rate=0.2, dropout_key=B.key(3)))
    np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-6)
    np.testing.assert_array_equal(weights, back(B.attention_weights(q, k, causal=True)))


@SOME
def test_training_drops_with_another_mask_in_each_update_and_layer(package):
    B = load(package)
    block = B.FeedForward(BlockConfig(width=40, heads=2, dropout=0.5), seed=0)
    x = to(package, np.random.default_rng(0).standard_normal((4, 25, 40)).astype(np.float32))
    outs = [back(block(x, dropout_key=B.key(seed))) for seed in (1, 1, 2)]
    assert outs[0].tobytes() == outs[1].tobytes() != outs[2].tobytes()
    assert abs(np.mean(outs[0] == 0) - 0.5) < 0.04  # 4,000 draws: five standard deviations
    run = B.Trainer(B.Transformer(MODEL, seed=1), TrainConfig(steps=4, lr=0.0))
    batch = {"tokens": TOKENS, "targets": TOKENS}
    assert len({run.step(batch)["loss"] for _ in range(4)}) == 4  # the same weights each time: lr is 0
    # Two layers with the same weights drop different elements: the second is not the first's mask again.
    keys = [back(B.fold_in(B.key(0), layer)) for layer in range(2)]
    assert not np.array_equal(*keys)


@SOME
def test_micro_batches_weigh_what_they_count(package):
    """Mean losses 4 and 1 of one and of three targets have the mean 1.75, not 2.5; a micro-batch of none adds none."""
    B = load(package)
    targets = np.full((4, 6), -100)
    for row, count in enumerate((1, 3, 0, 0)):
        targets[row, :count] = TOKENS[row % 2, :count]
    batch = {"tokens": np.concatenate([TOKENS, TOKENS[::-1]]), "targets": targets}
    reports, params = [], []
    for accumulate in (1, 2, 4):
        # sgd: AdamW would make a whole step of a gradient that is 0 but for rounding.
        config = TrainConfig(steps=4, batch=4, optimizer="sgd", lr=0.1, clip_norm=None, accumulate=accumulate)
        run = B.Trainer(B.Transformer(MODEL.replace(dropout=0.0), seed=1), config)
        reports.append(run.step(batch))
        params.append(B.get_params(run.model))
    rows = [{name: x[row : row + 1] for name, x in batch.items()} for row in range(4)]
    model = B.Transformer(MODEL.replace(dropout=0.0), seed=1)
    losses = [B.loss_and_gradients(model, row)[0] for row in rows]
    assert losses[2:] == [0.0, 0.0]
    assert abs(losses[0] - losses[1]) > 1e-2  # else the mean of means would be the same
    for report, moved in zip(reports, params, strict=True):
        assert report["tokens"] == 4 and report["loss"] == pytest.approx((losses[0] + 3 * losses[1]) / 4, rel=1e-6)
        assert report["grad_norm"] == pytest.approx(reports[0]["grad_norm"], rel=1e-5)
        for name, x in moved.items():
            np.testing.assert_allclose(x, params[0][name], rtol=0, atol=1e-6, err_msg=name)


@SOME
def test_gradients_of_zero_are_clipped_to_zero(package):
    """0/0 in a clip's factor makes NaN of everything [optax 1752]."""
    B = load(package)
    run = B.Trainer(B.Transformer(MODEL, seed=1), TrainConfig(weight_decay=0.0, clip_norm=1e-30))
    before = B.get_params(run.model)
    report = run.step({"tokens": TOKENS, "targets": np.full_like(TOKENS, -100)})
    assert report["loss"] == report["grad_norm"] == 0.0 and run.updates == 1
    for name, x in B.get_params(run.model).items():
        np.testing.assert_array_equal(x, before[name])


@SOME
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_a_norm_of_half_precision_gradients_is_that_of_float32(package, precision):
    """Squares summed in the gradients' own type lose most of them, or overflow [maxtext 5143]."""
    B = load(package)
    model = B.Transformer(MODEL.replace(dropout=0.0), seed=1)
    run = B.Trainer(model, TrainConfig(precision=precision, optimizer="sgd", lr=1.0, betas=(0.0, 0.9), weight_decay=0.0,
                                       clip_norm=None))  # fmt: skip
    before = B.get_params(model)
    report = run.step({"tokens": TOKENS, "targets": TOKENS})
    assert run.updates == 1  # with lr 1 and no momentum an update is minus the gradient
    moved = [(before[name].astype(np.float64) - x).ravel() for name, x in B.get_params(model).items()]
    assert report["grad_norm"] == pytest.approx(np.linalg.norm(np.concatenate(moved)), rel=1e-5)


@EVERY
def test_no_two_layers_start_alike(package):
    params = load(package).get_params(load(package).Transformer(MODEL.replace(layers=3), seed=0))
    matrices = {name: x for name, x in params.items() if x.ndim == 2}
    assert len({x.tobytes() for x in matrices.values()}) == len(matrices) > 15


def test_bfloat16_goes_from_torch_through_a_file_to_jax_and_back_bit_for_bit(tmp_path):
    torch_, jax_ = load("backend_torch"), load("backend_jax")
    import ml_dtypes

    model = torch_.Transformer(MODEL, seed=1, dtype="bfloat16")
    params = torch_.get_params(model)
    special = np.array([1, 1.0078125, 3.39e38, -0.0, np.nan], ml_dtypes.bfloat16)
    params["blocks.0.norm1.weight"][:5] = special
    torch_.set_params(model, params)
    save_params(tmp_path / "one.safetensors", torch_.get_params(model))
    other = jax_.Transformer(MODEL, seed=2, dtype="bfloat16")
    jax_.set_params(other, load_params(tmp_path / "one.safetensors"))
    save_params(tmp_path / "two.safetensors", jax_.get_params(other))
    again = load_params(tmp_path / "two.safetensors")
    assert again.keys() == params.keys()
    for name, x in params.items():
        assert again[name].dtype == ml_dtypes.bfloat16 and again[name].tobytes() == x.tobytes(), name


@SOME
def test_packed_documents_train_as_if_each_were_alone(package):
    """Positions that restart do not keep documents apart; segments do."""
    from core_numpy.contract.data import pack_documents

    B = load(package)
    documents = [np.array([1, 2, 3, 4]), np.array([5, 6, 7]), np.array([8, 9])]
    model = B.Transformer(MODEL.replace(dropout=0.0), seed=1)
    packed = pack_documents(documents, 9)
    assert packed["tokens"].shape == (1, 9)
    loss, grads = B.loss_and_gradients(model, packed)
    alone = [B.loss_and_gradients(model, pack_documents([d], 9)) for d in documents]
    counts = [len(d) - 1 for d in documents]
    assert loss == pytest.approx(np.average([one for one, _ in alone], weights=counts), rel=1e-6)
    for name, g in grads.items():
        want = np.average([each[name] for _, each in alone], axis=0, weights=counts)
        np.testing.assert_allclose(g, want, rtol=1e-4, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("precision", ["highest", "default"])
def test_a_step_computes_its_products_as_the_configuration_says(precision):
    """float32 is float32: what JAX lowers carries the precision (torch: test_training_torch)."""
    B = load("backend_jax")
    import jax

    run = B.Trainer(B.Transformer(MODEL, seed=1), TrainConfig(matmul_precision=precision))

    def look(*arguments):
        raise RuntimeError(f"called with {jax.config.jax_default_matmul_precision}")

    run._program = type("Spy", (), {"step": staticmethod(look)})()
    with pytest.raises(RuntimeError, match=f"called with {precision}"):
        run.step({"tokens": TOKENS, "targets": TOKENS})
    assert jax.config.jax_default_matmul_precision is None
