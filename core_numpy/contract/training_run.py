"""One training run from the command line: its settings, its folder, its loop.

DIR/step-00000300/   checkpoints (contract.checkpoints)
    run.json         the settings and the text's digest: what a resumed run must keep
    log.jsonl        one line per update
    loss.png         the curve, where matplotlib is installed
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from .checkpoints import Checkpoint, read_checkpoint
from .config import ModelConfig, TrainConfig
from .data import batches, byte_tokens, default_text, evaluation_batches, read_text, split
from .plots import draw_losses
from .progress import Progress, bits_per_byte
from .tensor_file import write_whole

# Enough for a mean that moves by less than 0.01 from one draw of windows to another, and seconds on a CPU.
EVALUATION_BATCHES = 64


@dataclass(frozen=True)
class Size:
    width: int
    heads: int
    layers: int
    length: int
    batch: int
    steps: int
    lr: float


# Rotary positions, RMS norm and no biases, as in most models of these years. Rates fall with width.
SIZES = {
    "tiny": Size(width=64, heads=4, layers=2, length=64, batch=16, steps=300, lr=3e-3),
    "small": Size(width=256, heads=8, layers=4, length=256, batch=8, steps=300, lr=1e-3),
    "medium": Size(width=512, heads=8, layers=8, length=512, batch=8, steps=1000, lr=6e-4),
}


@dataclass(frozen=True)
class Settings:
    """What was asked for; None is "as it was" for a resumed run and "by size" for a new one.

    In a `Session` all but text and size have a value.
    """

    text: str | None = None
    size: str | None = None
    steps: Any = None
    batch: Any = None
    length: Any = None
    lr: Any = None
    seed: Any = None
    precision: Any = None


@dataclass
class Session:
    """A run about to start: the trainer stands after `step` updates."""

    trainer: Any
    name: str
    out: Path
    settings: Settings
    digest: str
    train: np.ndarray
    validation: np.ndarray
    step: int
    described: str


def model_config(size: str, length: int) -> ModelConfig:
    """The byte-level decoder of a size."""
    shape = SIZES[size]
    return ModelConfig(
        vocab=256,
        width=shape.width,
        heads=shape.heads,
        layers=shape.layers,
        max_length=max(1024, length),  # of caches; rotary positions have no longest length
        positions="rotary",
        norm="rms",
        attention_bias=False,
        ffn_bias=False,
    )


def train_config(settings: Settings) -> TrainConfig:
    """A constant rate after ten updates of warm-up, so that a run can be made longer by resuming it."""
    return TrainConfig(
        steps=settings.steps,
        batch=settings.batch,
        lr=settings.lr,
        warmup=min(10, settings.steps),
        schedule="constant",
        seed=settings.seed,
        precision=settings.precision,
    )


def load_text(path: str | None) -> tuple[bytes, str]:
    """The bytes and what to call them; None is the default text."""
    return (default_text().encode(), "CPython's help topics") if path is None else (read_text(path), path)


def begin(backend: ModuleType, name: str, given: Settings, *, out: str | None, device: str | None) -> Session:
    """A new run, in a folder of its own."""
    size = given.size or "tiny"
    shape = SIZES[size]
    defaults = Settings(None, size, shape.steps, shape.batch, shape.length, shape.lr, 0, "float32")
    settings = _merge(defaults, given)
    if settings.steps < 1:
        raise ValueError(f"--steps must be at least 1; got {settings.steps}")
    text, label = load_text(settings.text)
    train, validation = split(byte_tokens(text), length=settings.length)
    # Everything that can be refused is refused before the folder is made.
    schedule, config = train_config(settings), model_config(size, settings.length)
    folder = _new_folder(Path(out) if out is not None else None, f"{name}-{size}")
    trainer = backend.Trainer(backend.Transformer(config, seed=schedule.seed, device=device), schedule)
    described = f"{name}, {size}: {_parameters(config):,} parameters, {len(train):,} bytes of {label}"
    return Session(trainer, name, folder, settings, _digest(text), train, validation, 0, described)


def resume(
    backend: ModuleType, name: str, given: Settings, source: str, *, out: str | None, device: str | None
) -> Session:
    """A run that goes on where a checkpoint, of any backend, ends; only `steps` may be another."""
    checkpoint = read_checkpoint(source)
    stored = stored_settings(checkpoint)
    for field in dataclasses.fields(Settings):
        wanted, was = getattr(given, field.name), getattr(stored, field.name)
        if field.name not in ("steps", "text") and wanted is not None and wanted != was:
            raise ValueError(
                f"--{field.name} is {was!r} in {checkpoint.path} and a resumed run keeps it; got {wanted!r}"
            )
    settings = _merge(stored, given)
    if settings.length is None:
        raise ValueError(f"{checkpoint.path} was not written by this command line: give --length")
    text, label = load_text(settings.text)
    known = _read_run(checkpoint).get("digest")
    if known is not None and known != _digest(text):
        raise ValueError(f"{label} is not the text that {checkpoint.path} was trained on: its digest differs")
    train, validation = split(byte_tokens(text), length=settings.length)
    if settings.steps <= checkpoint.step:
        raise ValueError(f"{checkpoint.path} has {checkpoint.step} updates already: give --steps above that")
    trainer = backend.Trainer.load(checkpoint.path, **({} if device is None else {"device": device}))
    folder = Path(out) if out is not None else _run_folder(checkpoint)
    described = f"{name}: {_parameters(checkpoint.config):,} parameters, going on after update {checkpoint.step}"
    return Session(trainer, name, folder, settings, _digest(text), train, validation, checkpoint.step, described)


def run(session: Session, *, every: int | None, as_json: bool, plain: bool) -> int:
    """Update until `steps`, then evaluate and save. Ctrl-C finishes the update in hand, saves and says where: 130."""
    settings, out = session.settings, session.out
    out.mkdir(parents=True, exist_ok=True)
    described = {**dataclasses.asdict(settings), "digest": session.digest, "backend": session.name}
    write_whole(out / "run.json", json.dumps(described, indent=1).encode())
    steps, step = settings.steps, session.step
    stream = batches(session.train, batch=settings.batch, length=settings.length, seed=settings.seed, start=step)
    progress = Progress(step, steps, as_json=as_json, plain=plain)
    saved = -1
    try:
        progress.message(session.described)
        with _interruptible() as interrupted, open(out / "log.jsonl", "a", encoding="utf-8") as log:
            while step < steps and not interrupted.is_set():
                row = progress.row(step + 1, session.trainer.step(next(stream)))
                step += 1
                log.write(json.dumps({**row, "backend": session.name}) + "\n")
                if every is not None and step % every == 0:
                    log.flush()
                    session.trainer.save(out)
                    saved = step
        if saved != step:
            session.trainer.save(out)
        if step < steps:
            progress.message(
                f"interrupted: saved {out} after update {step}; go on with --resume {out}",
                interrupted=True, step=step, out=str(out),
            )  # fmt: skip
            return 130
        _finish(session, progress, step)
    finally:
        progress.close()
    return 0


def _finish(session: Session, progress: Progress, step: int) -> None:
    """Measure on the held-out part, draw the curve, say where everything is."""
    settings, out = session.settings, session.out
    held_out = evaluation_batches(
        session.validation, batch=settings.batch, length=settings.length, limit=EVALUATION_BATCHES
    )
    loss = float(session.trainer.evaluate(held_out)["loss"])
    try:
        draw_losses(
            out / "loss.png",
            {session.name: _curve(out / "log.jsonl")},
            validation=(step, loss),
            title=session.described,
        )
    except ImportError:
        progress.message("no loss.png: it needs the package matplotlib (pip install matplotlib)")
    progress.message(
        f"validation: loss {loss:.4f}, {bits_per_byte(loss):.4f} bits per byte; the run is in {out}",
        step=step, validation_loss=loss, bits_per_byte=bits_per_byte(loss), out=str(out),
    )  # fmt: skip


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """An event that Ctrl-C sets, so that no update is cut in half; a second Ctrl-C stops at once."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event  # only the main thread may take signals
        return
    before = signal.getsignal(signal.SIGINT)

    def handle(number: int, frame: Any) -> None:
        event.set()
        signal.signal(signal.SIGINT, before)
        print("\nfinishing this update; once more to stop at once", file=sys.stderr)

    signal.signal(signal.SIGINT, handle)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)


def stored_settings(checkpoint: Checkpoint) -> Settings:
    """What the run of a checkpoint was started with; the checkpoint itself where there is no run.json."""
    found, config = _read_run(checkpoint), checkpoint.train_config
    own = Settings(steps=config.steps, batch=config.batch, lr=config.lr, seed=config.seed, precision=config.precision)
    names = {field.name for field in dataclasses.fields(Settings)}
    return _merge(Settings(**{name: value for name, value in found.items() if name in names}), own)


def _read_run(checkpoint: Checkpoint) -> dict[str, Any]:
    path = _run_folder(checkpoint) / "run.json"
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: expected an object of settings")
    return found


def _run_folder(checkpoint: Checkpoint) -> Path:
    return checkpoint.path.resolve().parent


def _merge(under: Settings, over: Settings) -> Settings:
    changes = {name: value for name, value in dataclasses.asdict(over).items() if value is not None}
    return dataclasses.replace(under, **changes)


def _new_folder(out: Path | None, name: str) -> Path:
    """A folder without a run in it: the one asked for, or runs/<name>, runs/<name>-2 and so on."""
    if out is not None:
        if (out / "run.json").exists() or list(out.glob("step-*")):
            raise ValueError(f"{out} holds a run already: go on with --resume {out}, or give another --out")
        return out
    folder, number = Path("runs") / name, 1
    while folder.exists():
        number += 1
        folder = Path("runs") / f"{name}-{number}"
    return folder


def _curve(path: Path) -> list[tuple[int, float]]:
    """Step and loss of a log; of a step logged twice, by a run that was resumed earlier, the later line."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return sorted({row["step"]: row["loss"] for row in rows}.items())


def _parameters(config: ModelConfig) -> int:
    from .parameters import model_parameters

    return sum(int(np.prod(parameter.shape)) for parameter in model_parameters(config).values())


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()
