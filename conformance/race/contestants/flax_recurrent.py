"""`flax.nnx`'s LSTM and GRU under `nnx.RNN`, a scan, in the place of the blocks."""

from __future__ import annotations

from typing import Any

from ..task import Task
from .base import Contestant, Running


def build(task: Task) -> Running:
    import jax
    from flax import nnx

    from ._jax import running
    from ._recurrent import weights

    config, lstm, given, rngs = task.model, task.architecture == "lstm", weights(task), nnx.Rngs(0)

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.embedding = nnx.Embed(config.vocab, config.width, rngs=rngs)
            kind = nnx.OptimizedLSTMCell if lstm else nnx.GRUCell
            cells = [kind(config.width, config.width, keep_rngs=False, rngs=rngs) for _ in range(config.layers)]
            self.layers = nnx.List([nnx.RNN(cell) for cell in cells])
            self.head = nnx.Linear(config.width, config.vocab, use_bias=False, rngs=rngs)

        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = self.embedding(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    model = Model()
    model.embedding.embedding.set_value(jax.numpy.asarray(given["embedding.weight"]))
    model.head.kernel.set_value(jax.numpy.asarray(given["head.weight"]))
    for i, layer in enumerate(model.layers):
        cell: Any = layer.cell
        cell.dense_i.kernel.set_value(jax.numpy.asarray(given[f"{i}.input"]))
        cell.dense_h.kernel.set_value(jax.numpy.asarray(given[f"{i}.state"]))
        (cell.dense_h if lstm else cell.dense_i).bias.set_value(jax.numpy.asarray(given[f"{i}.bias"]))
    # The generators that `nnx.RNN` keeps for dropout are no parameters.
    state: tuple[Any, ...] = nnx.split(model, nnx.Param, ...)
    graph, params, rest = state
    other = nnx.to_pure_dict(rest)
    return running(nnx.to_pure_dict(params), lambda params, tokens: nnx.merge(graph, params, other)(tokens), task)


NEEDS = ("jax", "flax", "optax")
CONTESTANTS = [
    Contestant("jax-lstm", build, NEEDS, "flax.nnx OptimizedLSTMCell, jit", "jax", True, architectures=("lstm",)),
    Contestant("jax-gru", build, NEEDS, "flax.nnx GRUCell, jit", "jax", True, architectures=("gru",)),
]
