"""`conformance maps`: a model's attention on a text, as pictures."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from core_numpy.contract.arguments import Parser
from core_numpy.contract.checkpoints import read_checkpoint
from core_numpy.contract.words import BYTES, Words

from .lab import BACKENDS, backend_of, writable_folder
from .lab.common import back, into
from .lab.pages import write_html
from .lab.pictures import draw_grid, draw_layer
from .summary import write_json

MOST = 64  # tokens whose labels can still be read in a picture


class Stack(NamedTuple):
    """What one stack of blocks did with one text: weights (H, T, T) of each layer."""

    maps: list[np.ndarray]
    tokens: np.ndarray
    labels: list[str]


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m conformance maps`: 0 done, 2 a wrong argument, 3 the framework is not installed."""
    options = _parser().parse_args(argv)
    B = backend_of(options.backend)
    model, words = read_model(B, Path(options.model))
    stacks = stacks_of(B, model, words, options)
    out = writable_folder(options.out)
    images = write_pictures(out, stacks)
    name = Path(options.model).resolve().name
    sizes = [
        f"{key}: {len(s.maps)} layers of {len(s.maps[0])} heads, {len(s.tokens)} tokens" for key, s in stacks.items()
    ]
    texts = [text for text in (options.context, options.text or options.tokens) if text]
    about = f"{name} in {B.__name__}; {'; '.join(sizes)}"
    write_html(out / "maps.html", "maps.html", title="Attention maps", about=about, texts=texts, images=images)
    if options.json:
        found = {key: {"tokens": s.tokens.tolist(), "labels": s.labels, "maps": [m.tolist() for m in s.maps]}
                 for key, s in stacks.items()}  # fmt: skip
        write_json(options.json, {"schema": 1, "backend": B.__name__, "model": name, "stacks": found})
    print(f"{len(images)} pictures and maps.html in {out}", file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="conformance maps",
        description="Draw the attention maps of a trained model on a text: all layers by all heads in one picture, "
        "each layer with the tokens at the axes, and a page of them.",
        epilog='example: conformance maps --model run "def attention(q, k, v):" --out maps',
    )
    parser.add_argument("text", nargs="?", help="what the model reads; of an encoder-decoder, what its decoder reads")
    parser.add_argument(
        "--tokens", metavar="IDS", help='the text as token ids, "1 2 3", for a model without a tokenizer'
    )
    parser.add_argument(
        "--model", required=True, metavar="FOLDER",
        help="a checkpoint, a folder of them, or a Hugging Face folder (config.json, *.safetensors, tokenizer.json)",
    )  # fmt: skip
    parser.add_argument(
        "--context", metavar="TEXT", help="the source of an encoder-decoder: text, or ids as in --tokens"
    )
    parser.add_argument("--backend", choices=list(BACKENDS), help="default: the first of these that is installed")
    parser.add_argument("--out", default="maps", metavar="DIR", help="for the pictures and maps.html (default: maps)")
    parser.add_argument("--json", metavar="FILE", help="write the weights as JSON; - for standard output")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def read_model(B: Any, folder: Path) -> tuple[Any, Words]:
    """The model of a checkpoint or of a Hugging Face folder, and what its ids mean."""
    if (folder / "config.json").exists():
        return B.Transformer.from_pretrained(folder), Words(folder)
    try:
        found = read_checkpoint(folder)
    except ValueError as error:
        raise ValueError(f"{error} (a Hugging Face folder would have a config.json)") from error
    model = B.Transformer(found.config, dtype=next(iter(found.params.values())).dtype.name)
    B.set_params(model, found.params)
    # Ours read bytes; one with another vocabulary has no tokenizer, and its ids are numbers.
    return model, Words(None if found.config.vocab == BYTES else found.path)


def stacks_of(B: Any, model: Any, words: Words, options: argparse.Namespace) -> dict[str, Stack]:
    """The maps of the model on the text; of an encoder-decoder those of both its sides."""
    kind = model.config.kind
    if kind == "encoder_decoder" and options.context is None:
        raise ValueError(f"{options.model} is an encoder-decoder: give its source too, --context TEXT")
    if kind != "encoder_decoder" and options.context is not None:
        raise ValueError(f"--context is an encoder-decoder's source; {options.model} is a model of kind {kind!r}")
    if options.text is None and options.tokens is None:
        raise ValueError('there is nothing to read: give a text, or ids with --tokens "1 2 3"')
    ids = _read(words, options.text, options.tokens)
    if kind != "encoder_decoder":
        return {kind: _stack(B, model, words, ids)}
    numbers = options.tokens is not None
    source = _read(words, None if numbers else options.context, options.context if numbers else None)
    return {
        "encoder": _stack(B, encoder_of(B, model), words, source),
        "decoder": _stack(B, model, words, ids, context=into(B, source[None])),
    }


def _read(words: Words, text: str | None, tokens: str | None) -> np.ndarray:
    ids = words.prompt(text, tokens)
    if len(ids) > MOST:
        raise ValueError(f"a text must have 1 to {MOST} tokens to be drawn readably; it has {len(ids)}")
    return ids


def _stack(B: Any, model: Any, words: Words, ids: np.ndarray, **call: Any) -> Stack:
    maps = [back(B, layer)[0].astype(np.float64) for layer in model.attention_maps(into(B, ids[None]), **call)]
    return Stack(maps, ids, words.labels(ids))


def encoder_of(B: Any, model: Any) -> Any:
    """The encoder of an encoder-decoder as a model of its own."""
    params = B.get_params(model)
    own = {name.removeprefix("encoder."): value for name, value in params.items() if name.startswith("encoder.")}
    if model.config.share_embedding:
        own["embedding.weight"] = params["decoder.embedding.weight"]
    encoder = B.Transformer(model.config.stack("encoder"), dtype=own["embedding.weight"].dtype.name)
    B.set_params(encoder, own)
    return encoder


def write_pictures(out: Path, stacks: dict[str, Stack]) -> dict[str, bytes]:
    """A PNG of each stack's maps together and of each layer; gives them by title."""
    images = {}
    for key, (maps, _, labels) in stacks.items():
        side = f"{key}-" if len(stacks) > 1 else ""
        path = out / f"{side}layers-by-heads.png"
        draw_grid(path, maps)
        images[path.stem.replace("-", " ")] = path.read_bytes()
        for number, layer in enumerate(maps):
            path = out / f"{side}layer-{number}.png"
            draw_layer(path, layer, labels, number)
            images[path.stem.replace("-", " ")] = path.read_bytes()
    return images
