"""A batch of the trainer: on the host, where it is checked, and on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core_numpy.contract.checks.training import IGNORED

from .arrays import from_numpy, to_numpy

Batch = Mapping[str, Any]
# Tokens, targets, what the model is called with besides, and whether every target is counted.
Tensors = tuple[Tensor, Tensor, dict[str, Tensor], bool]
# The names of a batch's fields in a call of the model.
CALL = {name: name for name in ("segments", "positions", "context", "context_lengths")} | {"lengths": "kv_lengths"}


def host_arrays(batch: Any) -> Any:
    """The batch on the host, where it is checked; what is no dict, and fields that are lists, go on to the check."""
    if not isinstance(batch, Mapping):
        return batch
    return {name: x if isinstance(x, list | tuple) else _host_array(x) for name, x in batch.items()}


def _host_array(x: Any) -> np.ndarray:
    return to_numpy(x) if isinstance(x, Tensor) else np.asarray(x)


def tensors(arrays: dict[str, np.ndarray], device: torch.device) -> Tensors:
    """A batch on its device."""
    moved = {name: from_numpy(x, device=device) for name, x in arrays.items()}
    call = {CALL[name]: x for name, x in moved.items() if name in CALL}
    return moved["tokens"], moved["targets"], call, bool((arrays["targets"] != IGNORED).all())


def counted_targets(arrays: dict[str, np.ndarray]) -> int:
    return int(np.count_nonzero(arrays["targets"] != IGNORED))


def rows_of(name: str, x: np.ndarray, rows: Any) -> np.ndarray:
    """A micro-batch's part of a field; positions (T,) belong to every row."""
    return x if name == "positions" and x.ndim == 1 else x[rows]
