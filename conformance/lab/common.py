"""What an experiment hands back, and what all of them need: arrays in and out, training, accuracy, intervals.

An experiment is a module with `CLAIM` (one line) and `run(B) -> Report`, where B is one of our three packages.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from core_numpy.contract import data
from core_numpy.contract.shuffle import permutation

TRAIN, VALID = 8000, 2000
NOT_OFFERED = "not offered"


@dataclass(frozen=True)
class Claim:
    """What is said, what was measured, and whether the one bears the other out."""

    text: str
    measured: str
    held: bool


@dataclass(frozen=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Report:
    """`draw` puts the picture on a matplotlib figure; `size` is in inches."""

    claims: Sequence[Claim]
    tables: Sequence[Table]
    draw: Callable[[Any], None]
    size: tuple[float, float] = (8.0, 4.5)
    notes: Sequence[str] = ()


def into(B: Any, x: Any) -> Any:
    """A NumPy array as B's own kind of array."""
    return B.from_numpy(x) if hasattr(B, "from_numpy") else np.asarray(x)


def back(B: Any, x: Any) -> np.ndarray:
    """B's own kind of array as a NumPy array."""
    return np.asarray(B.to_numpy(x) if hasattr(B, "to_numpy") else x)


@cache
def digits() -> tuple[data.Batch, data.Batch]:
    """The course's task, to train and to validate: is the first of eight digits repeated later?"""
    return data.repeat_task(TRAIN, seed=1), data.repeat_task(VALID, seed=2)


def batches(whole: data.Batch, size: int, steps: int, *, seed: int = 0) -> Iterator[data.Batch]:
    """`steps` batches of `size` rows, epoch after epoch, each in an order of its own."""
    count = len(whole["tokens"])
    each = count // size
    for step in range(steps):
        epoch, place = divmod(step, each)
        rows = permutation(seed, epoch, count)[place * size : (place + 1) * size]
        yield {name: values[rows] for name, values in whole.items()}


def classifier(B: Any, **fields: Any) -> Any:
    """The configuration of a small encoder of digits with two classes; `fields` replace its own."""
    usual = {"vocab": 10, "width": 32, "heads": 4, "layers": 1, "max_length": 8, "kind": "encoder"}
    return B.ModelConfig(**usual | {"head": "classifier", "classes": 2} | fields)


def train(
    B: Any, config: Any, whole: data.Batch, *, steps: int, lr: float = 3e-3, seed: int = 0, **fields: Any
) -> tuple[Any, float]:
    """A model trained on batches of 64, and the seconds that took; `fields` go into the TrainConfig."""
    options = B.TrainConfig(**{"steps": steps, "batch": 64, "lr": lr, "weight_decay": 0.01, "seed": seed} | fields)
    trainer = B.Trainer(B.Transformer(config, seed=seed), options)
    start = time.perf_counter()
    trainer.fit(batches(whole, options.batch, steps, seed=seed))
    return trainer.model, time.perf_counter() - start


def accuracy(B: Any, model: Any, whole: data.Batch, **call: Any) -> float:
    """The share of rows whose likelier class is the target."""
    if "lengths" in whole:
        call["kv_lengths"] = into(B, whole["lengths"])
    if "segments" in whole:
        call["segments"] = into(B, whole["segments"])
    logits = back(B, _forward(B)(model, into(B, whole["tokens"]), **call))
    return float((logits.argmax(-1) == whole["targets"]).mean())


@cache
def _forward(B: Any) -> Callable[..., Any]:
    """model(tokens, ...) as the framework's users run it once: compiled whole in JAX, op by op elsewhere."""

    def forward(model: Any, tokens: Any, **call: Any) -> Any:
        return model(tokens, **call)

    if B.__name__ != "backend_jax":
        return forward
    from flax import nnx

    return nnx.jit(forward)


def share_interval(share: float, n: int = VALID) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of n rows (Wilson 1927): right also at 0 and 1."""
    z = 1.959964  # the normal distribution's 97.5 % point
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    reach = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return middle - reach, middle + reach


def mean_interval(values: np.ndarray) -> tuple[float, float, float]:
    """The mean of independent draws and its 95 % interval."""
    mean, reach = float(values.mean()), 1.959964 * float(values.std(ddof=1)) / math.sqrt(len(values))
    return mean, mean - reach, mean + reach


def shown(value: float, low: float, high: float, form: str = ".4f") -> str:
    """A figure with its interval."""
    return f"{value:{form}} ({low:{form}} to {high:{form}})"


def share(value: float, n: int = VALID) -> str:
    """A share with its interval."""
    return shown(value, *share_interval(value, n))


def heat(axes: Any, values: np.ndarray, labels: Sequence[str] | None = None, title: str = "") -> Any:
    """Weights as a picture: rows are queries, columns are keys, black is 1."""
    image = axes.imshow(values, cmap="Greys", vmin=0.0, vmax=1.0, aspect="equal")
    if labels is None:
        axes.set_xticks(range(values.shape[1]))
        axes.set_yticks(range(values.shape[0]))
    else:
        axes.set_xticks(range(values.shape[1]), labels[: values.shape[1]])
        axes.set_yticks(range(values.shape[0]), labels[: values.shape[0]])
    axes.set_title(title, fontsize=10)
    return image
