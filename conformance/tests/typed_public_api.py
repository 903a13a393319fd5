"""The public API of all three packages as a user's type checker sees it: `make lint` checks this, nothing runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, assert_type

import jax
import numpy as np
import torch

import backend_jax
import backend_torch
import core_numpy
from core_numpy import ModelConfig, TrainConfig

CONFIG = ModelConfig(vocab=256, width=64, heads=4, layers=2, max_length=128)
TRAINING = TrainConfig(steps=100, lr=1e-3, precision="float32")


def reference(q: np.ndarray, lengths: np.ndarray, batch: dict[str, Any], folder: Path) -> None:
    assert_type(core_numpy.attention(q, q, q, causal=True, window=(16, 0), kv_lengths=lengths), np.ndarray)
    out, lse = core_numpy.attention_with_lse(q, q, q, scale=0.5, softcap=30.0)
    merged = core_numpy.merge_attention([out, out], [lse, lse])
    assert_type(merged[0], np.ndarray)
    assert_type(core_numpy.causal_mask(8, 8, q_offset=0), np.ndarray)
    assert_type(core_numpy.layer_norm(q, None, None, eps=1e-5), np.ndarray)
    model = core_numpy.Transformer(CONFIG, seed=0)
    trainer = core_numpy.Trainer(model, TRAINING)
    report: dict[str, Any] = trainer.step(batch)
    path: Path = trainer.save(folder)
    again: core_numpy.Trainer = core_numpy.Trainer.load(path)
    params: dict[str, np.ndarray] = core_numpy.get_params(again.model)
    core_numpy.set_params(model, params)
    print(report["loss"])


def in_torch(q: torch.Tensor, lengths: torch.Tensor, batch: dict[str, Any], folder: Path) -> None:
    assert_type(backend_torch.attention(q, q, q, causal=True, window=(16, 0), kv_lengths=lengths), torch.Tensor)
    out, lse = backend_torch.attention_with_lse(q, q, q, scale=0.5, softcap=30.0)
    merged = backend_torch.merge_attention([out, out], [lse, lse])
    assert_type(merged[0], torch.Tensor)
    assert_type(backend_torch.causal_mask(8, 8, q_offset=0), torch.Tensor)
    assert_type(backend_torch.layer_norm(q, None, None, eps=1e-5), torch.Tensor)
    model = backend_torch.Transformer(CONFIG, seed=0, device="cpu")
    module: torch.nn.Module = model
    trainer = backend_torch.Trainer(model, TRAINING)
    report: dict[str, Any] = trainer.step(batch)
    path: Path = trainer.save(folder, background=True)
    again: backend_torch.Trainer = backend_torch.Trainer.load(path)
    params: dict[str, np.ndarray] = backend_torch.get_params(again.model)
    backend_torch.set_params(model, params)
    print(report["loss"], module)


def in_jax(q: jax.Array, lengths: jax.Array, batch: dict[str, Any], folder: Path) -> None:
    assert_type(backend_jax.attention(q, q, q, causal=True, window=(16, 0), kv_lengths=lengths), jax.Array)
    out, lse = backend_jax.attention_with_lse(q, q, q, scale=0.5, softcap=30.0)
    merged = backend_jax.merge_attention([out, out], [lse, lse])
    assert_type(merged[0], jax.Array)
    assert_type(backend_jax.causal_mask(8, 8, q_offset=0), jax.Array)
    assert_type(backend_jax.layer_norm(q, None, None, eps=1e-5), jax.Array)
    model = backend_jax.Transformer(CONFIG, seed=0)
    trainer = backend_jax.Trainer(model, TRAINING)
    report: dict[str, Any] = trainer.step(batch)
    path: Path = trainer.save(folder, background=True)
    again: backend_jax.Trainer = backend_jax.Trainer.load(path)
    params: dict[str, np.ndarray] = backend_jax.get_params(again.model)
    backend_jax.set_params(model, params)
    print(report["loss"])
