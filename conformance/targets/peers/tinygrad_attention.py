"""tinygrad's `Tensor.scaled_dot_product_attention`.

tinygrad's CPU device calls clang. Where there is none, its own Python device interprets the same kernels, at seconds a
call: gradients and the other dtypes are left out.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

import numpy as np

from ..protocol import NotOffered
from .limits import aligned_top_left, one_of_mask_and_bias

os.environ.setdefault("DEV", "CPU" if shutil.which(os.environ.get("CC", "clang")) else "PYTHON")

from tinygrad import Tensor

FRAMEWORK = "numpy"
DTYPES = ("float32",)


def _in(x: np.ndarray) -> Any:
    return Tensor(np.ascontiguousarray(x))


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    mask: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    causal: bool = False,
    q_offset: Any = None,
) -> np.ndarray:
    aligned_top_left(causal, q, k, q_offset)
    given = one_of_mask_and_bias(mask, bias)
    if causal and given is not None:
        raise NotOffered("a causal flag or a mask, not both")
    shown = None if given is None else _in(given)
    grouped = q.ndim > 2 and q.shape[-3] != k.shape[-3]
    out = _in(q).scaled_dot_product_attention(_in(k), _in(v), attn_mask=shown, is_causal=causal, enable_gqa=grouped)
    return np.asarray(out.numpy())
