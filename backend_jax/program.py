"""What is compiled of training: the loss, and an update of a trainer. Rules: core_numpy.training.

One update is one program over donated parameters and moments: forward, backward, accumulation, clipping, the
optimiser, the average. It is traced once for each set of batch fields and shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from core_numpy.contract.checks.training import IGNORED
from core_numpy.contract.config import TrainConfig

from . import optimizer, random
from .folding import axes_of
from .layers import cross_entropy_sum
from .model import Transformer

Arrays = dict[str, jax.Array]


class Loss(NamedTuple):
    """How a model's loss is computed: static in a compiled step."""

    graph: nnx.GraphDef
    compute: str
    label_smoothing: float
    z_loss: float

    def total(self, params: Arrays, batch: Arrays, key: jax.Array | None) -> jax.Array:
        """The sum of the losses of a batch's counted targets."""
        model = restored(self.graph, {name: p.astype(self.compute) for name, p in params.items()})
        logits = model.compute(
            batch["tokens"],
            kv_lengths=batch.get("lengths"),
            dropout_key=key,
            **{name: batch[name] for name in ("segments", "positions", "context", "context_lengths") if name in batch},
        )
        return cross_entropy_sum(
            logits, batch["targets"], ignore_index=IGNORED, label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
        )[0]  # fmt: skip

    def total_and_count(self, params: Arrays, batch: Arrays) -> tuple[jax.Array, jax.Array]:
        """For evaluation: what the batches' means are made of."""
        return self.total(params, batch, None), _counted(batch)


@partial(jax.jit, static_argnames="loss")
def value_and_gradients(loss: Loss, params: Arrays, batch: Arrays, key: jax.Array | None) -> tuple[jax.Array, Arrays]:
    """The mean loss and its gradients, compiled."""
    divisor = jnp.maximum(_counted(batch), 1)
    return jax.value_and_grad(lambda p: loss.total(p, batch, key) / divisor)(params)


class Program:
    """What is compiled of a trainer; trainers of equal models and configurations share it."""

    def __init__(
        self, graph: nnx.GraphDef, config: TrainConfig, dropout: bool, shardings: dict[str, Any] | None = None,
        folded: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        """shardings: how parameters lie over devices, which new ones and the moments then do as well.

        folded: the names of those that have a leading axis of layers.
        """
        self.config, self.dropout, self.traces, self.shardings = config, dropout, 0, shardings
        self.folded = folded
        self.loss = Loss(graph, config.precision, config.label_smoothing, config.z_loss)
        self.dtype = "float64" if config.precision == "float64" else "float32"
        plain = Loss(graph, config.precision, 0.0, 0.0).total_and_count
        eager = config.compile is False
        self.step: Callable = self._update if eager else jax.jit(self._update, donate_argnums=(0, 1))
        self.evaluate: Callable = plain if eager else jax.jit(plain)

    def _update(
        self,
        params: Arrays,
        state: dict[str, Arrays],
        batch: Arrays,
        t: jax.Array,
        lr: jax.Array,
        loss_scale: jax.Array,
    ) -> tuple[Arrays, dict[str, Arrays], dict[str, Any]]:
        """What is compiled: new parameters, new state, and what the step reports."""
        self.traces += 1
        config = self.config
        tokens = _counted(batch)
        # Cast before dividing: an int32 count and a float32 scale would give float32 to a float64 loss.
        factor = loss_scale / jnp.maximum(tokens, 1).astype(self.dtype)
        key = random.fold_in(random.key(config.seed), t) if self.dropout else None

        def gradients(micro: Arrays, m: Any) -> tuple[jax.Array, Arrays]:
            own = None if key is None else random.fold_in(key, m)
            return jax.value_and_grad(lambda p: self.loss.total(p, micro, own).astype(self.dtype) * factor)(params)

        loss, grads = _accumulated(gradients, params, batch, config.accumulate)
        if config.precision == "float16":
            loss, grads = loss / loss_scale, {name: g / loss_scale for name, g in grads.items()}
        norm, unit, squares = optimizer.norm_of(grads, self._square_sums)
        grads = optimizer.clip(grads, norm, config.clip_norm, unit=unit)
        fresh, after = self._optimised(params, grads, state, t, lr)
        # Selected in the same loops that compute the update; a step that is left out changes nothing.
        fresh, after = jax.tree.map(partial(jnp.where, jnp.isfinite(norm)), (fresh, after), (params, state))
        if self.shardings is not None:
            laid_out = (self.shardings, dict.fromkeys(after, self.shardings))
            fresh, after = jax.lax.with_sharding_constraint((fresh, after), laid_out)
        return fresh, after, {
            "loss": loss, "grad_norm": norm, "unit": unit, "tokens": tokens, "squares": squares
        }  # fmt: skip

    # The optimiser is told of one layer at a time, whose axes say what decays, and runs over all in one loop.

    def _square_sums(self, grads: Arrays) -> tuple[Arrays, Arrays]:
        """Each layer's sum of squares, and those of arrays."""
        if not self.folded:
            squares = optimizer.square_sums(grads)
            return squares, squares
        axes = axes_of(grads, self.folded)
        squares = jax.vmap(optimizer.square_sums, in_axes=(axes,), out_axes=axes)(grads)
        return squares, {name: jnp.sum(x) for name, x in squares.items()}

    def _optimised(
        self, params: Arrays, grads: Arrays, state: dict[str, Arrays], t: jax.Array, lr: jax.Array
    ) -> tuple[Arrays, dict[str, Arrays]]:
        update = partial(optimizer.update, self.config, t=t, lr=lr)
        if not self.folded:
            return update(params, grads, state)
        axes = axes_of(params, self.folded)
        slots = dict.fromkeys(state, axes)
        return jax.vmap(update, in_axes=(axes, axes, slots), out_axes=(axes, slots))(params, grads, state)


# The key is everything that the program depends on. Eight: enough to compare a few models, and executables are large.
shared_program = lru_cache(maxsize=8)(Program)


def traced(config: TrainConfig, dropout: bool) -> tuple[TrainConfig, bool]:
    """The key's part of a TrainConfig: what only the host reads (the rate is an argument of the step) has one value."""
    host = {"steps": 0, "batch": config.accumulate, "lr": 0.0, "schedule": "constant", "warmup": 0, "final_lr": 0.0}
    host |= {"decay_steps": None, "nonfinite": "stop", "seed": config.seed if dropout else 0}
    return config.replace(**host), dropout


def _accumulated(gradients: Callable, params: Arrays, batch: Arrays, count: int) -> tuple[jax.Array, Arrays]:
    """The sum over micro-batches, rows m n to (m + 1) n - 1 each, in a loop that is compiled once."""
    if count == 1:
        return gradients(batch, np.uint32(0))
    micros = {
        # Positions (T,) belong to every row.
        name: jnp.broadcast_to(x, (count, *x.shape))
        if name == "positions" and x.ndim == 1
        else x.reshape(count, x.shape[0] // count, *x.shape[1:])
        for name, x in batch.items()
    }

    def add(total: Any, item: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, gradients(*item)), None

    zero = (jnp.zeros((), next(iter(params.values())).dtype), jax.tree.map(jnp.zeros_like, params))
    return jax.lax.scan(add, zero, (micros, jnp.arange(count, dtype=jnp.uint32)))[0]


def restored(graph: nnx.GraphDef, params: Arrays) -> Transformer:
    """The module of a graph with these arrays as its parameters."""
    paths: Any = {
        tuple(int(part) if part.isdigit() else part for part in name.split(".")): nnx.Param(p)
        for name, p in params.items()
    }
    return nnx.merge(graph, nnx.from_flat_state(paths))


def _counted(batch: Arrays) -> jax.Array:
    return jnp.sum(batch["targets"] != IGNORED)
