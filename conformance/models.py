"""Cases of whole models and of training: rows of cases/*.toml under [[model]] and [[training]].

A model row makes the model from its configuration in the target and in the reference, and judges the initial
parameters (bit for bit), the output, the loss and every parameter's gradient. A training row runs the trainers side by
side from one start: in float64 to 1e-9, in float32 against the spread of reference runs whose parameters are
nudged by one unit in the last place at every step.
"""

from __future__ import annotations

import tomllib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

import numpy as np

from . import budget
from .compare import Disagreement, Tally, check_exact, check_kind, check_within
from .inputs import build, generator, rounded, widened
from .memory import remembered
from .optimiser import judge_stream, limits_by_name
from .reference import reference
from .rows import LEVELS, Pattern, matches
from .runner import Result, judged
from .targets.protocol import NotOffered, Target

Arrays = dict[str, np.ndarray]
# Free runs agree with their nudged twins' spread; sixteen times it leaves room for chance (docs/tolerance.md).
TWINS = 16.0
TRAJECTORY = 1e-9  # float64: 20 steps of a smooth loss lose three digits to the order of operations, not six


@dataclass(frozen=True)
class ModelCase:
    """config: fields of ModelConfig. batch: inputs of loss_and_gradients. call: further inputs of the forward call.

    loss: label_smoothing and z_loss. dropout: seed of the dropout key, or None. train: fields of TrainConfig; a case
    that has them is a training case. stream: by parameter the description of its gradients; a training case that has
    it is of the optimiser alone, without a model (optimiser.py).
    """

    id: str
    rules: tuple[str, ...]
    why: str
    config: dict[str, Any] = field(default_factory=dict)
    batch: dict[str, Any] = field(default_factory=dict)
    call: dict[str, Any] = field(default_factory=dict)
    loss: dict[str, float] = field(default_factory=dict)
    dropout: int | None = None
    train: dict[str, Any] | None = None
    stream: dict[str, Any] | None = None
    dtypes: tuple[str, ...] = ("float64", "float32")
    level: str = "quick"

    @property
    def function(self) -> str:
        return "Transformer" if self.train is None else "Trainer"


@cache
def load_model_cases() -> tuple[ModelCase, ...]:
    cases: list[ModelCase] = []
    folder = resources.files(__package__) / "cases"
    for file in sorted(folder.iterdir(), key=lambda f: f.name):
        if not file.name.endswith(".toml"):
            continue
        table = tomllib.loads(file.read_text(encoding="utf-8"))
        for row in [row for kind in ("model", "training", "optimizer") for row in table.get(kind, [])]:
            unknown = sorted(set(row) - set(ModelCase.__dataclass_fields__))
            if unknown:
                raise ValueError(f"{file.name}: case {row.get('id', '?')!r} has unknown fields {unknown}")
            values: dict[str, Any] = {n: tuple(x) if n in ("rules", "dtypes") else x for n, x in row.items()}
            cases.append(ModelCase(**values))
    return tuple(cases)


def select_models(level: str, pattern: Pattern = None) -> list[ModelCase]:
    depth = LEVELS.index(level)
    chosen = [case for case in load_model_cases() if LEVELS.index(case.level) <= depth]
    return [case for case in chosen if matches(pattern, case.id, case.function)]


def config_of(module: Any, fields: dict[str, Any]) -> Any:
    """TOML has no None: inside a list "none" stands for it (a window's open side, a layer without a window)."""

    def plain(value: Any) -> Any:
        return [None if item == "none" else plain(item) for item in value] if isinstance(value, list) else value

    return module.ModelConfig.from_dict({name: plain(value) for name, value in fields.items()})


def random_params(case_id: str, initial: Arrays, dtype: str) -> Arrays:
    """The initial parameters moved at random, so that no bias is 0 and no gain is 1 when gradients are judged."""
    return {
        name: rounded(x.astype(np.float64) + 0.1 * generator(case_id, name).standard_normal(x.shape), dtype)
        for name, x in initial.items()
    }


def run_model_case(case: ModelCase, target: Target, level: str = "full") -> Iterator[Result]:
    """All results of one model or training case on one target."""
    for dtype in model_dtypes(case, target, level):
        yield judge_model_case(case, target, dtype, level)


def model_dtypes(case: ModelCase, target: Target, level: str) -> tuple[str, ...]:
    """At "quick" one dtype where each call is compiled; which, turns with the case. Then loss and gradients speak for
    the output too, where both could be compared: compiling the forward pass by itself is half of the time."""
    if level == "quick" and target.compiles:
        return (case.dtypes[zlib.crc32(case.id.encode()) % len(case.dtypes)],)
    return case.dtypes


def judge_model_case(case: ModelCase, target: Target, dtype: str, level: str = "full") -> Result:
    """One model or training case in one dtype."""

    def work(tally: Tally) -> None:
        if dtype not in target.dtypes():
            raise NotOffered(f"no {dtype}")
        if case.stream is not None:
            return judge_stream(case, target, dtype, tally)
        if not target.offers(case.function):
            raise NotOffered(f"no {case.function}")
        if case.train is not None:
            return _judge_training(case, target, dtype, tally)
        return _judge_model(case, target, dtype, tally, forward=level != "quick" or not target.compiles)

    return judged(case, target, dtype, "auto", work)


def inputs_of(case: ModelCase) -> tuple[Arrays, Arrays]:
    batch = {name: build(case.id, name, spec) for name, spec in case.batch.items()}
    call = {name: build(case.id, name, spec) for name, spec in case.call.items()}
    return batch, call


def forward_arguments(batch: Arrays, call: Arrays) -> dict[str, Any]:
    given = dict(call)
    for source in ("lengths", "segments", "context", "context_lengths"):
        if source in batch:
            given.setdefault("kv_lengths" if source == "lengths" else source, batch[source])
    return given


def _judge_model(case: ModelCase, target: Target, dtype: str, tally: Tally, *, forward: bool) -> None:
    core = reference()
    batch, call = inputs_of(case)
    module = target.module
    config = config_of(module, case.config)
    model = module.Transformer(config, seed=7, dtype=dtype)
    mine = core.Transformer(config_of(core, case.config), seed=7, dtype="float64")
    initial = core.get_params(mine)
    got = module.get_params(model)
    if list(got) != list(initial):
        raise Disagreement(f"parameters must be named {list(initial)}; got {list(got)}")
    for name, value in initial.items():
        check_kind(f"initial {name}", got[name], value.shape, dtype)
        check_exact(tally, f"initial {name}", got[name], value)
    params = random_params(case.id, initial, dtype)
    module.set_params(model, params)
    if target.framework == "torch":
        model.eval()
    exact = {name: widened(x) for name, x in params.items()}
    given = forward_arguments(batch, call)
    differentiated = "targets" in batch and not call
    if forward or not differentiated:
        _judge_forward(case, target, model, mine, exact, batch, given, dtype, tally)
    if not differentiated:
        return
    _judge_gradients(case, target, model, mine, exact, batch, dtype, tally)


def forward_expected(
    mine: Any, exact: Arrays, batch: Arrays, given: dict[str, Any], dtype: str
) -> tuple[Arrays, Arrays]:
    """The output of the reference model `mine`, and its bound."""
    core = reference()

    def forward(params: Arrays) -> Arrays:
        core.set_params(mine, params)
        return {"output": np.asarray(mine(batch["tokens"], **given))}

    want = forward(exact)
    return want, budget.perturbation_bounds(forward, exact, want, dtype, draws=4, constant=budget.DEEP)


def _judge_forward(
    case: ModelCase,
    target: Target,
    model: Any,
    mine: Any,
    exact: Arrays,
    batch: Arrays,
    given: dict[str, Any],
    dtype: str,
    tally: Tally,
) -> None:
    want, bounds = remembered(("forward", case.id, dtype), lambda: forward_expected(mine, exact, batch, given, dtype))
    native = {name: target.native(x) for name, x in given.items()}
    got = target.numpy(model(target.native(batch["tokens"]), **native))
    check_kind("output", got, want["output"].shape, dtype)
    check_within(tally, "output", got, want["output"], bounds["output"])


def gradients_expected(case: ModelCase, mine: Any, exact: Arrays, batch: Arrays, dtype: str) -> tuple[Arrays, Arrays]:
    """The reference's loss and the gradient of every parameter, by its name, and their bounds."""
    core = reference()

    def backward(params: Arrays) -> Arrays:
        core.set_params(mine, params)
        key = {} if case.dropout is None else {"dropout_key": core.key(case.dropout)}
        loss, grads = core.loss_and_gradients(mine, batch, **case.loss, **key)
        return {"loss": np.asarray(loss, dtype=np.float64)} | {name: np.asarray(x) for name, x in grads.items()}

    want = backward(exact)
    bounds = budget.perturbation_bounds(backward, exact, want, dtype, draws=4, constant=budget.DEEP)
    # Where a gradient cancels to 0 by symmetry (a key's bias moves all scores of a row alike), what is left is the
    # rounding of its terms: that of the gradient as a whole (docs/tolerance.md).
    typical = _root_mean_square([x for name, x in want.items() if name != "loss"])
    for name, value in want.items():
        if value.ndim and bounds[name].max(initial=0.0) > 0:
            bounds[name] = bounds[name] + budget.DEEP * budget.UNIT[dtype] * typical
            bounds[name] = bounds[name] + (budget.MEANING * typical if dtype == "float64" else 0.0)
    return want, bounds


def _judge_gradients(
    case: ModelCase, target: Target, model: Any, mine: Any, exact: Arrays, batch: Arrays, dtype: str, tally: Tally
) -> None:
    want, bounds = remembered(
        ("gradients", case.id, dtype), lambda: gradients_expected(case, mine, exact, batch, dtype)
    )
    native = {name: target.native(x) for name, x in batch.items()}
    key = {} if case.dropout is None else {"dropout_key": target.module.key(case.dropout)}
    loss, grads = target.module.loss_and_gradients(model, native, **case.loss, **key)
    if list(grads) != list(want)[1:]:
        raise Disagreement(f"gradients must be named {list(want)[1:]}; got {list(grads)}")
    got = {"loss": np.asarray(loss, dtype=np.float64), **{name: np.asarray(x) for name, x in grads.items()}}
    for name, value in want.items():
        check_within(tally, name if name == "loss" else f"gradient of {name}", got[name], value, bounds[name])


def bounds_by_name(case: ModelCase, dtype: str) -> Arrays:
    """The budgets of everything that a model or training row compares; initial parameters have none: they are equal."""
    core = reference()
    if case.stream is not None:
        return limits_by_name(case, dtype)
    if case.train is not None:
        initial = core.get_params(core.Transformer(config_of(core, case.config), seed=7, dtype=dtype))
        return training_expected(case, initial, dtype)[1]
    batch, call = inputs_of(case)
    mine = core.Transformer(config_of(core, case.config), seed=7, dtype="float64")
    params = random_params(case.id, core.get_params(mine), dtype)
    exact, given = {name: widened(x) for name, x in params.items()}, forward_arguments(batch, call)
    _, bounds = remembered(("forward", case.id, dtype), lambda: forward_expected(mine, exact, batch, given, dtype))
    if "targets" not in batch or call:
        return dict(bounds)
    _, backward = remembered(("gradients", case.id, dtype), lambda: gradients_expected(case, mine, exact, batch, dtype))
    return bounds | {name if name == "loss" else f"gradient of {name}": x for name, x in backward.items()}


def _root_mean_square(arrays: list[np.ndarray]) -> float:
    number = sum(x.size for x in arrays)
    return float(np.sqrt(sum(float(np.sum(x**2)) for x in arrays) / number)) if number else 0.0


def _trainer(module: Any, case: ModelCase, params: Arrays, dtype: str) -> Any:
    model = module.Transformer(config_of(module, case.config), seed=7, dtype=dtype)
    module.set_params(model, params)
    assert case.train is not None
    return module.Trainer(model, module.TrainConfig.from_dict({**case.train, "precision": dtype}))


def _judge_training(case: ModelCase, target: Target, dtype: str, tally: Tally) -> None:
    core = reference()
    assert case.train is not None
    initial = core.get_params(core.Transformer(config_of(core, case.config), seed=7, dtype=dtype))
    want, bounds = training_expected(case, initial, dtype)
    got = training_answers(case, target, initial, dtype)
    if list(got) != list(want):
        raise Disagreement(f"training must report {list(want)}; got {list(got)}")
    for name, value in want.items():
        check_within(tally, name, got[name], value, bounds[name])


def training_batches(case: ModelCase) -> list[Arrays]:
    assert case.train is not None
    return [
        {name: build(f"{case.id}/{step}", name, spec) for name, spec in case.batch.items()}
        for step in range(case.train["steps"])
    ]


def training_expected(case: ModelCase, initial: Arrays, dtype: str) -> tuple[Arrays, Arrays]:
    """Records and last parameters of the reference's run, and their bounds."""

    return remembered(("training", case.id, dtype), lambda: expected_of(case, initial, training_batches(case), dtype))


def expected_of(
    case: ModelCase, initial: Arrays, batches: list[Arrays], dtype: str = "float64"
) -> tuple[Arrays, Arrays]:
    """`training_expected` on batches that are at hand."""
    run = _reference_run(case, initial, batches)
    return run, _twin_bounds(case, initial, batches, run, dtype)


def training_answers(case: ModelCase, target: Target, initial: Arrays, dtype: str) -> Arrays:
    """Records and last parameters of the target's run from `initial`."""
    trainer = _trainer(target.module, case, initial, dtype)
    native = [{name: target.native(x) for name, x in batch.items()} for batch in training_batches(case)]
    records = [trainer.step(batch) for batch in native]
    got: Arrays = {
        name: np.array([float(record[name]) for record in records]) for name in ("loss", "grad_norm", "lr", "tokens")
    }
    return got | {f"final {name}": x.astype(np.float64) for name, x in target.module.get_params(trainer.model).items()}


def _reference_run(
    case: ModelCase, initial: Arrays, batches: list[Arrays], nudge: tuple[float, int] | None = None
) -> Arrays:
    """Losses, norms and final parameters of the float64 reference; `nudge` is (relative size, seed)."""
    core = reference()
    trainer = _trainer(core, case, {name: widened(x) for name, x in initial.items()}, "float64")
    draw = np.random.Generator(np.random.Philox(nudge[1])) if nudge else None
    records = []
    for batch in batches:
        if nudge and draw is not None:
            now = core.get_params(trainer.model)
            moved = {n: x * (1.0 + nudge[0] * draw.choice([-1.0, 1.0], x.shape)) for n, x in now.items()}
            core.set_params(trainer.model, moved)
        records.append(trainer.step(batch))
    run: Arrays = {
        name: np.array([float(record[name]) for record in records]) for name in ("loss", "grad_norm", "lr", "tokens")
    }
    return run | {f"final {name}": np.asarray(x) for name, x in core.get_params(trainer.model).items()}


def _twin_bounds(case: ModelCase, initial: Arrays, batches: list[Arrays], want: Arrays, dtype: str) -> Arrays:
    still = _unmoved(initial, want)
    if dtype == "float64":
        bounds = {name: TRAJECTORY * (np.abs(x) + _root_mean_square([x])) for name, x in want.items()}
        return bounds | still
    unit = budget.UNIT[dtype]
    twins = [_reference_run(case, initial, batches, (unit, seed)) for seed in (1, 2, 3)]
    bounds = {}
    for name, value in want.items():
        spread = np.max([np.abs(twin[name] - value) for twin in twins], axis=0)
        typical = np.sqrt(np.mean(spread**2)) if spread.size else 0.0
        bounds[name] = TWINS * (spread + typical) + 8.0 * unit * np.abs(value)
    return bounds | still


def _unmoved(initial: Arrays, want: Arrays) -> Arrays:
    """Bounds of the parameters whose gradient is 0 by symmetry: an optimiser that divides by the gradient's size
    makes steps of its rounding, up to the learning rate each."""
    reach = 2.0 * float(np.sum(want["lr"]))
    bounds = {}
    for name, x in initial.items():
        change = np.abs(want[f"final {name}"] - x.astype(np.float64)).max(initial=0.0)
        if change < 1e-6 * reach:
            bounds[f"final {name}"] = np.full(x.shape, reach)
    return bounds
