"""Keras 3 on the jax backend."""

from __future__ import annotations

from .keras_common import on

FRAMEWORK = "jax"
# As jax.nn, which it calls.
DTYPES = ("float32", "bfloat16", "float16")
attention = on("jax")
