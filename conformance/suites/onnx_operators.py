"""ONNX's operators said in the public names: `Node` -> outputs, through one function that calls the target.

Only the target computes. What an operator asks beyond a public name (its layout of heads, cached keys in front of new
ones, the mean that a norm took) is moved or read off here in NumPy, and a comment says where.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import onnx_attention
from .onnx_attention import Arrays, Call


@dataclass(frozen=True)
class Node:
    """attributes: with the schema's defaults. inputs: those present. All names are the schema's."""

    operator: str
    attributes: dict[str, Any]
    inputs: Arrays
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Operator:
    """function: the public name that answers it. module: where onnx keeps its cases. answer: the translation."""

    function: str
    module: str
    answer: Callable[[Node, Call], Arrays]


def attention(node: Node, call: Call) -> Arrays:
    return onnx_attention.answer(node.attributes, node.inputs, node.outputs, call)


def rotary_embedding(node: Node, call: Call) -> Arrays:
    """The rows of the two tables that `position_ids` names, and heads apart where they come as one axis (3-D)."""
    x, cos, sin = node.inputs["X"], node.inputs["cos_cache"], node.inputs["sin_cache"]
    if "position_ids" in node.inputs:
        cos, sin = cos[node.inputs["position_ids"]], sin[node.inputs["position_ids"]]
    apart = onnx_attention.heads_apart(x, node.attributes["num_heads"]) if x.ndim == 3 else x
    # rotary_embedding_dim is twice the width of the tables; the rest of the features passes.
    layout = "interleaved" if node.attributes["interleaved"] else "half"
    out = call("apply_rotary", {"x": apart, "cos": cos, "sin": sin, "layout": layout})["out"]
    return {"Y": onnx_attention.heads_together(out) if x.ndim == 3 else out}


def layer_normalization(node: Node, call: Call) -> Arrays:
    """The axes from `axis` on are one: the norm takes the last."""
    x, weight, bias, eps, shape = _flat(node)
    y = call("layer_norm", {"x": x, "weight": weight, "bias": bias, "eps": eps})["out"]
    # No public name returns the statistics; they are read off the target's own norm without weights, whose rows are
    # y = (x - mean) * inverse: a straight line, through its two points that are furthest apart.
    plain = call("layer_norm", {"x": x, "weight": None, "bias": None, "eps": eps})["out"].astype(np.float64)
    low, high = (np.expand_dims(at(x, axis=-1), -1) for at in (np.argmin, np.argmax))
    rows = x.astype(np.float64)
    x_low, x_high, y_low, y_high = (np.take_along_axis(z, at, -1) for z in (rows, plain) for at in (low, high))
    inverse = (y_high - y_low) / (x_high - x_low)
    mean = x_high - y_high / inverse
    axis = node.attributes["axis"] % len(shape)
    ones = (*shape[:axis], *(1 for _ in shape[axis:]))
    statistics = {"Mean": mean, "InvStdDev": inverse}  # float32 by stash_type
    return {"Y": y.reshape(shape)} | {n: z.reshape(ones).astype(np.float32) for n, z in statistics.items()}


def rms_normalization(node: Node, call: Call) -> Arrays:
    x, weight, _, eps, shape = _flat(node)
    return {"Y": call("rms_norm", {"x": x, "weight": weight, "eps": eps})["out"].reshape(shape)}


def _flat(node: Node) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None, float, tuple[int, ...]]:
    """x as (rows, W), weight and bias (W,), eps, and x's shape."""
    x = node.inputs["X"]
    axis = node.attributes["axis"] % x.ndim
    given = (node.inputs.get("Scale", node.inputs.get("scale")), node.inputs.get("B"))  # the two norms spell it so
    weight, bias = (None if w is None else np.broadcast_to(w, x.shape[axis:]).reshape(-1) for w in given)
    rows: np.ndarray = x.reshape(-1, int(np.prod(x.shape[axis:])))
    return rows, weight, bias, node.attributes["epsilon"], x.shape


def gelu(node: Node, call: Call) -> Arrays:
    approximate = node.attributes["approximate"].decode()
    return {"Y": call("gelu", {"x": node.inputs["X"], "approximate": approximate})["out"]}


def softmax(node: Node, call: Call) -> Arrays:
    return {"output": call("softmax", {"x": node.inputs["input"], "axis": node.attributes["axis"]})["out"]}


OPERATORS = {
    "Attention": Operator("attention", "attention", attention),
    "RotaryEmbedding": Operator("apply_rotary", "rotaryembedding", rotary_embedding),
    "LayerNormalization": Operator("layer_norm", "layernormalization", layer_normalization),
    "RMSNormalization": Operator("rms_norm", "rmsnormalization", rms_normalization),
    "Gelu": Operator("gelu", "gelu", gelu),
    "Softmax": Operator("softmax", "softmax", softmax),
}
