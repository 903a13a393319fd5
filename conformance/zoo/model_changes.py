"""How a whole model is made faulty: embeddings, positions, biases of the scores, pooling, logits, loss, gradients."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np

import core_numpy as core

from .block_changes import altered


def ignored(**fields: Any) -> dict[str, Any]:
    """Fields of the configuration that the call reads as these, whatever was given."""

    def change(model: Any) -> None:
        model.config = model.config.replace(**fields)

    return altered(change)


def positions_given(alter: Callable[[np.ndarray], np.ndarray]) -> dict[str, Any]:
    """Positions of a call, altered."""

    def of(model: Any, own: Any) -> Any:
        def run(tokens: Any, *, positions: Any = None, **rest: Any) -> Any:
            return own(tokens, positions=None if positions is None else alter(np.asarray(positions)), **rest)

        return run

    return method("run", of)


def positions_lost(model: Any, own: Any) -> Any:
    def embed(tokens: Any, places: Any, key: Any) -> Any:
        table, model.positions = model.positions, None
        try:
            return own(tokens, places, key)
        finally:
            model.positions = table

    return embed


def sinusoids_lost(model: Any, own: Any) -> Any:
    def embed(tokens: Any, places: Any, key: Any) -> Any:
        config = model.config
        model.config = config.replace(positions="none") if config.positions == "sinusoidal" else config
        try:
            return own(tokens, places, key)
        finally:
            model.config = config

    return embed


def relative_direction(model: Any, own: Any) -> Any:
    def bias(T: int, past: int) -> Any:
        config = model.config
        if model.relative is None or config.relative_buckets % 2:
            return own(T, past)
        table = model.relative.weight.astype(np.float64)
        return core.relative_bias(
            table, T, past + T, buckets=config.relative_buckets, max_distance=config.relative_max_distance,
            bidirectional=config.is_causal, q_offset=past,
        )[None]  # fmt: skip

    return bias


def head_rolled(model: Any) -> None:
    """The tied matrix read with rows and columns in the other order."""
    own = model.head_weight

    def head_weight() -> np.ndarray:
        weight = own()
        return weight if not model.config.tie_embeddings else np.ascontiguousarray(weight.T).reshape(weight.shape)

    model.head_weight = head_weight


def unshared() -> dict[str, Any]:
    class Altered(core.Transformer):
        def __init__(self, config: Any, *, seed: int = 0, dtype: str = "float32", device: Any = None) -> None:
            super().__init__(config, seed=seed, dtype=dtype, device=device)
            if config.share_embedding:
                self.encoder.embedding = copy(self.encoder.embedding)

    return {"Transformer": Altered}


def memory_lost() -> dict[str, Any]:
    class Altered(core.Transformer):
        def __init__(self, config: Any, *, seed: int = 0, dtype: str = "float32", device: Any = None) -> None:
            super().__init__(config, seed=seed, dtype=dtype, device=device)
            if config.kind == "encoder_decoder":
                own = self.encoder.run

                def run(tokens: Any, **rest: Any) -> Any:
                    blocks, self.encoder.blocks = self.encoder.blocks, []
                    try:
                        return own(tokens, **rest)
                    finally:
                        self.encoder.blocks = blocks

                setattr(self.encoder, "run", run)  # noqa: B010 (one instance, not the class)

    return {"Transformer": Altered}


def method(name: str, make: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """One of the model's methods, replaced by make(model, the method)."""

    def change(model: Any) -> None:
        setattr(model, name, make(model, getattr(model, name)))

    return altered(change)


def positions_moved(by: int) -> dict[str, Any]:
    def make(model: Any, own: Any) -> Any:
        def embed(tokens: Any, places: Any, key: Any) -> Any:
            if model.positions is not None:
                places = np.minimum(np.asarray(places) + by, len(model.positions.weight) - 1)
            return own(tokens, places, key)

        return embed

    return method("_embed", make)


def scale_after_positions(model: Any, own: Any) -> Any:
    def embed(tokens: Any, places: Any, key: Any) -> Any:
        scale = model.config.embedding_scale
        embedded, h = own(tokens, places, key)
        if scale is None or model.embedding_norm is not None:
            return embedded, h
        rows = scale * model.embedding.weight[tokens].astype(np.float64)
        more = (scale - 1.0) * (embedded - rows)
        return embedded + more, h + more

    return embed


def pooled(choose: Callable[[Any, Any, Any], tuple[Any, Any]]) -> dict[str, Any]:
    """choose(h, lengths, segments) -> the lengths and segments that pooling reads."""
    return method("_pool", lambda model, own: lambda h, lengths, segments: own(h, *choose(h, lengths, segments)))


def logits(make: Callable[[Any, np.ndarray], np.ndarray]) -> dict[str, Any]:
    """make(model, h) -> logits, where there are any."""

    def of(model: Any, own: Any) -> Any:
        def logits(h: np.ndarray) -> Any:
            if model.config.head == "none":
                return own(h)
            found = make(model, h)
            return found, found

        return logits

    return method("_logits", of)


def projected(model: Any, h: np.ndarray) -> np.ndarray:
    return h @ model.head_weight()


def capped(model: Any, x: np.ndarray) -> np.ndarray:
    cap = model.config.logit_softcap
    return x if cap is None else cap * np.tanh(x / cap)


def without_head_bias(model: Any, h: np.ndarray) -> np.ndarray:
    scale = 1.0 if model.config.logit_scale is None else model.config.logit_scale
    return capped(model, scale * projected(model, h))


def relative_per_layer(model: Any) -> None:
    """The table serves the first layer alone."""
    own = model.of_block
    model.of_block = lambda i, scene, key: (
        lambda got: (got[0] if i == 0 else replace(got[0], bias=None), got[1])
    )(own(i, scene, key))  # fmt: skip


def alike(model: Any) -> None:
    """Every layer starts as a copy of the first."""
    own = model.parameters()
    for name, x in own.items():
        if name.startswith("blocks.") and not name.startswith("blocks.0."):
            model.assign({name: own["blocks.0." + name.split(".", 2)[2]].copy() if x.ndim > 1 else x})


def started(change: Callable[[str, np.ndarray], np.ndarray]) -> dict[str, Any]:
    def alter(model: Any) -> None:
        model.assign({name: change(name, x).astype(x.dtype) for name, x in model.parameters().items()})

    return altered(alter)


def loss(**fixed: Any) -> dict[str, Any]:
    def loss_and_gradients(model: Any, batch: Any, **options: Any) -> Any:
        return core.loss_and_gradients(model, batch, **(options | fixed))

    return {"loss_and_gradients": loss_and_gradients}


def gradients(change: Callable[[Any, dict[str, np.ndarray]], None]) -> dict[str, Any]:
    def loss_and_gradients(model: Any, batch: Any, **options: Any) -> Any:
        loss, grads = core.loss_and_gradients(model, batch, **options)
        change(model, grads)
        return loss, grads

    return {"loss_and_gradients": loss_and_gradients}


def tied_stopped() -> dict[str, Any]:
    """Only the embedding's own use of a tied table has a gradient: that of the same model untied."""

    def loss_and_gradients(model: Any, batch: Any, **options: Any) -> Any:
        loss, grads = core.loss_and_gradients(model, batch, **options)
        if model.config.kind == "decoder" and model.config.tie_embeddings:
            untied = core.Transformer(model.config.replace(tie_embeddings=False), dtype=model.dtype)
            params = core.get_params(model)
            core.set_params(untied, {**params, "head.weight": params["embedding.weight"].T.copy()})
            grads["embedding.weight"] = core.loss_and_gradients(untied, batch, **options)[1]["embedding.weight"]
        return loss, grads

    return {"loss_and_gradients": loss_and_gradients}


def zeroed(name: str) -> Callable[[Any, dict[str, np.ndarray]], None]:
    def change(model: Any, grads: dict[str, np.ndarray]) -> None:
        for key in grads:
            if name in key:
                grads[key] = np.zeros_like(grads[key])

    return change
