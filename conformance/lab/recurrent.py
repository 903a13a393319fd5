"""The rivals: the framework's own RNN, GRU and LSTM, its own optimiser. NumPy has none."""

from __future__ import annotations

import time
from typing import Any

from core_numpy.contract.data import Batch

from .common import accuracy, batches

WIDTH = 32  # of the digits' embedding
ROWS, RATE = 128, 1e-2  # at 3e-3 torch's LSTM, which starts without a bias to remember, needs several times the updates


def build(framework: str, kind: str, hidden: int) -> tuple[Any, Any]:
    """(model: tokens (B, T) -> logits (B, 2) from the last state, step: Batch -> None) in "torch" or "jax"."""
    return (_torch if framework == "torch" else _jax)(kind, hidden)


def _torch(kind: str, hidden: int, seed: int = 0) -> tuple[Any, Any]:
    import torch
    from torch import nn

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, WIDTH)
            self.layer = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}[kind](WIDTH, hidden, batch_first=True)
            self.head = nn.Linear(hidden, 2)

        def forward(self, tokens: Any) -> Any:
            return self.head(self.layer(self.embedding(tokens))[0][:, -1])

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Reader()
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        logits = model(torch.from_numpy(batch["tokens"]))
        nn.functional.cross_entropy(logits, torch.from_numpy(batch["targets"]).long()).backward()
        optimizer.step()

    return model, step


def _jax(kind: str, hidden: int, seed: int = 0) -> tuple[Any, Any]:
    import optax
    from flax import nnx

    class Reader(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            cell = {"rnn": nnx.SimpleCell, "gru": nnx.GRUCell, "lstm": nnx.OptimizedLSTMCell}[kind]
            self.embedding = nnx.Embed(10, WIDTH, rngs=rngs)
            self.layer = nnx.RNN(cell(WIDTH, hidden, rngs=rngs))
            self.head = nnx.Linear(hidden, 2, rngs=rngs)

        def __call__(self, tokens: Any) -> Any:
            return self.head(self.layer(self.embedding(tokens))[:, -1])

    def loss(model: Any, tokens: Any, targets: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(model(tokens), targets).mean()

    @nnx.jit
    def update(model: Any, optimizer: Any, tokens: Any, targets: Any) -> None:
        optimizer.update(model, nnx.grad(loss)(model, tokens, targets))

    model = Reader(nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, optax.adam(RATE), wrt=nnx.Param)
    return model, lambda batch: update(model, optimizer, batch["tokens"], batch["targets"])


def layer(B: Any, width: int) -> Any:
    """The framework's LSTM alone: x (B, T, width) -> (B, T, width); for JAX a function that can be jitted."""
    if B.__name__ == "backend_torch":
        import torch

        model = torch.nn.LSTM(width, width, batch_first=True)
        return torch.no_grad()(lambda x: model(x)[0])
    import jax
    from flax import nnx

    # Merged anew from plain arrays: a trace may not count on the generator of a module outside of it.
    graph, state = nnx.split(nnx.RNN(nnx.OptimizedLSTMCell(width, width, rngs=nnx.Rngs(0))))
    return lambda x: nnx.merge(graph, jax.tree.map(jax.numpy.asarray, state))(x)


def parameters(model: Any) -> int:
    """How many numbers the model learns."""
    if hasattr(model, "parameters"):
        return sum(p.numel() for p in model.parameters())
    import jax
    from flax import nnx

    return sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


def train_recurrent(B: Any, kind: str, hidden: int, train: Batch, valid: Batch, steps: int) -> tuple[float, int, float]:
    """Accuracy, parameters and the seconds of `steps` updates."""
    model, step = build("torch" if B.__name__ == "backend_torch" else "jax", kind, hidden)
    start = time.perf_counter()
    for batch in batches(train, ROWS, steps):
        step(batch)
    seconds = time.perf_counter() - start
    return accuracy(B, model, valid), parameters(model), seconds
