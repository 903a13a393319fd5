"""What a training run was started with: asked for on the command line, kept in its folder, kept by a resumed run."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checkpoints import Checkpoint
from .config import TrainConfig
from .json_file import read_object
from .source import Source, open_source


@dataclass(frozen=True)
class Settings:
    """What was asked for; None is "as it was" for a resumed run and "by size" for a new one.

    In a `Session` all but text, data, size and evaluate_every have a value.
    """

    text: str | None = None
    data: str | None = None
    size: str | None = None
    steps: Any = None
    batch: Any = None
    length: Any = None
    lr: Any = None
    seed: Any = None
    precision: Any = None
    schedule: Any = None
    checkpoint_every: Any = None
    evaluate_every: Any = None


# What run.json may say: the kind of each setting, and whether there may be none.
KINDS: dict[str, tuple[Any, bool]] = {
    "text": (str, True), "data": (str, True), "size": (str, True), "steps": (int, False), "batch": (int, False),
    "length": (int, False), "lr": (int | float, False), "seed": (int, False), "precision": (str, False),
    "schedule": (str, False), "digest": (str, False), "backend": (str, False),
    "checkpoint_every": (int, False), "evaluate_every": (int, True),
}  # fmt: skip


def master(config: TrainConfig) -> str:
    """The dtype in which a trainer keeps parameters."""
    return "float64" if config.precision == "float64" else "float32"


def placed(settings: Settings) -> Settings:
    """The text's whole path, so that the run can be resumed from another directory."""
    text, data = (None if path is None else os.path.abspath(path) for path in (settings.text, settings.data))
    return dataclasses.replace(settings, text=text, data=data)


def source_of(settings: Settings, vocab: int) -> Source:
    """What a run was trained on, where it is now."""
    try:
        return open_source(settings.text, settings.data, vocab=vocab)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}; say where it is now with --text or --data") from error


def stored_settings(checkpoint: Checkpoint) -> Settings:
    """What the run of a checkpoint was started with; the checkpoint itself where there is no run.json."""
    found, config = read_run(checkpoint), checkpoint.train_config
    own = Settings(steps=config.steps, batch=config.batch, lr=config.lr, seed=config.seed, precision=config.precision,
                   schedule=config.schedule)  # fmt: skip
    if config.schedule == "constant" and "steps" in found:  # made longer, and stopped before its first checkpoint
        own = dataclasses.replace(own, steps=found["steps"])
    names = {field.name for field in dataclasses.fields(Settings)}
    return merge(Settings(**{name: value for name, value in found.items() if name in names}), own)


def read_run(checkpoint: Checkpoint) -> dict[str, Any]:
    """The settings in a run's folder, each of its kind; nothing where a trainer was saved by itself."""
    path = run_folder(checkpoint) / "run.json"
    if not path.is_file():
        return {}
    found = read_object(path)
    for name, (kind, may_lack) in KINDS.items():
        value = found.get(name)
        absent = value is None and (may_lack or name not in found)
        if not absent and (not isinstance(value, kind) or isinstance(value, bool)):
            raise ValueError(f"{path} is damaged: {name} is {value!r}")
        if name.endswith("_every") and value is not None and value < 1:
            raise ValueError(f"{path} is damaged: {name} is {value!r}")
    return found


def run_folder(checkpoint: Checkpoint) -> Path:
    return checkpoint.path.resolve().parent


def merge(under: Settings, over: Settings) -> Settings:
    changes = {name: value for name, value in dataclasses.asdict(over).items() if value is not None}
    return dataclasses.replace(under, **changes)
