"""Kernels, inputs and calls that the tests of torch's attention share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from backend_torch.arrays import from_numpy

KERNELS = ("dense", "sdpa", "blockwise", "auto")
EVERY = pytest.mark.parametrize("kernel", KERNELS)
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def as_tensors(keywords: dict[str, Any]) -> dict[str, Any]:
    return {
        name: from_numpy(x.astype(np.int64) if x.dtype == np.uint32 else x) if isinstance(x, np.ndarray) else x
        for name, x in keywords.items()
    }


def serves(kernel: str, call, *arguments, **keywords):
    """The result, or None where the kernel says that it cannot serve the call."""
    try:
        return call(*arguments, **keywords, kernel=kernel)
    except ValueError as error:
        assert "cannot serve" in str(error)
        assert kernel != "auto"
        return None


def qkv(B=2, H=4, G=2, T=5, S=7, D=6, Dv=6, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, H, T, D), (B, G, S, D), (B, G, S, Dv))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def gradients_of(loss, *leaves):
    return torch.autograd.grad(loss, leaves)
