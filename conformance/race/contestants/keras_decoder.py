"""Keras 3 on torch and on JAX: its MultiHeadAttention, LayerNormalization, Dense and Embedding.

On each it trains in the backend's own loop, as Keras's guides "custom training loop in torch / in JAX" have it: the
backend's optimiser is then the other contestants' too, and Keras's `fit` would be measured with its bookkeeping.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..task import Task
from .base import Contestant, Running


def _model(task: Task) -> Any:
    """The decoder as a functional model with the task's weights."""
    import keras

    config = task.model

    def norm(name: str) -> Any:
        return keras.layers.LayerNormalization(epsilon=config.norm_eps, name=name)

    class Positions(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            del shape
            self.table = self.add_weight(shape=(config.max_length, config.width), name="positions")

        def call(self, x: Any) -> Any:
            return x + self.table[: x.shape[1]]

    tokens = keras.Input((task.length,), dtype="int32")
    x = Positions(name="positions")(keras.layers.Embedding(config.vocab, config.width, name="embedding")(tokens))
    for i in range(config.layers):
        y = norm(f"block{i}_norm1")(x)
        attention = keras.layers.MultiHeadAttention(config.heads, config.key_size, name=f"block{i}_attention")
        x = x + attention(y, y, use_causal_mask=True)
        y = keras.layers.Dense(config.hidden_size, name=f"block{i}_up")(norm(f"block{i}_norm2")(x))
        y = keras.activations.gelu(y, approximate=False)
        x = x + keras.layers.Dense(config.width, name=f"block{i}_down")(y)
    logits = keras.layers.Dense(config.vocab, use_bias=False, name="head")(norm("norm")(x))
    model = keras.Model(tokens, logits)
    for name, arrays in _weights(task).items():
        model.get_layer(name).set_weights(arrays)
    return model


def _weights(task: Task) -> dict[str, list[np.ndarray]]:
    """Layer -> its arrays in Keras's order, heads apart in attention."""
    given, heads, size = task.params(), task.model.heads, task.model.key_size

    def pair(name: str) -> list[np.ndarray]:
        return [given[f"{name}.weight"], given[f"{name}.bias"]]

    own = {"embedding": [given["embedding.weight"]], "positions": [given["positions.weight"]], "norm": pair("norm"),
           "head": [given["head.weight"]]}  # fmt: skip
    for i in range(task.model.layers):
        at = f"blocks.{i}."
        own[f"block{i}_norm1"], own[f"block{i}_norm2"] = pair(f"{at}norm1"), pair(f"{at}norm2")
        own[f"block{i}_up"], own[f"block{i}_down"] = pair(f"{at}ffn.up"), pair(f"{at}ffn.down")
        arrays: list[np.ndarray] = []
        for name in ("query", "key", "value"):
            kernel, bias = pair(f"{at}attention.{name}")
            arrays += [kernel.reshape(-1, heads, size), bias.reshape(heads, size)]
        kernel, bias = pair(f"{at}attention.output")
        own[f"block{i}_attention"] = [*arrays, kernel.reshape(heads, size, -1), bias]
    return own


def _decays(path: str) -> bool:
    return path.rsplit("/", 1)[-1] not in ("bias", "gamma", "beta")


def build_torch(task: Task) -> Running:
    import torch

    from ._torch import running

    torch.set_default_device(task.device)
    model = _model(task)
    named = {variable.path: variable.value for variable in model.trainable_variables}
    return running(
        model,
        lambda tokens: model(tokens, training=True),
        task,
        compiled=False,
        parameters=named,
        decaying=lambda path, p: _decays(path),
    )


def build_jax(task: Task) -> Running:
    from ._jax import running

    model = _model(task)
    paths = [variable.path for variable in model.trainable_variables]
    fixed = [variable.value for variable in model.non_trainable_variables]
    # A tree whose last key says what may decay.
    params = {path: variable.value for path, variable in zip(paths, model.trainable_variables, strict=True)}

    def logits(params: dict[str, Any], tokens: Any) -> Any:
        return model.stateless_call([params[path] for path in paths], fixed, tokens, training=True)[0]

    return running(params, logits, task)


CONTESTANTS = [
    Contestant("keras-torch", build_torch, ("torch", "keras"), "Keras 3 on torch, eager, torch's AdamW", "torch",
               environment=(("KERAS_BACKEND", "torch"),)),
    Contestant("keras-jax", build_jax, ("jax", "keras", "optax"), "Keras 3 on JAX, stateless_call, optax, jit", "jax",
               True, environment=(("KERAS_BACKEND", "jax"),)),
]  # fmt: skip
