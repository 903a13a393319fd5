"""Deep models in JAX: blocks that are alike are one loop and one update, and nobody can tell from what is trained."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

import backend_jax as B  # noqa: E402
import core_numpy as C  # noqa: E402
from backend_jax.folding import LEAST_REPETITIONS, Folding  # noqa: E402

NEAR = (2, 0)
DEEP = C.ModelConfig(vocab=7, width=6, heads=2, hidden=5, layers=LEAST_REPETITIONS, max_length=9, dropout=0.25)
TRAIN = C.TrainConfig(
    steps=20, batch=4, lr=3e-2, precision="float64", clip_norm=0.5, weight_decay=0.3, ema=0.9, label_smoothing=0.1,
    z_loss=0.01,
)  # fmt: skip


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def batches(count, **more):
    rng = np.random.default_rng(4)
    made = []
    for _ in range(count):
        batch = {"tokens": rng.integers(0, 7, (4, 5)), "targets": rng.integers(0, 7, (4, 5)), **more}
        batch["targets"][0, 1:] = -100
        made.append(batch)
    return made


def trainer_of(package, config, train):
    dtype = "float64" if train.precision == "float64" else "float32"
    return package.Trainer(package.Transformer(config, seed=2, dtype=dtype), train)


def close(got, want, tolerance):
    assert list(got) == list(want)
    for name, x in got.items():
        np.testing.assert_allclose(np.asarray(x), want[name], rtol=0, atol=tolerance, err_msg=name)


def check_run(config, train, data):
    """Trains both and compares every loss, parameter and slot; gives the two."""
    reference, trainer = trainer_of(C, config, train), trainer_of(B, config, train)
    assert trainer._folding.folded
    for batch in data:
        want, got = reference.step(batch), trainer.step(batch)
        assert got == pytest.approx(want, rel=1e-9)
        close(B.get_params(trainer.model), C.get_params(reference.model), 1e-9)
    for slot, arrays in reference.state.items():
        close(trainer.state[slot], arrays, 1e-9)
    return reference, trainer


def test_deep_updates_are_the_references_and_their_files_everybodys(tmp_path, x64):
    # Norms and biases, which do not decay, get a second axis.
    data = batches(6)
    _, trainer = check_run(DEEP, TRAIN, data[:4])
    trainer.save(tmp_path / "jax")
    again, theirs = B.Trainer.load(tmp_path / "jax"), C.Trainer.load(tmp_path / "jax")
    for batch in data[4:]:
        want, got = trainer.step(batch), again.step(batch)
        assert got == want == pytest.approx(theirs.step(batch), rel=1e-9)
    params, resumed = B.get_params(trainer.model), B.get_params(again.model)
    assert all(x.tobytes() == resumed[name].tobytes() for name, x in params.items())
    close(trainer.ema, theirs.ema, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "train"),
    [
        # Two windows in turn: two blocks are repeated.
        ({"layers": 2 * LEAST_REPETITIONS, "layer_windows": (None, NEAR) * LEAST_REPETITIONS}, {"accumulate": 2}),
        ({}, {"optimizer": "sgd", "weight_decay": 0.2}),
        ({"attention_bias": False}, {"optimizer": "lion", "lr": 1e-3, "clip_norm": None}),
        ({"width": 8, "positions": "rotary", "activation": "swiglu", "norm": "rms"}, {"remat": True}),
        ({"norm_place": "post", "positions": "relative", "final_norm": False}, {"remat": True, "accumulate": 2}),
        ({"kind": "encoder_decoder"}, {}),
    ],
    ids=["windows", "sgd", "lion", "llama", "post", "pair"],
)
def test_every_kind_of_deep_update_is_the_references(model, train, x64):
    config = DEEP.replace(**model)
    more = {}
    if config.kind == "encoder_decoder":
        more = {"context": np.arange(24).reshape(4, 6) % 7, "context_lengths": np.array([6, 3, 1, 6])}
    data = batches(3, **more)
    reference, trainer = check_run(config, TRAIN.replace(**train), data)
    assert trainer.evaluate(data) == pytest.approx(reference.evaluate(data), rel=1e-9)


def test_a_model_set_between_two_updates_is_what_the_next_one_starts_from(x64):
    trainer, other = (trainer_of(B, DEEP, TRAIN) for _ in range(2))
    first, second = batches(2)
    trainer.step(first)
    # One layer alone is noticed too, in a trainer that has made an update.
    params, name = B.get_params(trainer.model), f"blocks.{DEEP.layers - 1}.ffn.up.weight"
    for model in (trainer.model, other.model):
        B.set_params(model, params | {name: 2 * params[name]})
    other.updates = 1  # whose dropout the next update draws
    assert trainer.step(second)["loss"] == other.step(second)["loss"]
    moved = B.get_params(trainer.model)[name] - 2 * params[name]
    assert 0 < np.abs(moved).max() < 0.1


def test_a_layers_gradient_that_is_not_finite_is_called_by_its_name(x64):
    trainer = trainer_of(B, DEEP, TRAIN)
    program = trainer._program
    bad = f"blocks.{DEEP.layers - 2}.ffn.down.bias"

    def step(*given):
        params, state, report = program.step(*given)
        squares = {name: np.array(x) for name, x in report["squares"].items()}
        squares["blocks.0.ffn.down.bias"][DEEP.layers - 2] = np.nan
        return params, state, report | {"squares": squares, "grad_norm": np.float32(np.nan)}

    trainer._program = type("Program", (), {"step": staticmethod(step)})()
    with pytest.raises(FloatingPointError, match=f"in {bad}$|in {bad}[^,]*$"):
        trainer.step(batches(1)[0])


def equations(jaxpr):
    """How many there are, those of loops' bodies once."""
    inner = [x for eqn in jaxpr.eqns for x in jax.tree.leaves(list(eqn.params.values()))]
    return len(jaxpr.eqns) + sum(equations(getattr(x, "jaxpr", x)) for x in inner if hasattr(x, "eqns"))


def test_a_step_of_twice_the_depth_is_no_larger():
    sizes = []
    for layers in (LEAST_REPETITIONS, 2 * LEAST_REPETITIONS):
        trainer = trainer_of(B, DEEP.replace(layers=layers, dropout=0.0), C.TrainConfig(steps=9, batch=4))
        given = (trainer._together, trainer._state, trainer._arrays(batches(1)[0]), np.uint32(1), np.float32(1))
        sizes.append(equations(jax.make_jaxpr(trainer._program._update)(*given, np.float32(1)).jaxpr))
    assert sizes[0] > 300 and sizes[1] == sizes[0]


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({}, 1),
        ({"layers": LEAST_REPETITIONS - 1}, None),
        ({"layer_windows": (*(None,) * (LEAST_REPETITIONS - 1), NEAR)}, None),
        ({"layers": 3 * LEAST_REPETITIONS, "layer_windows": (NEAR, None, None) * LEAST_REPETITIONS}, 3),
        ({"layers": 2 * LEAST_REPETITIONS + 1, "layer_windows": (*(NEAR, None) * LEAST_REPETITIONS, NEAR)}, None),
    ],
)
def test_blocks_are_together_where_they_repeat(change, kept):
    config = DEEP.replace(**change)
    model = B.Transformer(config)
    folding = Folding.of(model)
    assert list(folding.names) == list(B.get_params(model))
    blocks = {name.split(".")[1] for name in folding.members if name.startswith("blocks.")}
    assert len(blocks) == (kept or config.layers)
    params = {name: jax.numpy.asarray(x) for name, x in B.get_params(model).items()}
    close(folding.apart(folding.together(params)), params, 0)


def test_layers_that_share_their_parameters_stay_apart():
    model = B.Transformer(DEEP)
    for i in range(1, DEEP.layers):
        model.blocks[i].ffn = model.blocks[0].ffn
    folding = Folding.of(model)
    assert not folding.folded and list(folding.members) == list(folding.names)
