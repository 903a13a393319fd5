"""`conformance curves`: training runs side by side, against what compressors make of the same text."""

from __future__ import annotations

import argparse
import bz2
import gzip
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core_numpy.contract.arguments import Parser
from core_numpy.contract.data import split
from core_numpy.contract.json_file import read_object
from core_numpy.contract.progress import bits_per_byte
from core_numpy.contract.run_log import UPDATES, VALIDATION, read_curve
from core_numpy.contract.source import open_source

from .summary import write_json

# At their strongest. Each sees the held-out part alone, as a file; the model has read the training part.
COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "gzip -9": lambda data: gzip.compress(data, 9, mtime=0),
    "bz2 -9": lambda data: bz2.compress(data, 9),
}
# What makes two runs the same run: where one of these differs, so may the losses.
SAME = ("size", "batch", "length", "lr", "schedule", "seed", "precision")
Points = list[tuple[int, float]]
# Rounding grows by orders in hundreds of updates; the first ones show whether two runs are one.
EARLY = 20


@dataclass(frozen=True)
class Run:
    """A run's folder: its settings (run.json), the loss of each update, the loss of each measurement, in nats."""

    folder: Path
    settings: dict[str, Any]
    losses: Points
    validation: Points


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m conformance curves`: 0 done, 2 a wrong argument."""
    options = _parser().parse_args(argv)
    runs = named([read_run(Path(folder)) for folder in options.runs])
    document = compared(runs, compressed(runs))
    if options.png:
        draw(options.png, runs, document)
    if options.json:
        write_json(options.json, document)
    if options.json != "-":
        print_document(document)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="conformance curves",
        description="Training runs side by side: bits per byte on the held-out part, how far their losses lie apart, "
        "and what gzip and bz2 make of the same bytes.",
        epilog="example: conformance curves runs/numpy-small runs/torch-small runs/jax-small --png curves.png",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a folder that `python -m backend_* train` wrote")
    parser.add_argument("--png", metavar="FILE", help="draw the curves, and their distances from the first run's")
    parser.add_argument("--json", metavar="FILE", help="write the curves as JSON; - for standard output")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def read_run(folder: Path) -> Run:
    """The run of a folder; refused without run.json or without any measurement."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} does not exist: expected the folder of a training run")
    try:
        settings = read_object(folder / "run.json")
    except FileNotFoundError:
        raise FileNotFoundError(f"{folder} is no training run: it lacks run.json") from None
    run = Run(folder, settings, read_curve(folder / UPDATES), read_curve(folder / VALIDATION))
    if not run.losses or not run.validation:
        raise ValueError(
            f"{folder} has {len(run.losses)} updates and {len(run.validation)} measurements on its held-out part: "
            "finish the run, or train with --evaluate-every"
        )
    return run


def named(runs: Sequence[Run]) -> dict[str, Run]:
    """The runs by their backend, or by their folder where two have the same; all of one text."""
    for run in runs[1:]:
        if run.settings.get("digest") != runs[0].settings.get("digest"):
            raise ValueError(f"{run.folder} was trained on another text than {runs[0].folder}: their digests differ")
    backends = [str(run.settings.get("backend")) for run in runs]
    names = backends if len(set(backends)) == len(runs) else [str(run.folder) for run in runs]
    if len(set(names)) != len(runs):
        raise ValueError(f"runs must differ; got {', '.join(names)}")
    return dict(zip(names, runs, strict=True))


def compressed(runs: dict[str, Run]) -> dict[str, float]:
    """Bits per byte of each compressor on the held-out part of the runs' text; nothing where they read token ids."""
    first = next(iter(runs.values()))
    settings = first.settings
    if settings.get("data") is not None:
        return {}
    source = open_source(settings.get("text"), None)
    if source.digest != settings.get("digest"):
        raise ValueError(f"{source.label} is not the text that {first.folder} was trained on: its digest differs")
    held_out = split(source.tokens, length=settings["length"])[1].tobytes()
    return {name: 8.0 * len(compress(held_out)) / len(held_out) for name, compress in COMPRESSORS.items()}


def compared(runs: dict[str, Run], compressors: dict[str, float]) -> dict[str, Any]:
    """The document: curves in bits, and for each run the distance of its losses from the first one's."""
    (first_name, first), *others = runs.items()
    apart = {}
    for name, run in others:
        losses = dict(first.losses)
        distances = [abs(loss - losses[step]) for step, loss in run.losses if step in losses]
        measured, own = dict(first.validation), dict(run.validation)
        apart[name] = {
            "updates": len(distances),
            "early": max(distances[:EARLY], default=0.0),
            "loss": sum(distances) / max(len(distances), 1),
            "bits": max((bits_per_byte(abs(own[s] - measured[s])) for s in measured.keys() & own.keys()), default=0.0),
            "differing": [key for key in SAME if run.settings.get(key) != first.settings.get(key)],
        }
    return {
        "schema": 1,
        "unit": "byte" if compressors else "token",
        "compressors": compressors,
        "runs": {name: _described(run, compressors) for name, run in runs.items()},
        "first": first_name,
        "apart": apart,
    }


def _described(run: Run, compressors: dict[str, float]) -> dict[str, Any]:
    validation = [(step, bits_per_byte(loss)) for step, loss in run.validation]
    return {
        "settings": {key: run.settings.get(key) for key in (*SAME, "steps", "backend")},
        "updates": run.losses[-1][0],
        "losses": run.losses,
        "validation": validation,
        "bits": validation[-1][1],
        # The first measurement from which on all are below, so that a lucky dip does not count.
        "below": {name: _below(validation, bits) for name, bits in compressors.items()},
    }


def _below(validation: Points, bits: float) -> int | None:
    found = None
    for step, value in validation:
        found = None if value >= bits else step if found is None else found
    return found


def print_document(document: dict[str, Any]) -> None:
    """A table of the runs, the compressors in it, and a sentence on each distance."""
    from rich.console import Console
    from rich.table import Table

    unit, console = document["unit"], Console()
    table = Table("", "updates", f"bits per {unit}", *(f"below {name} from update" for name in document["compressors"]))
    for name, run in document["runs"].items():
        below = ["never" if step is None else str(step) for step in run["below"].values()]
        table.add_row(name, str(run["updates"]), f"{run['bits']:.4f}", *below)
    for name, bits in document["compressors"].items():
        table.add_row(name, "", f"{bits:.4f}", *("" for _ in document["compressors"]))
    console.print(table)
    for name, far in document["apart"].items():
        settings = f" (their {', '.join(far['differing'])} differ)" if far["differing"] else ""
        console.print(
            f"{name} and {document['first']}: {far['updates']} losses lie {far['loss']:.1e} nats apart in the mean, "
            f"the first {min(EARLY, far['updates'])} {far['early']:.1e} at most; "
            f"measurements {far['bits']:.1e} bits at most{settings}",
            highlight=False, soft_wrap=True,
        )  # fmt: skip


def pieces(measured: Points, losses: Points) -> list[Points]:
    """Measurements cut where updates between two of them are not this run's own, as after a hand-over."""
    own, found = {step for step, _ in losses}, [measured[:1]]
    for (before, _), point in itertools.pairwise(measured):
        if own.issuperset(range(before + 1, point[0] + 1)):
            found[-1].append(point)
        else:
            found.append([point])
    return found


def draw(path: str, runs: dict[str, Run], document: dict[str, Any]) -> None:
    """Above bits per byte held out, with the compressors'; below the distances of the losses from the first run's."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6 if document["apart"] else 4), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    upper, *lower = (
        figure.subplots(2, 1, sharex=True, height_ratios=(3, 1)) if document["apart"] else [figure.subplots()]
    )
    for number, (name, run) in enumerate(document["runs"].items()):
        style, width = ("-", "--", ":")[number % 3], max(5.0 - 1.5 * number, 1.5)  # agreeing curves lie on each other
        how: dict[str, Any] = {"color": f"C{number}", "linewidth": width, "markersize": max(9 - 2 * number, 5)}
        first, *others = pieces(run["validation"], runs[name].losses)
        upper.plot(*zip(*first, strict=True), style + "os^"[number % 3], label=name, **how)
        for part in others:
            upper.plot(*zip(*part, strict=True), style + "os^"[number % 3], **how)
    for number, (name, bits) in enumerate(document["compressors"].items()):
        upper.axhline(bits, color="0.3", linestyle=("-.", (0, (1, 3)))[number % 2], label=f"{name}: {bits:.3f}")
    upper.set_ylabel(f"bits per {document['unit']}, held out")
    upper.grid(alpha=0.3)
    upper.legend()
    for axes in lower:
        base = dict(runs[document["first"]].losses)
        for number, name in enumerate(document["apart"], 1):
            points = [(step, abs(loss - base[step])) for step, loss in runs[name].losses if step in base]
            axes.semilogy(*zip(*points, strict=True), ".", color=f"C{number}", markersize=2, label=name)
        axes.set_ylabel(f"|loss - {document['first']}'s|")
        axes.grid(alpha=0.3)
        axes.legend()
    (lower or [upper])[0].set_xlabel("update")
    figure.savefig(path)
