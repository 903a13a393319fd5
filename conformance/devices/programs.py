"""The JAX programs that are lowered and compiled: a training step, a forward pass, decoding, and every kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import backend_jax as B
from backend_jax.cache import _continue, _read
from backend_jax.kernels import KERNELS, lowering_for
from backend_jax.model import named_parameters
from backend_jax.optimizer import initial_state
from backend_jax.program import Program
from core_numpy.contract.config import ModelConfig, TrainConfig

# Every feature that lowers by itself: groups, rotary tables, a window, sinks, a soft cap, dropout.
MODEL = ModelConfig(
    vocab=256, width=64, heads=4, kv_heads=2, layers=2, max_length=64, positions="rotary", norm="rms",
    activation="swiglu", layer_windows=((8, 0), None), sinks=True, softcap=30.0, dropout=0.1, attention_bias=False,
)  # fmt: skip
TRAIN = TrainConfig(batch=4, accumulate=2, clip_norm=1.0, ema=0.99, z_loss=1e-4, label_smoothing=0.1)
ROWS, LENGTH = 4, 32
# What is also compiled for the CPU and run there. A key's bias has a gradient of rounding alone, which Adam makes a
# whole step, so there is none; compiling dropout's generator takes longer than all the rest.
SMALL = MODEL.replace(layers=1, layer_windows=None, window=(8, 0), dropout=0.0)


@dataclass(frozen=True)
class Item:
    """A program: `make` gives a function that nobody traced before, and what it is called with."""

    name: str
    make: Callable[[], tuple[Any, tuple[Any, ...]]]


def items(config: ModelConfig = MODEL) -> Iterator[Item]:
    """All programs, those of a model with this configuration."""
    for precision in ("float32", "bfloat16"):
        train = TRAIN.replace(precision=precision)
        yield Item(f"train step, {precision}", partial(train_step, config, train))
    yield Item("forward", partial(forward, config))
    yield Item("decode", partial(decode, config))
    for name in KERNELS:
        yield Item(f"kernel {name}", partial(kernel, name))


def batch(config: ModelConfig, rows: int, length: int) -> dict[str, np.ndarray]:
    """Ragged rows, from a seed; what is behind a row's end is not counted."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, length + 1, rows).astype(np.int32)
    tokens = rng.integers(0, config.vocab, (rows, length)).astype(np.int32)
    targets = np.where(np.arange(length) < lengths[:, None], np.roll(tokens, -1, 1), -100).astype(np.int32)
    return {"tokens": tokens, "targets": targets, "lengths": lengths}


def train_step(config: ModelConfig, train: TrainConfig) -> tuple[Any, tuple[Any, ...]]:
    """One whole update: loss, gradients over micro-batches, clipping, AdamW, the average."""
    model = B.Transformer(config)
    params = {name: p[...] for name, p in named_parameters(model).items()}
    program = Program(nnx.split(model)[0], train, config.dropout > 0)
    scalars = (np.uint32(1), np.float32(1e-3), np.float32(1.0))
    return program.step, (params, initial_state(train, params), batch(config, ROWS, LENGTH), *scalars)


def forward(config: ModelConfig, rows: int = ROWS, length: int = LENGTH) -> tuple[Any, tuple[Any, ...]]:
    """Logits of ragged rows."""
    graph, state = nnx.split(B.Transformer(config))
    data = batch(config, rows, length)

    def run(state: Any, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        return nnx.merge(graph, state).compute(tokens, kv_lengths=lengths)

    # nnx's state is no container that jax.export can write down; its leaves in order are.
    leaves, tree = jax.tree.flatten(state)
    return jax.jit(lambda leaves, *rest: run(jax.tree.unflatten(tree, leaves), *rest)), (
        leaves, data["tokens"], data["lengths"],
    )  # fmt: skip


def decode(config: ModelConfig, rows: int = ROWS, length: int = LENGTH) -> tuple[Any, tuple[Any, ...]]:
    """A prompt and a compiled loop of single positions with a cache, sampled."""
    graph, state = nnx.split(B.Transformer(config))
    leaves, tree = jax.tree.flatten(state)

    def run(leaves: Any, tokens: jax.Array, key: jax.Array) -> jax.Array:
        sampling = (key, jnp.float32(0.8), 0.9)
        state, T, new = jax.tree.unflatten(tree, leaves), tokens.shape[1], 4
        room = {"capacity": T + new}
        stores, memory, logits = _read(graph, state, tokens, T, None, None, None, **room)
        chosen = _continue(graph, state, stores, memory, logits, T, new, None, None, sampling, **room, top_k=10)
        return chosen[:new].T

    return jax.jit(run), (leaves, batch(config, rows, length)["tokens"], np.array([0, 7], np.uint32))


def kernel(name: str) -> tuple[Any, tuple[Any, ...]]:
    """Causal attention by one kernel, forward and backward."""
    dtype = jnp.bfloat16 if name == "cudnn" else jnp.float32
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.standard_normal((2, heads, 64, 32)), dtype) for heads in (4, 2, 2))

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum(B.attention(q, k, v, causal=True, kernel=name).astype(jnp.float32) ** 2)

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2))), (q, k, v)


__all__ = ["MODEL", "SMALL", "TRAIN", "Item", "batch", "items", "lowering_for", "train_step"]
