"""A model of one ONNX Attention node, for whatever runs ONNX."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from ..protocol import NotOffered
from .limits import aligned_top_left, one_batch_axis, one_of_mask_and_bias

# The first opset whose Attention takes the number of real keys of each batch element.
OPSET = 24
_TYPES = {"float64": TensorProto.DOUBLE, "float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16,
          "bfloat16": TensorProto.BFLOAT16, "bool": TensorProto.BOOL, "int64": TensorProto.INT64}  # fmt: skip


def call(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    mask: np.ndarray | None,
    bias: np.ndarray | None,
    causal: bool,
    q_offset: Any,
    kv_lengths: np.ndarray | None,
    scale: float | None,
    softcap: float | None,
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """The model, and what to feed it."""
    one_batch_axis(q)
    aligned_top_left(causal, q, k, q_offset)
    given = one_of_mask_and_bias(mask, bias)
    if causal and kv_lengths is not None:
        raise NotOffered("with lengths, ONNX aligns causality to each length")
    feed = {"Q": q, "K": k, "V": v}
    if given is not None:
        full = (q.shape[-2], k.shape[-2])
        feed["attn_mask"] = np.ascontiguousarray(np.broadcast_to(given, (*given.shape[:-2], *full)))
    if kv_lengths is not None:
        feed["nonpad_kv_seqlen"] = kv_lengths.astype(np.int64)
    slots = ["Q", "K", "V", "attn_mask", "", "", "nonpad_kv_seqlen"]
    names = [name if name in feed else "" for name in slots]
    while not names[-1]:
        names.pop()
    attributes: dict[str, Any] = {"is_causal": int(causal)}
    attributes |= {} if scale is None else {"scale": float(scale)}
    attributes |= {} if softcap is None else {"softcap": float(softcap)}
    node = helper.make_node("Attention", names, ["Y"], **attributes)
    inputs = [helper.make_tensor_value_info(n, _TYPES[str(x.dtype)], x.shape) for n, x in feed.items()]
    out = helper.make_tensor_value_info("Y", _TYPES[str(q.dtype)], (*q.shape[:-1], v.shape[-1]))
    graph = helper.make_graph([node], "attention", inputs, [out])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=11)
    return model, {name: np.ascontiguousarray(x) for name, x in feed.items()}
