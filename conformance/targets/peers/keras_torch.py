"""Keras 3 on the torch backend."""

from __future__ import annotations

from .keras_common import on

FRAMEWORK = "torch"
# Keras computes float64 inputs in float32 (`backend.result_type`).
DTYPES = ("float32", "bfloat16", "float16")
attention = on("torch")
