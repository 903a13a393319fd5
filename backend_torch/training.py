"""Loss, gradients and the training loop. Rules: core_numpy.training.

Native: parameters and gradients lie in one flat buffer each (`optimizer.Flat`); in half precision the pass runs on a
cast copy by `torch.func.functional_call`, and float16 has a dynamic loss scale; `remat` is `torch.utils.checkpoint`;
`compile` is `torch.compile`. A step reads from the device once, loss and norm together.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from core_numpy.contract.checks.common import require_int
from core_numpy.contract.checks.layers import check_loss_options
from core_numpy.contract.checks.model import check_params
from core_numpy.contract.checks.training import (
    IGNORED,
    check_accumulation,
    check_batch,
    check_batches,
    check_finite,
    check_loss,
    check_trainer,
)
from core_numpy.contract.config import ModelConfig, TrainConfig
from core_numpy.contract.memory import keep_freed_memory
from core_numpy.contract.progress import fit_bar
from core_numpy.contract.saving import Saver, whole
from core_numpy.contract.schedule import learning_rate

from .arrays import from_numpy, to_numpy
from .batches import Batch, Tensors, counted_targets, host_arrays, rows_of, tensors
from .hooks import hooked
from .initial import turn
from .joint import Joint, joined, joints, side_by_side
from .layers import summed_cross_entropy
from .model import Transformer, get_params, named, set_params
from .modes import matmul_precision, mode, remat
from .optimizer import Flat, clip, global_norm, initial_state, not_finite, update
from .random import fold_in, key

# As in torch.amp.GradScaler: a start that overflows once or twice at most, and a doubling that costs one step in 2000.
FIRST_SCALE, GROWTH_STEPS = 2.0**16, 2000

log = logging.getLogger(__name__)


def loss_and_gradients(
    model: Transformer,
    batch: Batch,
    *,
    dropout_key: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[float, dict[str, np.ndarray]]:
    """The mean loss over counted targets, and its gradient for every parameter by canonical name, weights (in, out).

    Dropout acts with a key and not without, whatever mode the model is in. Rules: core_numpy.training.
    """
    own, arrays = named(model), host_arrays(batch)
    check_batch(model.config, arrays, dropout_key=dropout_key, dtype=model.dtype, values=np.asarray)
    check_loss_options(label_smoothing, z_loss)
    leaves = [p for p in own.values() if p.requires_grad]
    with mode(model, dropout_key is not None):
        total = loss_sum(model, *tensors(arrays, _device(model)), dropout_key, label_smoothing, z_loss)
    loss = total / max(counted_targets(arrays), 1)
    grads = dict(zip([name for name, p in own.items() if p.requires_grad], _differentiate(loss, leaves), strict=True))
    return loss.item(), {
        name: to_numpy(turn(model, name, grads[name] if name in grads else torch.zeros_like(p)))
        for name, p in own.items()
    }


class Trainer:
    """Updates a model's parameters, batch by batch, in place. Rules: core_numpy.training, core_numpy.optimizer.

    The parameters become views into one buffer; move the model to another device before, not after. `updates` counts
    the finished updates, `batches` the batches taken, left-out ones included. `state` holds the optimiser's slots as
    buffers of the same layout.
    """

    def __new__(cls, model: Transformer, config: TrainConfig) -> Trainer:
        if cls is Trainer and isinstance(config, TrainConfig) and config.parallel is not None:
            from .parallel import ParallelTrainer

            return super().__new__(ParallelTrainer)
        return super().__new__(cls)

    def __init__(self, model: Transformer, config: TrainConfig) -> None:
        check_trainer(model, config)
        self.model, self.config, self.updates, self.batches = model, config, 0, 0
        self.flat = self._flatten()
        self.grads = self.flat.like()
        self.state = initial_state(config, self.flat)
        self._low: Tensor | None = None
        self.loss_scale, self._good = (FIRST_SCALE if config.precision == "float16" else 1.0), 0
        if config.precision in ("float32", "float64"):
            own: Mapping[str, Tensor] = named(model)
        else:
            self._low = torch.empty_like(self.flat.data, dtype=getattr(torch, config.precision))
            own = {name: view.detach().requires_grad_() for name, view in self.flat.views(self._low).items()}
        # In the order of the flat buffer.
        self._leaves = {name: own[name] for name in self.flat.places}
        self._joints = joints(model, self.flat) if self._low is None and config.parallel is None else {}
        self._places = self._gradient_places({}), self._gradient_places(self._joints)
        self.compiled = _wants_compiler(config, self.flat.data.device)
        self._loss = torch.compile(loss_sum) if self.compiled else loss_sum
        self._saver = Saver()

    @whole()
    def step(self, batch: Batch) -> dict[str, Any]:
        """One update: {"loss", "grad_norm" before clipping, "lr", "tokens" counted}."""
        self._saver.check()
        config, arrays, t = self.config, host_arrays(batch), self.updates + 1
        check_batch(self.model.config, arrays, dropout_key=None, dtype=self.model.dtype, values=np.asarray)
        check_accumulation(len(arrays["tokens"]), config.accumulate)
        counted, lr = counted_targets(arrays), learning_rate(config, t)
        with matmul_precision(config):
            mean = self._gradients(arrays, t, max(counted, 1))
            loss, norm = torch.stack([mean, self._norm(self.grads)]).tolist()
        report = {"loss": loss, "grad_norm": norm, "lr": lr, "tokens": counted}
        if not np.isfinite(norm):
            names = self._not_finite()
            # Where every gradient is finite and only their squares are not, float64 holds these, or nothing does.
            report["grad_norm"] = norm = norm if names else float(self._norm(self.grads.double()))
            if not np.isfinite(norm):
                return self._refuse(report, names or list(self.flat.places))
        clip(self.grads, norm, config.clip_norm)
        update(config, self.flat, self.grads, self.state, t=t, lr=lr)
        self._publish()
        if self.grads.device.type == "cpu":
            keep_freed_memory()  # of steps, and not what compilers need before the first has ended
        self.updates, self.batches = t, self.batches + 1
        self._good += 1
        if config.precision == "float16" and self._good == GROWTH_STEPS:
            self.loss_scale, self._good = 2.0 * self.loss_scale, 0
        return report

    # What a trainer on several devices does otherwise (parallel.ParallelTrainer).

    def _flatten(self) -> Flat:
        """The parameters of this process, moved into one buffer."""
        return Flat.of(named(self.model))

    def _differentiate(self, loss: Tensor, leaves: Iterable[Tensor]) -> list[Tensor]:
        """The gradients of this process."""
        return _differentiate(loss, leaves)

    def _gradient_places(self, joints: Mapping[nn.Module, Joint]) -> tuple[list[Tensor], list[Tensor]]:
        """What is differentiated by, and where each gradient belongs."""
        leaves, views = dict(self._leaves), self.flat.views(self.grads)
        for joint in joints.values():
            for parts, leaf in joint.leaves.items():
                for name in parts:
                    del leaves[name], views[name]
                leaves["+".join(parts)], views["+".join(parts)] = leaf, side_by_side(self.flat, self.grads, parts)
        return list(leaves.values()), list(views.values())

    def _as_spread(self, parameter: Tensor, held: Tensor) -> Tensor:
        """What this process holds of something that lies over devices as a parameter does: on one device, all of it."""
        return held

    def _norm(self, grads: Tensor) -> Tensor:
        return global_norm(grads)

    def _not_finite(self) -> list[str]:
        return list(not_finite(self.flat, self.grads))

    def _publish(self) -> None:
        """Bring the new parameters to where the model has them: on one device they are there."""

    def _refuse(self, report: dict[str, Any], names: list[str]) -> dict[str, Any]:
        """Leave an update out: a float16 overflow halves the loss scale, else the configuration decides."""
        t = self.updates + 1
        if self.loss_scale > 1.0:
            self.loss_scale, self._good = self.loss_scale / 2.0, 0
            log.warning("update %d left out: float16 gradients overflowed; the loss scale is %g", t, self.loss_scale)
        elif self.config.nonfinite == "stop":
            check_finite(t, names, self._saver.last)
        else:
            log.warning("update %d left out: gradients that are not finite in %s", t, ", ".join(names[:5]))
        self.batches += 1
        return report

    def _gradients(self, arrays: dict[str, np.ndarray], t: int, counted: int) -> Tensor:
        """The mean loss, not yet read, with the mean's gradients in `self.grads`, over all micro-batches."""
        each, device = len(arrays["tokens"]) // self.config.accumulate, self.flat.data.device
        root = fold_in(key(self.config.seed).to(device), t) if self.model.config.dropout else None
        parts = (
            {name: rows_of(name, x, slice(m * each, (m + 1) * each)) for name, x in arrays.items()}
            for m in range(self.config.accumulate)
        )
        return self.accumulate((tensors(part, device) for part in parts), root, counted)

    def accumulate(self, parts: Iterable[Tensors], root: Tensor | None, counted: int) -> Tensor:
        """`_gradients` of micro-batches that are on the device: nothing here is read on the host."""
        config = self.config
        mean = torch.zeros((), dtype=self.grads.dtype, device=self.flat.data.device)
        with mode(self.model, True), remat(self.model, config.remat), joined(self._joints) as joint:
            target, (leaves, views) = self._module(), self._places[joint]
            for m, part in enumerate(parts):
                loss = self._loss(
                    target, *part, None if root is None else fold_in(root, m), config.label_smoothing, config.z_loss
                ) / counted  # fmt: skip
                grads = self._differentiate(loss if self.loss_scale == 1.0 else loss * self.loss_scale, leaves)
                if m == 0:
                    torch._foreach_copy_(views, grads)
                else:
                    torch._foreach_add_(views, [g.to(self.grads.dtype) for g in grads])
                mean = mean + loss.detach()
        if self.loss_scale != 1.0:
            self.grads.mul_(1.0 / self.loss_scale)
        return mean

    def _module(self) -> Any:
        """The call of the model, or in half precision with its parameters cast."""
        if self._low is None:
            return self.model if self.compiled or hooked(self.model) else self.model.unchecked
        with torch.no_grad():
            self._low.copy_(self.flat.data)
        return Cast(self.model, self._leaves)

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

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> dict[str, Any]:
        """{"loss", "tokens"} over all batches. Rules: core_numpy.training."""
        check_batches(batches)
        device, total, counted = self.flat.data.device, 0.0, 0
        with mode(self.model, False), matmul_precision(self.config):
            target = self._module()
            for batch in batches:
                arrays = host_arrays(batch)
                check_batch(self.model.config, arrays, dropout_key=None, dtype=self.model.dtype, values=np.asarray)
                loss = float(loss_sum(target, *tensors(arrays, device), None, 0.0, 0.0))
                check_loss(loss, lambda: get_params(self.model))
                total += loss
                counted += counted_targets(arrays)
        return {"loss": total / max(counted, 1), "tokens": counted}

    @property
    def ema(self) -> dict[str, np.ndarray] | None:
        """The averaged parameters as NumPy arrays under canonical names, for `set_params`; None without an average."""
        if "ema" not in self.state:
            return None
        views = self.flat.views(self.state["ema"])
        return {
            name: to_numpy(turn(self.model, name, self._as_spread(p, views[name])))
            for name, p in named(self.model).items()
        }

    def save(self, path: str | os.PathLike[str], *, background: bool = False) -> Path:
        """Write a checkpoint into the folder `path`, which any backend's `Trainer.load` reads; gives its own path.

        In the background a thread writes what the state is now, already on the host; an error comes from the next
        step, `save` or `wait`.
        """
        state = {
            slot: {name: to_numpy(turn(self.model, name, x)) for name, x in self.flat.views(buffer).items()}
            for slot, buffer in self.state.items()
        }
        return self._saver.save(path, background=background, **self._snapshot(get_params(self.model), state))

    def wait(self) -> None:
        """Return once the save in the background is on the disk; raise what it failed with."""
        self._saver.wait()

    def _snapshot(self, params: dict[str, np.ndarray], state: dict[str, dict[str, np.ndarray]]) -> dict[str, Any]:
        """What a checkpoint holds, given the arrays. It has no layout."""
        extra = {
            "backend": "backend_torch", "batches": self.batches, "loss_scale": self.loss_scale,
            "loss_scale_steps": self._good,
        }  # fmt: skip
        return {"step": self.updates, "params": params, "state": state, "config": self.model.config,
                "train_config": self.config.replace(parallel=None), "extra": extra}  # fmt: skip

    def _fill(self, slot: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Copy what was stored into a slot of the optimiser."""
        for name, view in self.flat.views(self.state[slot]).items():
            view.copy_(turn(self.model, name, from_numpy(arrays[name])))

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

        How it is laid out over devices is said here; a checkpoint has no layout.
        With `train_config` or `model_config` a checkpoint of another one is refused with the fields that differ.
        """
        from core_numpy.contract.checkpoints import read_checkpoint

        found = read_checkpoint(path, train_config=train_config, model_config=model_config)
        dtype = "float64" if found.train_config.precision == "float64" else "float32"
        model = Transformer(found.config, dtype=dtype, device=device)
        set_params(model, found.params)
        trainer = cls(model, found.train_config.replace(parallel=parallel))
        expected = {name: (tuple(x.shape), x.dtype.name) for name, x in found.params.items()}
        for slot in trainer.state:
            check_params(expected, found.state.get(slot, {}))
            trainer._fill(slot, found.state[slot])
        trainer.updates, trainer._saver = found.step, Saver(found.path)
        trainer.batches = int(found.extra.get("batches", found.step))
        trainer.loss_scale = float(found.extra.get("loss_scale", trainer.loss_scale))
        trainer._good = int(found.extra.get("loss_scale_steps", 0))
        return trainer


class Cast:
    """A model that is called with other tensors in its parameters' place."""

    def __init__(self, model: Transformer, tensors: dict[str, Tensor]) -> None:
        self.model, self.tensors = model, tensors

    def __call__(self, tokens: Tensor, **arguments: Any) -> Tensor:
        return torch.func.functional_call(self.model, self.tensors, (tokens,), arguments)


def loss_sum(
    model: Any,
    tokens: Tensor,
    targets: Tensor,
    call: dict[str, Tensor],
    all_counted: bool,
    dropout_key: Tensor | None,
    label_smoothing: float,
    z_loss: float,
) -> Tensor:
    """The sum of the counted losses of a batch."""
    logits = model(tokens, **call, dropout_key=dropout_key)
    return summed_cross_entropy(logits, targets, None if all_counted else IGNORED, label_smoothing, z_loss)


def _differentiate(loss: Tensor, leaves: Iterable[Tensor]) -> list[Tensor]:
    # A part that took no part (a model of no layers, say) has the gradient 0.
    return list(torch.autograd.grad(loss, tuple(leaves), allow_unused=True, materialize_grads=True))


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def _wants_compiler(config: TrainConfig, device: torch.device) -> bool:
    """On request; without one where it pays, on a GPU with Triton. What "auto" chose is said in the log."""
    if config.compile != "auto":
        return bool(config.compile)
    from torch.utils._triton import has_triton

    compiled = device.type == "cuda" and has_triton()
    log.info("compile='auto' on %s: %s", device.type, "torch.compile" if compiled else "eager")
    return compiled
