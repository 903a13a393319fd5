"""ONNX's Attention operator in onnxruntime, on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime

from . import onnx_model

FRAMEWORK = "numpy"
# Its CPU kernel is registered for these two.
DTYPES = ("float32", "float16")


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
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what it says goes into the exception too
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (out,) = session.run(None, feed)
    return out
