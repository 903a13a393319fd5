"""ONNX's Attention operator by its own reference evaluator."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx.reference import ReferenceEvaluator

from . import onnx_model

FRAMEWORK = "numpy"


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    mask: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    causal: bool = False,
    q_offset: Any = None,
    kv_lengths: np.ndarray | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> np.ndarray:
    model, feed = onnx_model.call(
        q, k, v, mask=mask, bias=bias, causal=causal, q_offset=q_offset, kv_lengths=kv_lengths, scale=scale,
        softcap=softcap,
    )  # fmt: skip
    (out,) = ReferenceEvaluator(model).run(None, feed)
    return np.asarray(out)
