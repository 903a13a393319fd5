"""A backend that is a table of logits: what the command line does by itself, in no time."""

from __future__ import annotations

import json
import types

import numpy as np

from core_numpy.contract import training_run
from core_numpy.contract.checkpoints import read_checkpoint, write_checkpoint
from core_numpy.contract.schedule import learning_rate


class Bigram:
    """A table of logits in the place of a Transformer: the next byte from the last."""

    def __init__(self, config, *, seed=0, dtype="float32", device=None, size=256):
        if device not in (None, "cpu"):
            raise ValueError(f"device must be 'cpu'; got {device!r}")
        self.config, self.params = config, {"table": np.zeros((size, size), np.float32)}


class Trainer:
    def __init__(self, model, config):
        self.model, self.config, self.updates, self.batches = model, config, 0, 0

    def _loss(self, batch):
        tokens, targets = batch["tokens"].ravel(), batch["targets"].ravel()
        logits = self.model.params["table"][tokens].astype(np.float64)
        p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        return tokens, targets, p, float(-np.log(p[np.arange(len(p)), targets]).mean())

    def step(self, batch):
        tokens, targets, p, loss = self._loss(batch)
        p[np.arange(len(p)), targets] -= 1
        self.updates += 1
        self.batches += 1
        lr = learning_rate(self.config, self.updates)
        np.add.at(self.model.params["table"], tokens, -100 * lr * p.astype(np.float32))
        return {"loss": loss, "grad_norm": 1.0, "lr": lr, "tokens": len(tokens)}

    def evaluate(self, batches):
        rows = [(self._loss(batch)[3], batch["tokens"].size) for batch in batches]
        count = sum(size for _, size in rows)
        return {"loss": sum(loss * size for loss, size in rows) / count, "tokens": count}

    def save(self, path, *, background=False):
        write_checkpoint(path, step=self.updates, params=self.model.params, state={}, config=self.model.config,
                         train_config=self.config)  # fmt: skip

    def wait(self):
        pass

    @classmethod
    def load(cls, path, *, device=None, parallel=None):
        found = read_checkpoint(path)
        trainer = cls(Bigram(found.config), found.train_config)
        trainer.model.params, trainer.updates, trainer.batches = found.params, found.step, found.step
        return trainer


def generate(model, tokens, *, max_new, temperature=0, top_k=None, top_p=None, key=None):
    for _ in range(max_new):
        tokens = np.concatenate([tokens, model.params["table"][tokens[:, -1]].argmax(-1)[:, None]], axis=1)
    return tokens


def make(tmp_path, monkeypatch):
    """A backend whose name is the reference's, so that arrays are NumPy's; runs happen in a folder of their own."""
    backend = types.ModuleType("core_numpy")
    backend.Transformer, backend.Trainer, backend.generate = Bigram, Trainer, generate
    backend.set_params = lambda model, params: setattr(model, "params", params)
    backend.key = lambda seed: seed
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training_run, "measure_peak", lambda *arguments: 1e9)
    (tmp_path / "text.txt").write_text("abcd" * 500)
    return backend


RUN = ["train", "--text", "text.txt", "--length", "6", "--batch", "3", "--plain"]


def logged(path="runs/numpy-tiny", file="log.jsonl"):
    with open(f"{path}/{file}") as lines:
        return [json.loads(line) for line in lines]
