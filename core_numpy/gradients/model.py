"""The backward pass of the whole model, the mirror of `Transformer.run`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..model import ModelKept, Transformer
from ..modules import dropped, wide
from ..random import fold_in
from .block import Gradients, block_backward, norm_backward, prefixed
from .encodings import embed_vjp, relative_bias_vjp


def model_backward(model: Transformer, grad: np.ndarray, kept: ModelKept) -> Gradients:
    """The gradient of every parameter, float64, by canonical name; `grad` is that of the output.

    A block whose residuals were not kept is run forward again from its input.
    """
    if model.config.kind == "encoder_decoder":
        grads, memory = _stack_backward(model.decoder, grad, kept)
        found = prefixed("decoder", grads)
        assert kept.encoder is not None
        below = prefixed("encoder", _stack_backward(model.encoder, memory, kept.encoder)[0])
        if model.config.share_embedding:
            shared = below.pop("encoder.embedding.weight")
            found["decoder.embedding.weight"] = found["decoder.embedding.weight"] + shared
        found |= below
    else:
        found, _ = _stack_backward(model, grad, kept)
    return {name: found[name] for name in model.parameters()}


def _stack_backward(model: Transformer, grad: np.ndarray, kept: ModelKept) -> tuple[Gradients, np.ndarray]:
    """Of one stack: the parameters' gradients, and that of the memory it attended to (zeros without layers)."""
    grads: Gradients = {}
    h = _pool_backward(_head_backward(model, grad, kept, grads), kept)
    if model.norm is not None:
        h = _add(grads, "norm", norm_backward(model.norm, h, kept.last))
    memory = np.zeros(0) if kept.scene.context is None else np.zeros_like(kept.scene.context)
    bias = None
    for i in range(len(model.blocks) - 1, -1, -1):
        block, kept_block = model.blocks[i], kept.blocks[i]
        if kept_block is None:
            scene = replace(kept.scene, keep=True)
            _, kept_block = block.run(kept.inputs[i], *model.of_block(i, scene, kept.key))
        h, outer, own = block_backward(block, h, kept_block)
        grads |= prefixed(f"blocks.{i}", own)
        memory = memory + outer["context"] if "context" in outer else memory
        if "bias" in outer:
            bias = outer["bias"] if bias is None else bias + outer["bias"]
    _embedding_backward(model, h, bias, kept, grads)
    return grads, memory


def _head_backward(model: Transformer, grad: np.ndarray, kept: ModelKept, grads: Gradients) -> np.ndarray:
    """dh of logits = cap tanh(scale (h W + b) / cap)."""
    config = model.config
    if config.head == "none":
        return grad
    if config.logit_softcap is not None:
        grad = grad * (1.0 - np.tanh(kept.logits / config.logit_softcap) ** 2)
    if config.logit_scale is not None:
        grad = grad * config.logit_scale
    rows, h = grad.reshape(-1, grad.shape[-1]), kept.pooled.reshape(-1, kept.pooled.shape[-1])
    if config.tie_embeddings:
        grads["embedding.weight"] = rows.T @ h
    else:
        grads["head.weight"] = h.T @ rows
    if model.head is not None and model.head.bias is not None:
        grads["head.bias"] = np.sum(rows, axis=0)
    return (rows @ model.head_weight().T).reshape(kept.pooled.shape)


def _pool_backward(grad: np.ndarray, kept: ModelKept) -> np.ndarray:
    """Each pooled position gets its share."""
    return grad if kept.weights is None else kept.weights[..., None] * grad[:, None, :]


def _embedding_backward(
    model: Transformer, grad: np.ndarray, bias: np.ndarray | None, kept: ModelKept, grads: Gradients
) -> None:
    """Dropout, the norm, the sum of embeddings, and the relative table behind the bias."""
    config = model.config
    grad = dropped(grad, config.dropout, None if kept.key is None else fold_in(kept.key, config.layers))
    if model.embedding_norm is not None:
        grad = _add(grads, "embedding_norm", norm_backward(model.embedding_norm, grad, kept.embedded))
    if model.positions is not None:
        rows = np.sum(grad, axis=0) if kept.places.ndim == 1 else grad
        grads["positions.weight"] = embed_vjp(rows, wide(model.positions.weight), kept.places)["table"]
    tokens = grad if config.embedding_scale is None else grad * config.embedding_scale
    table = embed_vjp(tokens, wide(model.embedding.weight), kept.tokens)["table"]
    grads["embedding.weight"] = grads["embedding.weight"] + table if "embedding.weight" in grads else table
    if model.relative is not None:
        T = kept.tokens.shape[1]
        table = wide(model.relative.weight)
        grads["relative.weight"] = (
            np.zeros(table.shape)
            if bias is None
            else relative_bias_vjp(
                bias[0], table, T, T, buckets=config.relative_buckets, max_distance=config.relative_max_distance,
                bidirectional=not config.is_causal,
            )["table"]
        )  # fmt: skip


def _add(grads: Gradients, name: str, found: Gradients) -> np.ndarray:
    """Put a norm's gradients into `grads` and give that of its input."""
    dx = found.pop("x")
    grads |= prefixed(name, found)
    return dx
