"""torch without a device: a whole training step under `meta`, and where every tensor is made.

Under `meta` tensors have shapes and no values, so everything that the step does on a device runs, and nothing can be
read. A tensor that a module makes elsewhere than where its inputs are shows itself: it is not `meta`.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import backend_torch as B
from backend_torch.batches import tensors
from backend_torch.optimizer import clip, global_norm, update
from core_numpy.contract.config import ModelConfig, TrainConfig

from .rows import Row

# Between them they use every part of a model.
CONFIGS: dict[str, dict[str, Any]] = {
    "learned, layer norm": {},
    "rotary, grouped, window, sinks": {
        "positions": "rotary", "kv_heads": 2, "norm": "rms", "activation": "swiglu", "window": (8, 0), "sinks": True,
    },
    "yarn, q/k norm": {
        "positions": "rotary", "qk_norm": True,
        "rotary_scaling": {"kind": "yarn", "factor": 4.0, "original_max_length": 16},
    },
    "alibi": {"positions": "alibi"},
    "relative, sandwich": {"positions": "relative", "norm_place": "sandwich", "softcap": 5.0},
    "sinusoidal, tied": {"positions": "sinusoidal", "tie_embeddings": True, "embedding_scale": 8.0},
    "encoder-decoder": {"kind": "encoder_decoder", "positions": "rotary"},
    "classifier": {"kind": "encoder", "head": "classifier", "classes": 5},
}  # fmt: skip
BASE: dict[str, Any] = {"vocab": 61, "width": 32, "heads": 4, "layers": 2, "max_length": 64, "dropout": 0.1}
TRAIN = TrainConfig(batch=4, accumulate=2, clip_norm=1.0, ema=0.9, z_loss=1e-4, label_smoothing=0.1)


class Elsewhere(TorchDispatchMode):
    """Notes the tensors that come into being on another device than `device`.

    Vectors are let be: frequencies are a few float64 numbers that a host makes, because accelerators lack float64.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.found = device, {}  # type: ignore[var-annotated]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.device.type != self.device and x.dim() > 1:
                ours = [frame for frame in traceback.extract_stack() if "backend_torch" in frame.filename]
                where = f"{ours[-1].filename.rsplit('/', 1)[-1]}:{ours[-1].lineno}" if ours else "?"
                self.found[where] = f"{function} {tuple(x.shape)} on {x.device}"
        return out


def rows() -> Iterator[Row]:
    """One row for each configuration and precision, then the control."""
    for name, more in CONFIGS.items():
        config = ModelConfig.from_dict({**ModelConfig(**BASE).to_dict(), **more})
        for precision in ("float32", "bfloat16"):
            yield step_under_meta(f"train step, {name}, {precision}", config, TRAIN.replace(precision=precision))
    yield control()


def step_under_meta(name: str, config: ModelConfig, train: TrainConfig) -> Row:
    """Forward, backward, accumulation, norm, clipping, AdamW and the average of one update."""
    try:
        trainer = B.Trainer(B.Transformer(config, device="meta"), train)
        parts = [tensors(batch(config, train.batch // train.accumulate), torch.device("meta"))] * train.accumulate
        root = B.key(train.seed).to("meta")
        with Elsewhere("meta") as watch:
            trainer.accumulate(parts, root, counted=1)
            global_norm(trainer.grads)
            clip(trainer.grads, math.inf, train.clip_norm)
            update(train, trainer.flat, trainer.grads, trainer.state, t=1, lr=1e-3)
    except Exception as error:  # a row of the report
        return Row(name, "meta", "ran", "failed", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    if watch.found:
        where, what = next(iter(watch.found.items()))
        return Row(name, "meta", "ran", "failed", f"{where} makes {what}, and {len(watch.found) - 1} other places")
    return Row(name, "meta", "ran", "ok", "every tensor where its inputs are")


def batch(config: ModelConfig, rows: int, length: int = 12) -> dict[str, np.ndarray]:
    data = {"tokens": np.zeros((rows, length), np.int64), "lengths": np.full(rows, length)}
    data["targets"] = np.zeros(rows if config.head == "classifier" else (rows, length), np.int64)
    if config.kind == "encoder_decoder":
        data |= {"context": np.zeros((rows, 7), np.int64), "context_lengths": np.full(rows, 7)}
    return data


def control() -> Row:
    """A module that makes its mask on the host must be seen."""
    with Elsewhere("meta") as watch:
        torch.ones(3, 3).tril()
    name = "a mask made on the host"
    if watch.found:
        return Row(name, "control", "refused", "ok", next(iter(watch.found.values())))
    return Row(name, "control", "refused", "failed", "it was not seen, so a pass says nothing")
