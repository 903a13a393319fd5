"""Loss, gradients and the training loop.

training-1: the loss is the sum over counted targets divided by how many there are, across micro-batches too.
training-2: with no counted target the loss and every gradient are 0.
training-3: update t counts from 1 and has the learning rate `contract.schedule.learning_rate(config, t)`.
training-4: micro-batch m of update t drops with fold_in(fold_in(key(seed), t), m); it holds the batch's rows m n to
(m + 1) n - 1.
training-5: parameters, moments and averages are kept in float32 (float64 for precision "float64"); for each pass they
are rounded to the precision, and the gradients are those at the rounded parameters.
training-6: a gradient that is not finite stops, naming update and parameters, or with nonfinite="skip" leaves
everything, t included, as it was.
training-7: a saved trainer goes on as if it had never stopped: parameters, moments, average and t are all its state.
training-8: evaluation is the mean over the counted targets of all batches, without dropout, label smoothing and
z-loss; a loss that is not finite stops, naming the parameters that are not.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .contract.checkpoints import read_checkpoint
from .contract.checks.common import require_int
from .contract.checks.layers import check_loss_options
from .contract.checks.model import check_owner, check_params
from .contract.checks.training import (
    IGNORED,
    check_accumulation,
    check_batch,
    check_batches,
    check_eager,
    check_finite,
    check_loss,
    check_trainer,
)
from .contract.config import ModelConfig, TrainConfig
from .contract.memory import keep_freed_memory
from .contract.progress import fit_bar
from .contract.saving import Saver, whole
from .contract.schedule import learning_rate
from .contract.tensor_file import numpy_dtype
from .gradients.layers import loss_sum_and_gradient
from .gradients.model import model_backward
from .layers import loss_sum
from .model import Transformer, get_params, set_params
from .optimizer import clip, global_norm, initial_state, update
from .random import fold_in, key
from .rounding import rounded

log = logging.getLogger(__name__)

Batch = Mapping[str, Any]
# The names of a batch's fields in a call of the model.
CALL = {name: name for name in ("segments", "positions", "context", "context_lengths")} | {"lengths": "kv_lengths"}


def loss_and_gradients(
    model: Transformer,
    batch: Batch,
    *,
    dropout_key: np.ndarray | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[float, dict[str, np.ndarray]]:
    """The mean loss over counted targets, and its gradient for every parameter by canonical name.

    batch: tokens (B, T), targets (B, T) or (B,), and optional lengths (B,), segments (B, T), positions, context,
    context_lengths. Gradients have their parameter's shape and dtype, rounded once from float64. Refused:
    `contract.checks.training.check_batch`. Rules: training-1, training-2.
    """
    check_owner(model, isinstance(model, Transformer), "core_numpy")
    arrays = _arrays(batch)
    check_batch(model.config, arrays, dropout_key=dropout_key, dtype=model.dtype, values=np.asarray)
    check_loss_options(label_smoothing, z_loss)
    total, counted, grads = _sums(model, arrays, dropout_key, label_smoothing, z_loss)
    own = model.parameters()
    return total / max(counted, 1), {name: rounded(g / max(counted, 1), own[name].dtype) for name, g in grads.items()}


def _arrays(batch: Any) -> Any:
    """The batch with its fields as NumPy arrays; what is no dict, and fields that are lists, go on to the check."""
    if not isinstance(batch, Mapping):
        return batch
    return {name: x if isinstance(x, list | tuple) else np.asarray(x) for name, x in batch.items()}


def _sums(
    model: Transformer,
    batch: dict[str, np.ndarray],
    dropout_key: np.ndarray | None,
    label_smoothing: float,
    z_loss: float,
    *,
    remat: bool = False,
) -> tuple[float, int, dict[str, np.ndarray]]:
    """The sum of the counted losses, their number, and the sum's gradients in float64."""
    keep_freed_memory()
    options = (IGNORED, label_smoothing, z_loss)
    call: dict[str, Any] = {CALL[name]: x for name, x in batch.items() if name in CALL}
    # NaN and infinity are found at the end, by name.
    with np.errstate(over="ignore", invalid="ignore"):
        logits, kept = model.run(batch["tokens"], **call, dropout_key=dropout_key, keep=not remat)
        total, counted, grad = loss_sum_and_gradient(logits, batch["targets"], *options)
        grads = model_backward(model, grad, kept)
    return total, counted, grads


class Trainer:
    """Updates a model's parameters, batch by batch; the model is changed in place.

    model: a Transformer of dtype float32 (float64 for precision "float64"); config: a TrainConfig. `updates` counts the
    finished updates, `batches` the batches taken, left-out ones included: where the data go on after `load`. `state`
    holds the optimiser's slots by name. Refused: `contract.checks.training.check_trainer`.
    Rules: training-1 to training-8, optimizer-1 to optimizer-6.
    """

    def __init__(self, model: Transformer, config: TrainConfig) -> None:
        check_trainer(model, config)
        check_owner(model, isinstance(model, Transformer), "core_numpy")
        check_eager(config)
        self.model, self.config, self.updates, self.batches = model, config, 0, 0
        self.state = initial_state(config, model.parameters())
        self._saver = Saver()
        # A float16 run's loss scale, which this trainer has no use for and hands on.
        self._scale: dict[str, Any] = {}

    @whole()
    def step(self, batch: Batch) -> dict[str, Any]:
        """One update: {"loss", "grad_norm" before clipping, "lr", "tokens" counted}."""
        self._saver.check()
        config, arrays, t = self.config, _arrays(batch), self.updates + 1
        check_batch(self.model.config, arrays, dropout_key=None, dtype=self.model.dtype, values=np.asarray)
        loss, counted, grads = self._gradients(arrays, t)
        with np.errstate(over="ignore", invalid="ignore"):
            norm, lr = global_norm(grads), learning_rate(config, t)
        report = {"loss": loss, "grad_norm": norm, "lr": lr, "tokens": counted}
        if not np.isfinite(norm):
            # A norm can overflow where no gradient is infinite; then all of them are named.
            names = [name for name, g in grads.items() if not np.isfinite(g).all()] or list(grads)
            if config.nonfinite == "stop":
                check_finite(t, names, self._saver.last)
            log.warning("update %d left out: gradients that are not finite in %s", t, ", ".join(names[:5]))
            self.batches += 1
            return report
        params = self.model.parameters()
        grads = clip(grads, norm, config.clip_norm)
        params, self.state = update(config, params, grads, self.state, t=t, lr=lr)
        self.model.assign(params)
        self.updates, self.batches = t, self.batches + 1
        return report

    def _gradients(self, batch: dict[str, np.ndarray], t: int) -> tuple[float, int, dict[str, np.ndarray]]:
        """The mean loss, the counted targets and the mean's gradients, over all micro-batches. Rules: training-1."""
        config, model = self.config, self._working()
        rows = len(batch["tokens"])
        check_accumulation(rows, config.accumulate)
        each = rows // config.accumulate
        loss, counted, grads = 0.0, 0, {name: np.zeros(p.shape) for name, p in model.parameters().items()}
        for m in range(config.accumulate):
            part = {name: _rows(name, x, slice(m * each, (m + 1) * each)) for name, x in batch.items()}
            drop_key = fold_in(fold_in(key(config.seed), t), m) if model.config.dropout else None
            total, number, sums = _sums(
                model, part, drop_key, config.label_smoothing, config.z_loss, remat=config.remat
            )
            loss, counted = loss + total, counted + number
            grads = {name: g + sums[name] for name, g in grads.items()}
        return loss / max(counted, 1), counted, {name: g / max(counted, 1) for name, g in grads.items()}

    def _working(self) -> Transformer:
        """The model whose parameters are rounded to the precision. Rules: training-5."""
        if self.config.precision in ("float32", "float64"):
            return self.model
        dtype = numpy_dtype(self.config.precision)
        working = Transformer.__new__(Transformer)
        cast = {name: rounded(p, dtype) for name, p in self.model.parameters().items()}
        working.assemble(self.model.config, cast, self.config.precision)
        return working

    def fit(self, batches: Iterable[Batch], steps: int | None = None, progress: bool = True) -> list[dict[str, Any]]:
        """A step for each batch, until `steps` of them, or without a number until update `config.steps`."""
        check_batches(batches)
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

    def evaluate(self, batches: Iterable[Batch]) -> dict[str, Any]:
        """{"loss", "tokens"} over all batches. Rules: training-8."""
        check_batches(batches)
        loss, counted, model = 0.0, 0, self._working()
        for batch in batches:
            arrays = _arrays(batch)
            check_batch(model.config, arrays, dropout_key=None, dtype=model.dtype, values=np.asarray)
            call: dict[str, Any] = {CALL[name]: x for name, x in arrays.items() if name in CALL}
            with np.errstate(over="ignore", invalid="ignore"):
                logits, _ = model.run(arrays["tokens"], **call, keep=False)
                total, number = loss_sum(logits, arrays["targets"], IGNORED, 0.0, 0.0)
            check_loss(total, lambda: get_params(self.model))
            loss, counted = loss + total, counted + number
        return {"loss": loss / max(counted, 1), "tokens": counted}

    @property
    def ema(self) -> dict[str, np.ndarray] | None:
        """The averaged parameters as NumPy arrays under canonical names, for `set_params`; None without an average."""
        return {name: x.copy() for name, x in self.state["ema"].items()} if "ema" in self.state else None

    def save(self, path: str | os.PathLike[str], *, background: bool = False) -> Path:
        """Write a checkpoint into the folder `path`, which any backend's `Trainer.load` reads; gives its own path.

        In the background a thread writes what the state is now; an error comes from the next step, `save` or `wait`.
        """
        return self._saver.save(
            path, background=background, step=self.updates, params=get_params(self.model),
            state={slot: {name: x.copy() for name, x in arrays.items()} for slot, arrays in self.state.items()},
            config=self.model.config, train_config=self.config,
            extra={"backend": "core_numpy", "batches": self.batches, **self._scale},
        )  # fmt: skip

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
    ) -> Trainer:
        """A trainer as it was saved, by whichever backend: the newest checkpoint of the folder, or the one named.

        How it is laid out over devices is said here, and NumPy has one; a checkpoint has no layout.
        With `train_config` or `model_config` a checkpoint of another one is refused with the fields that differ.
        """
        found = read_checkpoint(path, train_config=train_config, model_config=model_config)
        dtype = "float64" if found.train_config.precision == "float64" else "float32"
        model = Transformer(found.config, dtype=dtype, device=device)
        set_params(model, found.params)
        config = found.train_config.replace(parallel=parallel)
        # How a step is compiled changes no number: it is kept for whoever has a compiler and goes on from here.
        trainer = cls(model, config.replace(compile="auto"))
        trainer.config = config
        expected = {name: (p.shape, p.dtype.name) for name, p in model.parameters().items()}
        for slot in trainer.state:
            check_params(expected, found.state.get(slot, {}))
        trainer.state = {slot: {name: found.state[slot][name] for name in expected} for slot in trainer.state}
        trainer.updates, trainer._saver = found.step, Saver(found.path)
        trainer.batches = int(found.extra.get("batches", found.step))
        trainer._scale = {n: found.extra[n] for n in ("loss_scale", "loss_scale_steps") if n in found.extra}
        return trainer


def _rows(name: str, x: np.ndarray, rows: slice) -> np.ndarray:
    """A micro-batch's part of a field; positions (T,) belong to every row."""
    return x if name == "positions" and x.ndim == 1 else x[rows]
