"""`conformance maps`: a model's attention on a text, layer by head, as pictures."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from core_numpy.contract.checkpoints import read_checkpoint
from core_numpy.contract.config import ModelConfig

from .lab import BACKENDS
from .lab.common import back, heat, into
from .lab.pages import write_html
from .summary import write_json

BYTES = 256  # the vocabulary of a model that reads bytes
MOST = 64  # tokens whose labels can still be read in a picture


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m conformance maps`: 0 done, 2 a wrong argument, 3 the framework is not installed."""
    parser = argparse.ArgumentParser(
        prog="conformance maps",
        description="Draw the attention maps of a trained model on a text: one picture for each layer, a page of them.",
        epilog='example: conformance maps --model run "def attention(q, k, v):" --out maps',
    )
    parser.add_argument("text", help="what the model reads: bytes, or for another vocabulary than 256 ids and spaces")
    parser.add_argument("--model", required=True, metavar="FOLDER", help="a checkpoint, or a folder of them")
    parser.add_argument("--context", metavar="TEXT", help="the source of an encoder-decoder")
    parser.add_argument("--backend", choices=list(BACKENDS), help="default: the first of these that is installed")
    parser.add_argument("--out", default="maps", metavar="DIR", help="for layer-N.png and maps.html (default: maps)")
    parser.add_argument("--json", metavar="FILE", help="write the weights as JSON; - for standard output")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    options = parser.parse_args(argv)
    found = read_checkpoint(options.model)
    ids, labels = tokens_of(options.text, found.config)
    call = {} if options.context is None else {"context": tokens_of(options.context, found.config)[0][None]}
    backend = options.backend or next(n for n, needs in BACKENDS.items() if importlib.util.find_spec(needs))
    B = importlib.import_module(backend)
    dtype = next(iter(found.params.values())).dtype.name
    model = B.Transformer(found.config, dtype=dtype)
    B.set_params(model, found.params)
    weights = model.attention_maps(into(B, ids[None]), **{name: into(B, x) for name, x in call.items()})
    maps = [back(B, layer)[0].astype(np.float64) for layer in weights]
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    images = {}
    for number, layer in enumerate(maps):
        path = out / f"layer-{number}.png"
        draw(path, layer, labels, number)
        images[f"layer {number}"] = path.read_bytes()
    about = f"{found.path.name} on {backend}, {len(ids)} tokens"
    write_html(out / "maps.html", "maps.html", title="Attention maps", about=about, source=options.text, images=images)
    if options.json:
        document = {"backend": backend, "tokens": ids.tolist(), "labels": labels, "maps": [m.tolist() for m in maps]}
        write_json(options.json, document)
    print(f"{len(images)} pictures and maps.html in {out}", file=sys.stderr)
    return 0


def tokens_of(text: str, config: ModelConfig) -> tuple[np.ndarray, list[str]]:
    """Ids, and a label for each: the character that a byte is, or the id."""
    if config.vocab == BYTES:
        ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    else:
        try:
            ids = np.array([int(word) for word in text.split()], np.int32)
        except (ValueError, OverflowError) as error:
            raise ValueError(
                f"the text must be ids from 0 to {config.vocab - 1} and spaces: this model reads no bytes ({error})"
            ) from error
    if not 1 <= len(ids) <= MOST:
        raise ValueError(f"the text must have 1 to {MOST} tokens to be drawn readably; it has {len(ids)}")
    return ids, [label(int(token), config.vocab) for token in ids]


def label(token: int, vocab: int) -> str:
    """What stands at an axis: a printable character, a sign for blanks, or the number."""
    if vocab != BYTES:
        return str(token)
    return {32: "␣", 10: "\\n", 9: "\\t"}.get(token) or (chr(token) if 32 < token < 127 else f"{token:02x}")


def draw(path: Path, layer: np.ndarray, labels: Sequence[str], number: int) -> None:
    """One layer (H, T, S): its heads side by side, at most four in a row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heads, columns = len(layer), min(len(layer), 4)
    rows, each = -(-heads // columns), max(2.4, 0.16 * len(labels) + 0.8)  # inches: a label needs about 0.16
    figure = Figure(figsize=(columns * each + 1.2, rows * each + 0.8), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    places = np.ravel(figure.subplots(rows, columns, squeeze=False))
    for head, axes in enumerate(places):
        if head >= heads:
            axes.set_axis_off()
            continue
        image = heat(axes, layer[head], labels, f"head {head}")
        axes.tick_params(labelsize=8, length=2)
    figure.suptitle(f"layer {number}: queries down, keys across", fontsize=11)
    figure.colorbar(image, ax=list(places), label="weight", shrink=0.8)
    figure.savefig(path)
