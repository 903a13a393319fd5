"""What the JAX peers share: optax's AdamW and one jitted, donating update, as flax's and optax's guides have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..task import Task
from .base import Batch, Running


def decays(path: Any, leaf: Any) -> bool:
    """Weights decay; biases, also those with an axis of heads, and norms do not."""
    del leaf
    names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]  # of dicts and of attributes
    last = names[-1].rsplit("/", 1)[-1]  # Keras's names are paths
    return last not in ("bias", "scale", "gamma", "beta") and not any(name.startswith("norm") for name in names)


def optimizer(task: Task) -> Any:
    """optax: clipping by the global norm, then AdamW whose decay leaves biases and norms alone."""
    config = task.train

    def mask(params: Any) -> Any:
        return jax.tree.map_with_path(decays, params)

    clipping = [] if config.clip_norm is None else [optax.clip_by_global_norm(config.clip_norm)]
    adamw = optax.adamw(config.lr, *config.betas, config.eps, weight_decay=config.weight_decay, mask=mask)
    return optax.chain(*clipping, adamw)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets).mean()


def compute_dtype(task: Task) -> Any:
    return jnp.dtype(task.precision)


def running(params: Any, logits: Callable[[Any, jax.Array], jax.Array], task: Task) -> Running:
    """A training step around logits(params, tokens (B, T)) -> (B, T, V)."""
    jax.config.update("jax_default_matmul_precision", task.train.matmul_precision)
    chain = optimizer(task)
    params = jax.tree.map(jnp.array, params)  # copies: a step donates them
    held = {"params": params, "state": chain.init(params)}

    def loss_of(params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        return cross_entropy(logits(params, tokens), targets)

    def update(params: Any, state: Any, tokens: jax.Array, targets: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, tokens, targets)
        updates, state = chain.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    jitted = jax.jit(update, donate_argnums=(0, 1))
    gradients, value = jax.jit(jax.value_and_grad(loss_of)), jax.jit(loss_of)

    def step(batch: Batch) -> jax.Array:
        held["params"], held["state"], loss = jitted(held["params"], held["state"], *arrays(batch))
        return loss

    def backward(batch: Batch) -> jax.Array:
        loss, held["grads"] = gradients(held["params"], *arrays(batch))
        return loss

    def forward(batch: Batch) -> jax.Array:
        return value(held["params"], *arrays(batch))

    return Running(step, lambda: jax.block_until_ready(held), backward, forward)


def arrays(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    return batch["tokens"], batch["targets"]


def heads_apart(given: dict[str, np.ndarray], prefix: str, task: Task) -> dict[str, dict[str, np.ndarray]]:
    """Query, key, value (C, H, D) with biases (H, D), and out (H, D, C), as flax and Keras store them."""
    heads, size = task.model.heads, task.model.key_size
    made = {}
    for name in ("query", "key", "value"):
        kernel, bias = given[f"{prefix}{name}.weight"], given[f"{prefix}{name}.bias"]
        made[name] = {"kernel": kernel.reshape(-1, heads, size), "bias": bias.reshape(heads, size)}
    out = given[f"{prefix}output.weight"].reshape(heads, size, -1)
    return made | {"out": {"kernel": out, "bias": given[f"{prefix}output.bias"]}}
