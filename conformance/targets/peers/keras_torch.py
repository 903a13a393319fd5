"""Keras 3 on the torch backend."""

from __future__ import annotations

from .keras_common import on

FRAMEWORK = "torch"
attention = on("torch")
