"""`flax.nnx`, trained by `nnx.jit` and `nnx.Optimizer`, and split for `jax.jit` as its guide on speed advises."""

from __future__ import annotations

from typing import Any

from ..task import Task
from .base import Batch, Contestant, Running


def _model(task: Task) -> Any:
    """The decoder with the task's weights."""
    import jax
    from flax import nnx

    from ._jax import compute_dtype

    config, dtype, rngs = task.model, compute_dtype(task), nnx.Rngs(0)

    def norm() -> Any:
        # use_fast_variance would compute E[x^2] - E[x]^2.
        return nnx.LayerNorm(
            config.width, epsilon=config.norm_eps, dtype=dtype, use_fast_variance=False, rngs=rngs
        )  # fmt: skip

    class Block(nnx.Module):
        def __init__(self) -> None:
            self.norm1, self.norm2 = norm(), norm()
            self.attention = nnx.MultiHeadAttention(config.heads, config.width, dtype=dtype, decode=False, rngs=rngs)
            self.up = nnx.Linear(config.width, config.hidden_size, dtype=dtype, rngs=rngs)
            self.down = nnx.Linear(config.hidden_size, config.width, dtype=dtype, rngs=rngs)

        def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
            x = x + self.attention(self.norm1(x), mask=mask)
            return x + self.down(nnx.gelu(self.up(self.norm2(x)), approximate=False))

    class Decoder(nnx.Module):
        def __init__(self) -> None:
            self.embedding = nnx.Embed(config.vocab, config.width, dtype=dtype, rngs=rngs)
            self.positions = nnx.Embed(config.max_length, config.width, dtype=dtype, rngs=rngs)
            self.blocks = nnx.List([Block() for _ in range(config.layers)])
            self.norm = norm()
            self.head = nnx.Linear(config.width, config.vocab, use_bias=False, dtype=dtype, rngs=rngs)

        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = self.embedding(tokens) + self.positions.embedding[...][: tokens.shape[1]].astype(dtype)
            mask = nnx.make_causal_mask(tokens)
            for block in self.blocks:
                x = block(x, mask)
            return self.head(self.norm(x))

    return _filled(Decoder(), task)


def _filled(model: Any, task: Task) -> Any:
    """The model with the task's weights in the place of its own."""
    import jax

    from ._jax import heads_apart

    given = task.params()

    def fill(module: Any, name: str) -> None:
        first = "scale" if hasattr(module, "scale") else "kernel"
        getattr(module, first).set_value(jax.numpy.asarray(given[f"{name}.weight"]))
        if f"{name}.bias" in given:
            module.bias.set_value(jax.numpy.asarray(given[f"{name}.bias"]))

    for name in ("embedding", "positions"):
        getattr(model, name).embedding.set_value(jax.numpy.asarray(given[f"{name}.weight"]))
    fill(model.norm, "norm")
    fill(model.head, "head")
    for i, block in enumerate(model.blocks):
        for name in ("norm1", "norm2"):
            fill(getattr(block, name), f"blocks.{i}.{name}")
        fill(block.up, f"blocks.{i}.ffn.up")
        fill(block.down, f"blocks.{i}.ffn.down")
        for name, arrays in heads_apart(given, f"blocks.{i}.attention.", task).items():
            for part, array in arrays.items():
                getattr(getattr(block.attention, name), part).set_value(jax.numpy.asarray(array))
    return model


def build_nnx(task: Task) -> Running:
    """As nnx's basic guide: the module and its optimiser go through `nnx.jit`."""
    import jax
    from flax import nnx

    from ._jax import arrays, cross_entropy, optimizer

    jax.config.update("jax_default_matmul_precision", task.train.matmul_precision)
    model = _model(task)
    tuner = nnx.Optimizer(model, optimizer(task), wrt=nnx.Param)

    def loss_of(model: Any, tokens: Any, targets: Any) -> jax.Array:
        return cross_entropy(model(tokens), targets)

    @nnx.jit(donate_argnums=(0, 1))
    def update(model: Any, tuner: Any, tokens: Any, targets: Any) -> jax.Array:
        loss, grads = nnx.value_and_grad(loss_of)(model, tokens, targets)
        tuner.update(model, grads)
        return loss

    gradients, value = nnx.jit(nnx.value_and_grad(loss_of)), nnx.jit(loss_of)

    def step(batch: Batch) -> jax.Array:
        return update(model, tuner, *arrays(batch))

    def backward(batch: Batch) -> jax.Array:
        loss, grads = gradients(model, *arrays(batch))
        held["grads"] = grads
        return loss

    held: dict[str, Any] = {}
    return Running(
        step,
        lambda: jax.block_until_ready((nnx.state(model), held)),
        backward,
        lambda batch: value(model, *arrays(batch)),
    )


def build_split(task: Task) -> Running:
    """Split once; `jax.jit` over the parameters."""
    from flax import nnx

    from ._jax import running

    graph, params = nnx.split(_model(task))
    return running(nnx.to_pure_dict(params), lambda params, tokens: nnx.merge(graph, params)(tokens), task)


NEEDS, OFFERS = ("jax", "flax", "optax"), frozenset({"bfloat16"})
CONTESTANTS = [
    Contestant("flax-nnx", build_nnx, NEEDS, "flax.nnx, nnx.jit and nnx.Optimizer", "jax", True, offers=OFFERS),
    Contestant("flax-nnx-split", build_split, NEEDS, "flax.nnx, split, jax.jit", "jax", True, offers=OFFERS),
]
