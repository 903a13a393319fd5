"""The three packages under one roof, for tests that say one sentence of all of them."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import numpy as np
import pytest

PACKAGES = ("core_numpy", "backend_torch", "backend_jax")
FRAMEWORKS = {"core_numpy": "numpy", "backend_torch": "torch", "backend_jax": "jax"}


def load(package: str) -> Any:
    """The package, or a skip where its framework is not installed."""
    pytest.importorskip(FRAMEWORKS[package])
    return importlib.import_module(package)


def to(package: str, x: Any) -> Any:
    """A NumPy array as the package's own; anything else, and what is in a tuple or dict, likewise."""
    if isinstance(x, tuple):
        return tuple(to(package, item) for item in x)
    if isinstance(x, dict):
        return {name: to(package, item) for name, item in x.items()}
    if not isinstance(x, np.ndarray) or package == "core_numpy":
        return x
    load(package)
    return importlib.import_module(f"{package}.arrays").from_numpy(x)


def back(x: Any) -> Any:
    """What a package returned, as NumPy arrays."""
    if isinstance(x, tuple):
        return tuple(back(item) for item in x)
    if hasattr(x, "detach"):
        return importlib.import_module("backend_torch.arrays").to_numpy(x)
    return np.asarray(x) if hasattr(x, "dtype") else x


def wide(package: str) -> Any:
    """A context in which the package has float64: JAX with x64, the others anyway."""
    if package != "backend_jax":
        return contextlib.nullcontext()
    return pytest.importorskip("jax").enable_x64(True)
