"""One training run from the command line: its settings, its folder, its loop.

DIR/step-00000300/   checkpoints (contract.checkpoints)
    run.json         the settings and the text's digest: what a resumed run must keep
    log.jsonl        one line per update
    validation.jsonl one line per measurement on the held-out part: at the end, and with --evaluate-every
    loss.png         the curve, where matplotlib is installed
    events.out.*     the same numbers for TensorBoard, where tensorboard is installed
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from .checkpoints import read_checkpoint
from .config import ModelConfig, TrainConfig
from .cost import step_cost
from .data import batches, evaluation_batches, prefetch, split
from .parallel import Layout, check_parallel_batch
from .peak import measure_peak
from .plots import draw_losses
from .progress import Progress, bits_per_byte
from .run_log import UPDATES, VALIDATION, RunLog, read_curve
from .settings import Settings, master, merge, placed, read_run, run_folder, source_of, stored_settings
from .source import Source, open_source
from .tensor_file import require_package, write_whole

# Enough for a mean that moves by less than 0.01 from one draw of windows to another, and seconds on a CPU.
EVALUATION_BATCHES = 64
# Updates between checkpoints: seconds to minutes of work, where one is written in the background in less than one.
CHECKPOINT_EVERY = 100
# Seconds in which a second Ctrl-C is the first one, sent on by a launcher; nobody presses twice that fast by intent.
ONE_PRESS = 0.5


@dataclass(frozen=True)
class Size:
    width: int
    heads: int
    layers: int
    length: int
    batch: int
    steps: int
    lr: float
    schedule: str = "constant"


# Rotary positions, RMS norm and no biases, as in most models of these years. "small" reads the default text not quite
# four times, in windows of four so that it takes more updates, and ends at rate 0: it then beats gzip and bz2.
SIZES = {
    "tiny": Size(width=64, heads=4, layers=2, length=64, batch=16, steps=300, lr=3e-3),
    "small": Size(width=256, heads=8, layers=4, length=256, batch=4, steps=1500, lr=3e-3, schedule="linear"),
    "medium": Size(width=512, heads=8, layers=8, length=512, batch=8, steps=1000, lr=6e-4),
}


@dataclass
class Session:
    """A run about to start: the trainer stands where its checkpoint does. `share`: `Progress`. `new`: not resumed."""

    trainer: Any
    name: str
    out: Path
    settings: Settings
    source: Source
    train: np.ndarray
    validation: np.ndarray
    share: float
    described: str
    new: bool = False


def model_config(size: str, length: int, vocab: int = 256) -> ModelConfig:
    """The decoder of a size, by default one of bytes."""
    shape = SIZES[size]
    return ModelConfig(
        vocab=vocab,
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
    """Ten updates of warm-up; a run with a constant rate can be made longer by resuming it."""
    return TrainConfig(
        steps=settings.steps,
        batch=settings.batch,
        lr=settings.lr,
        warmup=min(10, settings.steps),
        schedule=settings.schedule,
        seed=settings.seed,
        precision=settings.precision,
    )


def begin(
    backend: ModuleType,
    name: str,
    given: Settings,
    *,
    out: str | None,
    device: str | None,
    parallel: dict[str, int] | None = None,
) -> Session:
    """A new run, in a folder of its own."""
    _check_alone(parallel)
    size = given.size or "tiny"
    shape = SIZES[size]
    defaults = Settings(
        None, None, size, shape.steps, shape.batch, shape.length, shape.lr, 0, "float32", shape.schedule,
        CHECKPOINT_EVERY,
    )  # fmt: skip
    settings = merge(defaults, given)
    if settings.steps < 1:
        raise ValueError(f"--steps must be at least 1; got {settings.steps}")
    require_package("safetensors.numpy")  # for the checkpoints: not to be missed after a hundred updates
    source = open_source(settings.text, settings.data)
    train, validation = split(source.tokens, length=settings.length)
    # Everything that can be refused is refused before the folder is made.
    schedule, config = (
        train_config(settings).replace(parallel=parallel),
        model_config(size, settings.length, source.vocab),
    )
    folder = _new_folder(Path(out) if out is not None else None, f"{name}-{size}")
    model = backend.Transformer(config, seed=schedule.seed, dtype=master(schedule), device=device)
    trainer = backend.Trainer(model, schedule)
    _check_windows(parallel, config, settings)
    share = _share(backend, config, settings, device)
    described = f"{name}, {size}: {_parameters(config):,} parameters, {len(train):,} {source.unit}s of {source.label}"
    return Session(trainer, name, folder, placed(settings), source, train, validation, share, described, new=True)


def resume(
    backend: ModuleType,
    name: str,
    given: Settings,
    folder: str,
    *,
    out: str | None,
    device: str | None,
    parallel: dict[str, int] | None = None,
) -> Session:
    """A run that goes on where a checkpoint, of any backend, ends; with a constant rate `steps` may be another."""
    _check_alone(parallel)
    checkpoint = read_checkpoint(folder)
    stored = stored_settings(checkpoint)
    free = {"text", "data", "checkpoint_every", "evaluate_every"} | (
        {"steps"} if stored.schedule == "constant" else set()
    )
    differing = [
        f"--{field.name} is {was!r} in {checkpoint.path} and not {wanted!r}"
        for field in dataclasses.fields(Settings)
        if field.name not in free
        and (wanted := getattr(given, field.name)) is not None
        and wanted != (was := getattr(stored, field.name))
    ]
    if differing:
        raise ValueError(f"{', '.join(differing)}: a resumed run keeps what it was started with")
    settings = merge(merge(Settings(checkpoint_every=CHECKPOINT_EVERY), stored), given)
    if settings.length is None:
        raise ValueError(f"{checkpoint.path} was not written by this command line: give --length")
    source = source_of(settings, checkpoint.config.vocab)
    known = read_run(checkpoint).get("digest")
    if known is not None and known != source.digest:
        raise ValueError(
            f"{source.label} is not the {'text' if source.unit == 'byte' else 'data'} that {checkpoint.path} was "
            "trained on: its digest differs"
        )
    train, validation = split(source.tokens, length=settings.length)
    if settings.steps <= checkpoint.step:
        what = "give --steps above that" if "steps" in free else f"the end of its {stored.schedule} schedule"
        raise ValueError(f"{checkpoint.path} has {checkpoint.step} updates already: {what}")
    trainer = backend.Trainer.load(checkpoint.path, device=device, parallel=parallel)
    _check_windows(parallel, checkpoint.config, settings)
    if settings.steps > trainer.config.steps:  # the checkpoints to come say how far the run goes
        trainer.config = trainer.config.replace(steps=settings.steps)
    share = _share(backend, checkpoint.config, settings, device)
    where = Path(out) if out is not None else run_folder(checkpoint)
    described = f"{name}: {_parameters(checkpoint.config):,} parameters, going on after update {checkpoint.step}"
    return Session(trainer, name, where, placed(settings), source, train, validation, share, described)


def _check_alone(parallel: dict[str, int] | None) -> None:
    """Processes that torchrun started share a run, or each would train by itself and write into the same folder."""
    count = os.environ.get("WORLD_SIZE", "1") if "RANK" in os.environ else "1"
    if parallel is None and count.isdecimal() and int(count) > 1:
        raise ValueError(
            f"--parallel must say how the {count} processes that were started share the run, data={count} say: without "
            "it each would train by itself"
        )


def _check_windows(parallel: dict[str, int] | None, config: ModelConfig, settings: Settings) -> None:
    """The windows of a run in their layout, which a trainer sees with the first batch, when there is a folder."""
    windows = np.broadcast_to(0, (settings.batch, settings.length))
    check_parallel_batch(Layout.of(parallel), config, {"tokens": windows}, 1)


def same_everywhere(session: Session) -> dict[str, Any]:
    """What all processes of a run must have alike beside configurations, or they would wait for one another for ever.

    Files have other names on other machines: of the text its digest counts.
    """
    settings = {name: x for name, x in dataclasses.asdict(session.settings).items() if name not in ("text", "data")}
    return {**settings, "digest of the text": session.source.digest, "updates": session.trainer.updates}


def _share(backend: ModuleType, config: ModelConfig, settings: Settings, device: str | None) -> float:
    """What one token per second is of the FLOPs per second that the backend's own matrix product reaches."""
    flops = step_cost(config, settings.batch, settings.length).total.flops
    return flops / (settings.batch * settings.length) / measure_peak(backend, settings.precision, device)


def run(session: Session, *, as_json: bool, plain: bool) -> int:
    """Update until `steps`, then evaluate and save. Ctrl-C finishes the update in hand, saves and says where: 130."""
    settings, out, trainer, steps = session.settings, session.out, session.trainer, session.settings.steps
    every, evaluate_every = settings.checkpoint_every, settings.evaluate_every
    _make_folder(out, new=session.new)
    described = {**dataclasses.asdict(settings), "digest": session.source.digest, "backend": session.name}
    write_whole(out / "run.json", json.dumps(described, indent=1).encode())
    stream = batches(
        session.train, batch=settings.batch, length=settings.length, seed=settings.seed, start=trainer.batches
    )
    progress = Progress(trainer.updates, steps, as_json=as_json, plain=plain, unit=session.source.unit,
                        share=session.share)  # fmt: skip
    saved = -1
    # Several processes stop after the same update, or those that go on would wait for those that have stopped.
    any_process: Callable[[bool], bool] = getattr(trainer, "said_by_any", bool)
    try:
        progress.message(session.described)
        with RunLog(out, session.name) as log:
            with _interruptible() as interrupted, prefetch(stream) as ahead:
                while trainer.updates < steps and not any_process(interrupted.is_set()):
                    before = trainer.updates
                    report = trainer.step(next(ahead))
                    if trainer.updates == before:
                        continue  # left out, as the trainer's own warning says
                    log.write(progress.row(trainer.updates, report))
                    if trainer.updates % every == 0:
                        log.flush()
                        trainer.save(out, background=True)
                        saved = trainer.updates
                    if evaluate_every is not None and trainer.updates % evaluate_every == 0 and trainer.updates < steps:
                        _measure(session, log, progress)
            trainer.wait()
            if saved != trainer.updates:
                trainer.save(out)
            if trainer.updates < steps:
                progress.message(
                    f"interrupted: saved {out} after update {trainer.updates}; go on with --resume {out}",
                    interrupted=True, step=trainer.updates, out=str(out),
                )  # fmt: skip
                return 130
            _measure(session, log, progress)
        _draw(session, progress)
    finally:
        progress.close()
    return 0


def _measure(session: Session, log: RunLog, progress: Progress) -> None:
    """The loss on the held-out part, written down and said; the time it takes is not that of the updates."""
    settings, unit, step, begin = session.settings, session.source.unit, session.trainer.updates, time.perf_counter()
    held_out = evaluation_batches(
        session.validation, batch=settings.batch, length=settings.length, limit=EVALUATION_BATCHES
    )
    loss = float(session.trainer.evaluate(held_out)["loss"])
    bits = bits_per_byte(loss)
    log.measured({"step": step, "loss": loss, f"bits_per_{unit}": bits})
    progress.pause(time.perf_counter() - begin)
    place = f"; the run is in {session.out}" if step == settings.steps else f" after update {step}"
    progress.message(
        f"validation: loss {loss:.4f}, {bits:.4f} bits per {unit}{place}",
        step=step, validation_loss=loss, **{f"bits_per_{unit}": bits}, out=str(session.out),
    )  # fmt: skip


def _draw(session: Session, progress: Progress) -> None:
    """The curves, where matplotlib is installed."""
    out = session.out
    try:
        draw_losses(
            out / "loss.png",
            {session.name: read_curve(out / UPDATES)},
            validation=read_curve(out / VALIDATION),
            title=session.described,
            unit=session.source.unit,
        )
    except ImportError:
        progress.message("no loss.png: it needs the package matplotlib (pip install matplotlib)")


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """An event that Ctrl-C sets, so that no update is cut in half; a second Ctrl-C stops at once.

    One press may come twice: a launcher of processes, torchrun say, passes on what the terminal has sent already.
    """
    event, pressed = threading.Event(), [0.0]
    if threading.current_thread() is not threading.main_thread():
        yield event  # only the main thread may take signals
        return
    before = signal.getsignal(signal.SIGINT)

    def handle(number: int, frame: Any) -> None:
        if event.is_set():
            if time.monotonic() - pressed[0] > ONE_PRESS:
                raise KeyboardInterrupt
            return
        event.set()
        pressed[0] = time.monotonic()
        print("\nfinishing this update; once more to stop at once", file=sys.stderr)

    signal.signal(signal.SIGINT, handle)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)


def _make_folder(out: Path, new: bool) -> None:
    """The folder, and for a new run its run.json, which only one of two that began at the same time can make."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        if new:
            (out / "run.json").touch(exist_ok=False)
    except FileExistsError as error:
        if not out.is_dir():
            raise OSError(error.errno, f"cannot make the run's folder {out}: {error.strerror}") from error
        raise ValueError(_taken(out)) from None
    except OSError as error:
        raise OSError(error.errno, f"cannot make the run's folder {out}: {error.strerror}") from error


def _taken(out: Path) -> str:
    return f"{out} holds a run already: go on with --resume {out}, or give another --out"


def _new_folder(out: Path | None, name: str) -> Path:
    """A folder without a run in it: the one asked for, or runs/<name>, runs/<name>-2 and so on."""
    if out is not None:
        if (out / "run.json").exists() or list(out.glob("step-*")):
            raise ValueError(_taken(out))
        return out
    folder, number = Path("runs") / name, 1
    while folder.exists():
        number += 1
        folder = Path("runs") / f"{name}-{number}"
    return folder


def _parameters(config: ModelConfig) -> int:
    from .parameters import model_parameters

    return sum(int(np.prod(parameter.shape)) for parameter in model_parameters(config).values())
