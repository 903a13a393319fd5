"""The backward passes of the modules, each the mirror of its `run`: last step first.

A backward takes the gradient of the output and what `run` kept, all float64, and gives the gradients of the inputs
and those of the parameters by their names in the module. Where x feeds several branches, their gradients add up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ..block import AttentionKept, Block, BranchKept, FeedForward, MultiHeadAttention
from ..contract.checks.common import require_float, require_shape
from ..encodings import apply_rotary
from ..modules import Linear, Norm, dropped, merge_heads, split_heads, wide
from ..pairs import join_heads
from ..pairs import split_heads as split_groups
from ..pieces import by_element
from ..rounding import rounded
from .attention import gradients
from .layers import layer_norm_vjp, linear_vjp, normal_slope, rms_norm_vjp, silu_slope, tanh_slope

Gradients = dict[str, np.ndarray]
# dy/dx of the activation y = x s, from x and s.
SLOPE: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "gelu": normal_slope,
    "gelu_tanh": tanh_slope,
    "relu": lambda x, s: s,
    "silu": silu_slope,
    "swiglu": silu_slope,
    "geglu": normal_slope,
    "geglu_tanh": tanh_slope,
}


def block_vjp(grad_out: np.ndarray, block: Block, x: np.ndarray, **given: Any) -> Gradients:
    """The gradients of sum(grad_out * block(x, ...)): "x", "context" and "bias" where given, and every parameter's.

    `given` are the keywords of the block but for the cache; each gradient has the dtype of its array.
    """
    names = (
        "mask",
        "bias",
        "kv_lengths",
        "segments",
        "positions",
        "rotary",
        "dropout_key",
        "context",
        "context_lengths",
    )
    arguments = {"cache": None, **dict.fromkeys(names), **given}
    scene = block.scene(x, **arguments)
    require_float("grad_out", grad_out)
    require_shape("grad_out", grad_out, x.shape, "(that of x)")
    _, kept = block.run(wide(x), replace(scene, keep=True), arguments["dropout_key"])
    dx, outer, grads = block_backward(block, wide(grad_out), kept)
    own = block.parameters()
    found = {name: rounded(grads[name], p.dtype) for name, p in own.items()}
    for name in ("context", "bias"):
        if arguments[name] is not None:
            found[name] = rounded(outer[name], arguments[name].dtype)
    return {"x": rounded(dx, x.dtype), **found}


def block_backward(
    block: Block, grad: np.ndarray, kept: dict[str, BranchKept]
) -> tuple[np.ndarray, Gradients, Gradients]:
    """Of `Block.run`: dx, the gradients of "context" and "bias" where given, and those of the parameters."""
    outer: Gradients = {}
    grads: Gradients = {}

    def attend(name: str, module: MultiHeadAttention, dy: np.ndarray) -> np.ndarray:
        dx, parts, own = attention_backward(module, dy, kept[name].inner)
        outer.update(parts)
        grads.update(prefixed(name, own))
        return dx

    def feed(dy: np.ndarray) -> np.ndarray:
        dx, own = feed_forward_backward(block.ffn, dy, kept["ffn"].inner)
        grads.update(prefixed("ffn", own))
        return dx

    branches: list[tuple[str, Callable[[np.ndarray], np.ndarray], str, str]] = [
        ("ffn", feed, "norm1" if block.norm2 is None else "norm2", "norm2_post"),
        ("attention", lambda dy: attend("attention", block.attention, dy), "norm1", "norm1_post"),
    ]
    if block.cross is not None:
        cross = block.cross
        branches.insert(1, ("cross", lambda dy: attend("cross", cross, dy), "norm3", "none"))
    if block.config.norm_place == "parallel":
        # Both branches read the block's input and both write into its output.
        return grad + sum(_branch_backward(block, grad, kept, branch, grads)[1] for branch in branches), outer, grads
    for branch in branches:
        along, through = _branch_backward(block, grad, kept, branch, grads)
        grad = along + through
    return grad, outer, grads


def _branch_backward(
    block: Block,
    grad: np.ndarray,
    kept: dict[str, BranchKept],
    branch: tuple[str, Callable[[np.ndarray], np.ndarray], str, str],
    grads: Gradients,
) -> tuple[np.ndarray, np.ndarray]:
    """The gradient of x in x + f(norm(x)), norm(x + f(x)) or x + norm_post(f(norm(x))): along x, and through f."""
    name, backward, norm_name, post_name = branch
    own, norm, post = kept[name], getattr(block, norm_name), getattr(block, post_name, None)
    after = block.config.norm_place == "post"
    if after:
        grad = _norm(norm, norm_name, grad, own.x + own.out, grads)
    down = grad if post is None else _norm(post, post_name, grad, own.out, grads)
    down = backward(dropped(down, block.config.dropout, own.key))
    return grad, down if after else _norm(norm, norm_name, down, own.x, grads)


def attention_backward(
    module: MultiHeadAttention, grad: np.ndarray, kept: AttentionKept
) -> tuple[np.ndarray, Gradients, Gradients]:
    """Of `MultiHeadAttention.run`: dx, "context" and "bias" where there are any, and the parameters."""
    grads: Gradients = {}
    plan = kept.pairs.plan
    heads = split_heads(_linear(module.output, "output", grad, kept.merged, grads), plan.H)
    found = gradients(kept.pairs, out=split_groups(heads, plan), kept=kept.weights)
    if "sinks" in found:
        grads["sinks"] = found.pop("sinks").reshape(plan.H)
    outer = {name: join_heads(x) for name, x in found.items()}
    dq, dk, dv = (outer.pop(name) for name in ("q", "k", "v"))
    if kept.rotary is not None:
        cos, sin = kept.rotary
        # Transposed, a rotation turns by the opposite angle.
        dq, dk = (apply_rotary(d, cos, -sin, layout=module.layout) for d in (dq, dk))
    if module.query_norm is not None and module.key_norm is not None:
        dq = _norm(module.query_norm, "query_norm", dq, kept.raw[0], grads)
        dk = _norm(module.key_norm, "key_norm", dk, kept.raw[1], grads)
    dx = _linear(module.query, "query", merge_heads(dq), kept.x, grads)
    dsource = _linear(module.key, "key", merge_heads(dk), kept.source, grads)
    dsource = dsource + _linear(module.value, "value", merge_heads(dv), kept.source, grads)
    if kept.source is kept.x:
        return dx + dsource, outer, grads
    return dx, {**outer, "context": dsource}, grads


def feed_forward_backward(
    module: FeedForward, grad: np.ndarray, kept: tuple[np.ndarray, ...]
) -> tuple[np.ndarray, Gradients]:
    """Of `FeedForward.run`: dx and the parameters."""
    grads: Gradients = {}
    x, up, *gates, share, middle = kept
    slope = SLOPE[module.config.activation]
    dmiddle = _linear(module.down, "down", grad, middle, grads)
    if module.gate is None:
        dup = by_element(lambda x, s, dy: dy * slope(x, s), up, share, dmiddle)
        return _linear(module.up, "up", dup, x, grads), grads
    gate = gates[0]
    dgate = by_element(lambda x, s, dy, up: dy * up * slope(x, s), gate, share, dmiddle, up)
    dx = _linear(module.up, "up", by_element(lambda x, s, dy: dy * x * s, gate, share, dmiddle), x, grads)
    return dx + _linear(module.gate, "gate", dgate, x, grads), grads


def norm_backward(norm: Norm, grad: np.ndarray, x: np.ndarray) -> Gradients:
    """Of `Norm.run`: "x", "weight", "bias"; the offset of a weight does not change its gradient."""
    if norm.kind == "rms":
        return rms_norm_vjp(grad, x, norm.gain, eps=norm.eps)
    return layer_norm_vjp(grad, x, norm.gain, None if norm.bias is None else wide(norm.bias), eps=norm.eps)


def prefixed(name: str, grads: Gradients) -> Gradients:
    """The gradients of a part, by their names in the whole."""
    return {f"{name}.{inner}": grad for inner, grad in grads.items()}


def _linear(linear: Linear, name: str, grad: np.ndarray, x: np.ndarray, grads: Gradients) -> np.ndarray:
    """Backward of a linear layer: adds its parameters' gradients to `grads`, gives dx."""
    found = linear_vjp(grad, x, wide(linear.weight), linear.bias)
    dx = found.pop("x")
    grads.update(prefixed(name, found))
    return dx


def _norm(norm: Norm, name: str, grad: np.ndarray, x: np.ndarray, grads: Gradients) -> np.ndarray:
    """Backward of a norm: adds its parameters' gradients to `grads` (a shared norm has two), gives dx."""
    found = norm_backward(norm, grad, x)
    dx = found.pop("x")
    for inner, value in prefixed(name, found).items():
        grads[inner] = grads[inner] + value if inner in grads else value
    return dx
