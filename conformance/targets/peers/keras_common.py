"""`keras.ops.dot_product_attention`, which has one backend per process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from .limits import aligned_top_left, equal_sizes, one_batch_axis, one_of_mask_and_bias


def on(backend: str) -> Callable[..., Any]:
    """`attention` on this backend; ImportError where Keras already runs on another in this process."""
    os.environ.setdefault("KERAS_BACKEND", backend)
    import keras

    if keras.backend.backend() != backend:
        raise ImportError(f"Keras runs on {keras.backend.backend()} in this process; set KERAS_BACKEND={backend}")

    def attention(
        q: Any,
        k: Any,
        v: Any,
        *,
        mask: Any = None,
        bias: Any = None,
        causal: bool = False,
        q_offset: Any = None,
        scale: float | None = None,
    ) -> Any:
        one_batch_axis(q)
        aligned_top_left(causal, q, k, q_offset)
        if backend == "torch":
            one_of_mask_and_bias(mask, bias)
        else:
            equal_sizes(k, v)

        def turned(x: Any) -> Any:
            return keras.ops.swapaxes(x, -2, -3)

        def full(x: Any) -> Any:
            return x if x is None or x.ndim == 4 else x[(None,) * (4 - x.ndim)]

        return turned(
            keras.ops.dot_product_attention(
                turned(q), turned(k), turned(v), bias=full(bias), mask=full(mask), scale=scale, is_causal=causal
            )
        )

    return attention
