"""Loss, gradients, and the trainer. Rules: core_numpy.training.

Native: an update is one compiled program over donated parameters and moments, `program.Program`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from core_numpy.contract.checks import training as checks
from core_numpy.contract.checks.common import require_int
from core_numpy.contract.checks.layers import check_loss_options
from core_numpy.contract.checks.model import check_params
from core_numpy.contract.config import ModelConfig, TrainConfig
from core_numpy.contract.memory import keep_freed_memory
from core_numpy.contract.progress import fit_bar
from core_numpy.contract.saving import Saver, whole
from core_numpy.contract.schedule import learning_rate

from . import optimizer
from .arrays import from_numpy, to_numpy
from .folding import Folding
from .model import Transformer, get_params, named_parameters, set_params
from .program import Arrays, Loss, Program, shared_program, traced, value_and_gradients

# As in torch.amp.GradScaler: a start that overflows once or twice at most, and a doubling that costs one step in 2000.
FIRST_SCALE, GROWTH_INTERVAL = 2.0**16, 2000
log = logging.getLogger(__name__)


def loss_and_gradients(
    model: Transformer,
    batch: dict[str, Any],
    *,
    dropout_key: jax.Array | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[float, dict[str, np.ndarray]]:
    """The mean loss of a batch's counted targets and its gradient in every parameter. Rules: core_numpy.training."""
    params = {name: p[...] for name, p in named_parameters(model).items()}
    checks.check_batch(model.config, batch, dropout_key=dropout_key, dtype=model.dtype, values=np.asarray)
    check_loss_options(label_smoothing, z_loss)
    loss = Loss(nnx.split(model)[0], model.dtype, float(label_smoothing), float(z_loss))
    value, grads = value_and_gradients(loss, params, _arrays(batch), dropout_key)
    # What comes out of a compiled call is sorted by name; the canonical order is the model's.
    return float(value), {name: to_numpy(grads[name]) for name in params}


class Trainer:
    """Trains a model in place: after each update its parameters are the new ones. Rules: core_numpy.training.

    `updates` counts the finished updates, `batches` the batches taken, left-out ones included. `state` holds the
    optimiser's slots by name. The step's buffers are donated: arrays read from the model before an update are gone
    after it; copy what is to last.
    """

    def __new__(cls, model: Transformer, config: TrainConfig) -> Self:
        if cls is Trainer and isinstance(config, TrainConfig) and config.parallel is not None:
            from .parallel import ParallelTrainer

            return super().__new__(ParallelTrainer)  # type: ignore[return-value]
        return super().__new__(cls)

    def __init__(self, model: Transformer, config: TrainConfig) -> None:
        checks.check_trainer(model, config)
        self.model, self.config, self.updates, self.batches = model, config, 0, 0
        self._variables = named_parameters(model)
        self._publish(self._spread(self._params))
        self.loss_scale = FIRST_SCALE if config.precision == "float16" else 1.0
        self._good = 0
        self._saver = Saver()
        for stack in (model.encoder, model.decoder) if model.config.kind == "encoder_decoder" else (model,):
            stack.remat = config.remat
        self._folding = self._fold()
        self._published = self._params
        self._together = self._folding.together(self._published)
        self._state = optimizer.initial_state(config, self._together)
        self._program = self._compile()

    @property
    def traces(self) -> int:
        """How often the step of this model and configuration was traced: once for each set of shapes."""
        return self._program.traces

    @whole()
    def step(self, batch: dict[str, Any]) -> dict[str, Any]:
        """One update; gives loss, gradient norm, learning rate and the number of counted targets.

        With nonfinite="skip", and in float16 after an overflow, a step may leave everything as it was, and warns.
        """
        self._saver.check()
        self._check(batch)
        checks.check_accumulation(len(batch["tokens"]), self.config.accumulate)
        t = self.updates + 1
        lr = learning_rate(self.config, t)
        with jax.default_matmul_precision(self.config.matmul_precision):
            params, state, report = self._program.step(
                self._gathered(), self._state, self._arrays(batch), np.uint32(t), np.asarray(lr, self._master),
                np.asarray(self.loss_scale, self._master),
            )  # fmt: skip
        # Compiled calls sort by name; the canonical order of the slots is the optimiser's.
        self._together, self._state = params, {slot: state[slot] for slot in self._state}
        self._published = self._folding.apart(params)
        self._publish(self._published)
        report = jax.device_get(report)
        if jax.default_backend() == "cpu":
            keep_freed_memory()  # of steps, and not what the compiler needs before the first
        if np.isfinite(report["grad_norm"]):
            self.updates = t
            self._grow_scale()
        else:
            squares = self._folding.numbers(report["squares"])
            self._refuse(t, [name for name in self._variables if not np.isfinite(squares[name])])
        self.batches += 1
        return {
            "loss": float(report["loss"]),
            "grad_norm": float(report["grad_norm"]) / float(report["unit"]),
            "lr": lr,
            "tokens": int(report["tokens"]),
        }

    def fit(self, batches: Iterable[dict[str, Any]], steps: int | None = None, progress: bool = True) -> list[dict]:
        """A step for each batch, until `steps` of them, or without a number until update `config.steps`."""
        checks.check_batches(batches)
        left = max(self.config.steps - self.updates, 0) if steps is None else require_int("steps", steps, 0)
        reports: list[dict[str, Any]] = []
        if left == 0:
            return reports
        with fit_bar(left, progress) as advance:
            for batch in batches:
                reports.append(self.step(batch))
                advance(reports[-1])
                # Without a number it is updates that count, and a batch that is left out is none.
                if self.updates >= self.config.steps if steps is None else len(reports) == left:
                    break
        return reports

    def evaluate(self, batches: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """The mean loss over all counted targets, without dropout, label smoothing and z-loss; nothing changes."""
        checks.check_batches(batches)
        total, tokens = 0.0, 0
        for batch in batches:
            self._check(batch)
            with jax.default_matmul_precision(self.config.matmul_precision):
                loss, count = jax.device_get(self._program.evaluate(self._gathered(), self._arrays(batch)))
            checks.check_loss(float(loss), lambda: get_params(self.model))
            total, tokens = total + float(loss), tokens + int(count)
        return {"loss": total / max(tokens, 1), "tokens": tokens}

    @property
    def state(self) -> dict[str, Arrays]:
        """The optimiser's slots, by name of the slot and of the parameter."""
        return {slot: self._folding.apart(arrays) for slot, arrays in self._state.items()}

    @property
    def ema(self) -> dict[str, np.ndarray] | None:
        """The averaged parameters as NumPy arrays under canonical names, for `set_params`; None without an average."""
        if "ema" not in self._state:
            return None
        return {name: to_numpy(x) for name, x in self._folding.apart(self._state["ema"]).items()}

    def save(self, path: str | os.PathLike[str], *, background: bool = False) -> Path:
        """Write a checkpoint into the folder `path`, which any backend's `Trainer.load` reads; gives its own path.

        In the background a thread writes what the state is now, already on the host; an error comes from the next
        step, `save` or `wait`.
        """
        return self._saver.save(path, background=background, **self._snapshot())

    def _snapshot(self) -> dict[str, Any]:
        """What a checkpoint holds, on the host. It has no layout."""
        return {
            "step": self.updates,
            "params": {name: to_numpy(p) for name, p in self._params.items()},
            "state": {slot: {name: to_numpy(x) for name, x in arrays.items()} for slot, arrays in self.state.items()},
            "config": self.model.config,
            "train_config": self.config.replace(parallel=None),
            "extra": self._extra(),
        }

    def _extra(self) -> dict[str, Any]:
        return {
            "backend": "backend_jax",
            "batches": self.batches,
            "loss_scale": self.loss_scale,
            "loss_scale_steps": self._good,
        }

    def wait(self) -> None:
        """Return once the save in the background is on the disk; raise what it failed with."""
        self._saver.wait()

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        device: Any = None,
        parallel: dict[str, int] | None = None,
        train_config: TrainConfig | None = None,
        model_config: ModelConfig | None = None,
    ) -> Self:
        """The trainer of a checkpoint, or of the newest one in a folder; its next update is the one after.

        How it is laid out over devices is said here; a checkpoint has no layout.
        With `train_config` or `model_config` a checkpoint of another one is refused with the fields that differ.
        """
        from core_numpy.contract.checkpoints import read_checkpoint

        found = read_checkpoint(path, train_config=train_config, model_config=model_config)
        dtype = "float64" if found.train_config.precision == "float64" else "float32"
        model = Transformer(found.config, dtype=dtype, device=device)
        set_params(model, found.params)
        trainer = cls(model, found.train_config.replace(parallel=parallel))
        expected = {name: (p.shape, p.dtype.name) for name, p in trainer._params.items()}
        for slot in trainer._state:
            check_params(expected, found.state.get(slot, {}))
            arrays = trainer._spread({name: from_numpy(found.state[slot][name]) for name in expected})
            trainer._state[slot] = trainer._folding.together(arrays)
        trainer.updates, trainer._saver = found.step, Saver(found.path)
        trainer.batches = int(found.extra.get("batches", found.step))
        trainer.loss_scale = float(found.extra.get("loss_scale", trainer.loss_scale))
        trainer._good = int(found.extra.get("loss_scale_steps", 0))
        return trainer

    @property
    def _master(self) -> str:
        return "float64" if self.config.precision == "float64" else "float32"

    # What a trainer on several devices does otherwise (parallel.ParallelTrainer).

    def _spread(self, params: Arrays) -> Arrays:
        """Copies, because a step donates the model's arrays and they may be somebody else's too."""
        return {name: jnp.copy(p) for name, p in params.items()}

    def _fold(self) -> Folding:
        return Folding.none(self.model) if self.config.compile is False else Folding.of(self.model)

    def _compile(self) -> Program:
        folding, dropout = self._folding, self.model.config.dropout > 0.0
        return shared_program(folding.graph, *traced(self.config, dropout), folded=folding.folded)

    def _arrays(self, batch: dict[str, Any]) -> Arrays:
        return _arrays(batch)

    def _check(self, batch: Any) -> None:
        checks.check_batch(self.model.config, batch, dropout_key=None, dtype=self._master, values=np.asarray)

    @property
    def _params(self) -> Arrays:
        """The model's own arrays: it and its trainer never disagree."""
        return {name: p[...] for name, p in self._variables.items()}

    def _gathered(self) -> Arrays:
        """The model's parameters as the step takes them: those that it gave, unless somebody has set others since."""
        own = self._params
        if any(own[name] is not x for name, x in self._published.items()):
            self._published, self._together = own, self._folding.together(own)
        return self._together

    def _publish(self, params: Arrays) -> None:
        for name, p in self._variables.items():
            p.set_value(params[name])

    def _grow_scale(self) -> None:
        if self.config.precision != "float16":
            return
        self._good += 1
        if self._good >= GROWTH_INTERVAL:
            self.loss_scale, self._good = self.loss_scale * 2.0, 0

    def _refuse(self, t: int, names: list[str]) -> None:
        """A norm that is not finite: nothing was changed. Stop or say that the step was left out."""
        if self.config.precision == "float16" and self.loss_scale > 1.0:
            self.loss_scale, self._good = self.loss_scale / 2.0, 0
            log.warning("update %d left out: float16 gradients overflowed; the loss scale is %g", t, self.loss_scale)
            return
        if self.config.nonfinite == "stop":
            checks.check_finite(t, names, self._saver.last)
        log.warning("update %d left out: gradients that are not finite in %s", t, ", ".join(names[:5]))


def _arrays(batch: dict[str, Any]) -> Arrays:
    return {name: jnp.asarray(x) for name, x in batch.items()}
