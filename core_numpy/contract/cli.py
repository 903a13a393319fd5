"""The command line of each backend: `python -m backend_torch train|evaluate|generate`, and the same for the others.

It knows the backend by its public names alone, so that the three do the same thing and print the same numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from . import __version__
from .arguments import Parser, ended
from .checkpoints import Checkpoint, read_checkpoint
from .checks.common import require_int
from .config import ModelConfig
from .data import evaluation_batches, split
from .parallel import parse_parallel
from .progress import bits_per_byte
from .settings import Settings, master, source_of, stored_settings
from .source import open_source
from .train_config import PRECISIONS, SCHEDULES
from .training_run import CHECKPOINT_EVERY, EVALUATION_BATCHES, SIZES, begin, resume, run, same_everywhere
from .words import Words

NAMES = {"core_numpy": "numpy", "backend_torch": "torch", "backend_jax": "jax"}


def backend_name(backend: ModuleType) -> str:
    """ "torch" for backend_torch: what a user calls it, and where its runs are kept."""
    return NAMES.get(backend.__name__, backend.__name__.removeprefix("backend_"))


def to_backend(backend: ModuleType, array: np.ndarray) -> Any:
    """The backend's own array; core's own are NumPy's."""
    if backend.__name__ == "core_numpy":
        return array
    return importlib.import_module(f"{backend.__name__}.arrays").from_numpy(array)


def from_backend(backend: ModuleType, array: Any) -> np.ndarray:
    if backend.__name__ == "core_numpy":
        return np.asarray(array)
    return importlib.import_module(f"{backend.__name__}.arrays").to_numpy(array)


def main(backend: ModuleType, argv: Sequence[str] | None = None, *, join: Callable[[], None] | None = None) -> int:
    """Run one verb; gives the exit status: 0 done, 2 an error in one line on stderr, 3 where a package is missing, 130
    interrupted and saved.

    `--debug` shows the traceback instead of the line. `join` finds the other processes of a training with a layout,
    where that has to come before anything else.
    """
    arguments = build_parser(backend).parse_args(argv)
    verbs: dict[str, Callable[[ModuleType, argparse.Namespace], int]] = {
        "train": partial(train, join=join),
        "evaluate": evaluate,
        "generate": generate,
    }
    return ended(lambda: verbs[arguments.verb](backend, arguments), "error", debug=arguments.debug)


def build_parser(backend: ModuleType) -> argparse.ArgumentParser:
    program = f"python -m {backend.__name__}"
    parser = Parser(
        prog=program,
        description="Train a small byte-level language model, measure it, let it write.",
        epilog=f"Example: {program} train --size tiny --steps 100\n         {program} train --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"{program} {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="train | evaluate | generate")
    train_verb = _verb(verbs, "train", "train a model on a text", f"{program} train --text novel.txt --steps 200")
    train_verb.usage = f"{program} train [options]"
    _add_train(train_verb)
    evaluate_verb = _verb(
        verbs, "evaluate", "bits per byte on held-out text", f"{program} evaluate --resume runs/torch-tiny"
    )
    evaluate_verb.add_argument(
        "--text", metavar="PATH", help="text to measure (default: the validation part of its own)"
    )
    evaluate_verb.add_argument("--data", metavar="FILE", help="token ids to measure: .npy, .bin or .uint16")
    evaluate_verb.add_argument("--batch", type=int, metavar="N", help="windows at once (default: as in training)")
    evaluate_verb.add_argument("--length", type=int, metavar="N", help="bytes per window (default: as in training)")
    generate_verb = _verb(
        verbs, "generate", "continue a prompt", f'{program} generate --resume runs/torch-tiny "The " --max-new 200'
    )
    generate_verb.add_argument("prompt", nargs="?", help='text to continue (default: "The ")')
    generate_verb.add_argument("--max-new", type=int, default=200, metavar="N", help="tokens to add (default 200)")
    generate_verb.add_argument("--temperature", type=float, default=0.8, metavar="X", help="0 is greedy (default 0.8)")
    generate_verb.add_argument("--top-k", type=int, metavar="N", help="draw from the N likeliest tokens only")
    generate_verb.add_argument("--top-p", type=float, metavar="X", help="draw from the likeliest that sum up to X")
    generate_verb.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws (default 0)")
    evaluate_verb.add_argument("--resume", metavar="DIR", required=True, help="a run or checkpoint, of any backend")
    source = generate_verb.add_mutually_exclusive_group(required=True)
    source.add_argument("--resume", metavar="DIR", help="a run or checkpoint, of any backend")
    source.add_argument(
        "--model", metavar="FOLDER", help="a Hugging Face folder: config.json, *.safetensors, tokenizer.json"
    )
    generate_verb.add_argument(
        "--tokens", metavar="IDS", help='the prompt as token ids, "1 2 3", for a FOLDER without a tokenizer'
    )
    for verb in (train_verb, evaluate_verb, generate_verb):
        verb.add_argument(
            "--device", metavar="NAME", help="where to compute, in the backend's own words (cpu, cuda, ...)"
        )
        verb.add_argument("--json", action="store_true", help="JSON lines on stdout")
        verb.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _verb(verbs: Any, name: str, text: str, example: str) -> argparse.ArgumentParser:
    return verbs.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=f"Example: {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_train(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--text", metavar="PATH", help="file or directory (default: CPython's help topics)")
    verb.add_argument("--data", metavar="FILE", help="token ids instead of a text: .npy, .bin or .uint16")
    verb.add_argument("--size", choices=list(SIZES), metavar="NAME", help=f"{', '.join(SIZES)} (default tiny)")
    verb.add_argument("--steps", type=int, metavar="N", help="updates in all (default by size)")
    verb.add_argument("--batch", type=int, metavar="N", help="windows per update (default by size)")
    verb.add_argument("--length", type=int, metavar="N", help="bytes per window (default by size)")
    verb.add_argument("--lr", type=float, metavar="X", help="learning rate (default by size)")
    verb.add_argument("--schedule", choices=SCHEDULES, metavar="NAME", help=f"{', '.join(SCHEDULES)} (default by size)")
    verb.add_argument("--seed", type=int, metavar="N", help="of weights and data order (default 0)")
    verb.add_argument(
        "--precision", choices=PRECISIONS, metavar="NAME", help=f"{', '.join(PRECISIONS)} (default float32)"
    )
    verb.add_argument(
        "--parallel", metavar="AXES", help="layout over devices, data=2,fsdp=2 say; axes: data, fsdp, context, tensor"
    )
    verb.add_argument("--out", metavar="DIR", help="where the run goes (default runs/<backend>-<size>)")
    verb.add_argument("--resume", metavar="DIR", help="go on with a run or checkpoint, of any backend")
    verb.add_argument(
        "--checkpoint-every",
        type=int,
        metavar="N",
        help=f"updates between checkpoints (default {CHECKPOINT_EVERY}, or as before)",
    )
    verb.add_argument("--evaluate-every", type=int, metavar="N", help="updates between measurements on held-out text")
    verb.add_argument("--plain", action="store_true", help="lines instead of a progress bar")


def train(backend: ModuleType, arguments: argparse.Namespace, *, join: Callable[[], None] | None = None) -> int:
    """Train, or go on training; writes checkpoints, log.jsonl, validation.jsonl, loss.png and run.json."""
    given = Settings(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Settings)})
    name = backend_name(backend)
    for option, number in (
        ("checkpoint-every", arguments.checkpoint_every), ("evaluate-every", arguments.evaluate_every),
    ):  # fmt: skip
        if number is not None and number < 1:
            raise ValueError(f"--{option} must be at least 1; got {number}")
    parallel = None if arguments.parallel is None else parse_parallel(arguments.parallel)
    if parallel is not None and join is not None:
        join()
    places: dict[str, Any] = {"out": arguments.out, "device": arguments.device, "parallel": parallel}
    if arguments.resume is None:
        session = begin(backend, name, given, **places)
    else:
        session = resume(backend, name, given, arguments.resume, **places)
    if hasattr(session.trainer, "check_same"):
        session.trainer.check_same("settings", same_everywhere(session))
    options = {"as_json": arguments.json, "plain": arguments.plain}
    if getattr(session.trainer, "first", True):
        return run(session, **options)
    # One process of several speaks and writes for all of them.
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        session.out = Path(folder)
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            return run(session, **options)


def evaluate(backend: ModuleType, arguments: argparse.Namespace) -> int:
    """Print loss and bits per byte (or per token) of a checkpoint on held-out text."""
    checkpoint, settings, model = _load(backend, arguments)
    trained = (settings.length or min(64, checkpoint.config.max_length), checkpoint.train_config.batch)
    length, batch = (
        usual if asked is None else require_int(name, asked, 1)
        for name, asked, usual in zip(
            ("--length", "--batch"), (arguments.length, arguments.batch), trained, strict=True
        )
    )
    given = arguments.text is not None or arguments.data is not None
    if given:
        source = open_source(arguments.text, arguments.data, vocab=checkpoint.config.vocab)
    else:
        source = source_of(settings, checkpoint.config.vocab)
    if source.vocab != checkpoint.config.vocab:
        raise ValueError(
            f"{checkpoint.path} is no byte-level model: it has vocab={checkpoint.config.vocab}; give --data, token ids"
        )
    tokens = source.tokens if given else split(source.tokens, length=length)[1]
    # As much as training measures, however it is cut into windows and batches.
    part = tokens[: max(EVALUATION_BATCHES * trained[0] * trained[1], length) + 1]
    trainer = backend.Trainer(model, checkpoint.train_config.replace(compile="auto"))
    found = trainer.evaluate(evaluation_batches(part, batch=batch, length=length))
    loss, counted = float(found["loss"]), int(found["tokens"])
    if arguments.json:
        row = {"step": checkpoint.step, "loss": loss, f"bits_per_{source.unit}": bits_per_byte(loss), "tokens": counted,
               "of": len(tokens)}  # fmt: skip
        print(json.dumps(row))
    else:
        print(f"{checkpoint.path} on {'' if given else 'the validation part of '}{source.label}:")
        whole = "" if len(part) == len(tokens) else f", the first of {len(tokens):,}"
        print(f"loss {loss:.4f}   bits per {source.unit} {bits_per_byte(loss):.4f}   {counted:,} {source.unit}s{whole}")
    return 0


def generate(backend: ModuleType, arguments: argparse.Namespace) -> int:
    """Print the prompt and what the model writes after it."""
    model, words = _writer(backend, arguments)
    prompt = words.prompt(arguments.prompt, arguments.tokens)
    key = None if arguments.temperature == 0 else backend.key(arguments.seed)
    written = backend.generate(
        model,
        to_backend(backend, prompt[None]),
        max_new=arguments.max_new,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        key=key,
    )
    ids = from_backend(backend, written)[0]
    text = words.text(ids)
    said = "The " if arguments.prompt is None and arguments.tokens is None else arguments.prompt or arguments.tokens
    row = {"prompt": said, "text": text} | ({} if words.bytes else {"tokens": ids.tolist()})
    print(json.dumps(row) if arguments.json else text)
    return 0


def _writer(backend: ModuleType, arguments: argparse.Namespace) -> tuple[Any, Words]:
    """The model, and what its ids mean."""
    if arguments.resume is not None:
        checkpoint, settings, model = _load(backend, arguments)
        return model, Words(numbers=settings.data is not None or checkpoint.config.vocab != 256)
    folder = Path(arguments.model)
    if not (folder / "config.json").exists() and any(
        (folder / name).exists() for name in ("run.json", "checkpoint.json")
    ):
        raise ValueError(f"{folder} is a run or a checkpoint, no Hugging Face folder: --resume {folder} reads it")
    model = backend.Transformer.from_pretrained(arguments.model, device=arguments.device)
    if model.config.head != "lm" or model.config.kind != "decoder":
        raise ValueError(
            f"{arguments.model} is no decoder with a language-model head, which generate needs; got "
            f"kind={model.config.kind!r}, head={model.config.head!r}"
        )
    return model, Words(Path(arguments.model))


def _load(backend: ModuleType, arguments: argparse.Namespace) -> tuple[Checkpoint, Settings, Any]:
    checkpoint = read_checkpoint(Path(arguments.resume))
    if checkpoint.config.head != "lm" or checkpoint.config.kind != "decoder":
        raise ValueError(
            f"{checkpoint.path} is no language model: expected a decoder with head='lm'; got "
            f"kind={checkpoint.config.kind!r}, head={checkpoint.config.head!r}"
        )
    return checkpoint, stored_settings(checkpoint), restored(backend, checkpoint, arguments.device)


def restored(backend: ModuleType, checkpoint: Checkpoint, device: str | None) -> Any:
    """The checkpoint's model in this backend."""
    config: ModelConfig = checkpoint.config
    model = backend.Transformer(config, dtype=master(checkpoint.train_config), device=device)
    backend.set_params(model, checkpoint.params)
    return model
