"""A race as a table."""

from __future__ import annotations

import io
import shutil
import sys
from typing import Any, TextIO

from . import scaling
from .long import LONG, long_cells, long_line
from .sweep import sentences

HEADINGS = ("contestant", "class", "ms", "quartiles", "of best", "95 % interval", "tokens/s", "of peak", "compile s",
            "first s", "memory MB", "loss apart")  # fmt: skip
# Wide enough for every column; a narrower terminal folds cells.
TEXT_WIDTH = 150


def table_rows(race: dict[str, Any]) -> list[tuple[str, ...]]:
    """The cells of each contestant, fastest first, those without a time last with their reason."""
    rows = race["contestants"]
    order = sorted(rows, key=lambda name: rows[name].get("median", float("inf")))
    return [(name, *_cells(rows[name])) for name in order]


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    if row["status"] != "raced" or "median" not in row:
        return (f"{row['status']}: {row.get('reason', 'no round was run')}",)
    growth = row.get("memory_growth")
    return (
        row.get("group", ""),
        f"{row['median'] * 1e3:.2f}",
        f"{row['q1'] * 1e3:.2f}-{row['q3'] * 1e3:.2f}",
        f"{row['ratio']:.2f}",
        f"{row['ratio_low']:.2f}-{row['ratio_high']:.2f}",
        f"{row['tokens_per_second']:,.0f}",
        "?" if row["share_of_peak"] is None else f"{row['share_of_peak']:.2f}",
        f"{row.get('compile_seconds', 0.0):.2f}",
        f"{row['first_step_seconds']:.2f}",
        "?" if growth is None else f"{growth:,.0f}",
        f"{row['loss_distance']:.1e}",
    )


def threads_of(place: dict[str, Any]) -> str:
    return f"{place['threads']} thread{'s' * (place['threads'] != 1)}"


def place_line(document: dict[str, Any]) -> str:
    """Where it was: processor or device, threads, precision, matrix product."""
    place = document["environment"]
    devices = [found.get("device", "") for found in place.get("devices", {}).values()]
    accelerator = next((name for name in devices if name not in ("", "cpu")), None)
    said = f"{accelerator or place['processor']}, {threads_of(place)}, {place.get('precision', 'float32')}"
    products = {found["products"] for found in place.get("devices", {}).values() if "products" in found}
    if accelerator is not None and products:
        said += f" (products in {', '.join(sorted(products))})"
    return f"{said}, matrix product {place['matmul_gflops']:.0f} GFLOP/s"


def race_line(race: dict[str, Any], axis: str | None = None) -> str:
    """What was raced; in a sweep over `axis` with its value in front, over devices with the kind of scaling."""
    task, label = race["task"], f"{axis} {race['at']}: " if axis is not None and "at" in race else ""
    label = f"{race['kind']} scaling: " if "kind" in race else label
    return (
        f"{label}{task.get('title', task['size'])}: batch {task['batch']}, length {task['length']}, "
        f"{task['flops'] / 1e9:.2f} GFLOP"
    )


def as_text(document: dict[str, Any]) -> str:
    """Every race of a document as a table with its verdict and notes, without colours."""
    file = io.StringIO()
    _print(document, file, TEXT_WIDTH, colour=False)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def show(document: dict[str, Any]) -> None:
    """The same on standard output, coloured on a terminal."""
    width = shutil.get_terminal_size((TEXT_WIDTH, 40)).columns if sys.stdout.isatty() else TEXT_WIDTH
    _print(document, sys.stdout, width, colour=sys.stdout.isatty())


def _print(document: dict[str, Any], file: TextIO, width: int, colour: bool) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(file=file, width=width, force_terminal=colour, no_color=not colour, highlight=False)
    if document.get("long"):
        _print_long(console, document)
    else:
        console.print(escape(place_line(document)))
    swept, scaled = document.get("sweep"), document.get("scaling")
    if scaled:
        _print_scaling(console, document)
    for race in () if scaled else document["races"]:
        console.print()
        console.print(f"[bold]{escape(race_line(race, swept and swept['axis']))}[/]")
        table = Table(box=SIMPLE, show_edge=False, padding=(0, 1, 0, 0))
        for number, heading in enumerate(HEADINGS):
            table.add_column(heading, justify="left" if number < 2 else "right", no_wrap=number < 2)
        others = []
        for cells in table_rows(race):
            row = race["contestants"][cells[0]]
            if len(cells) == len(HEADINGS):
                table.add_row(*map(escape, cells), style="bold" if row.get("ours") else None)
            else:
                others.append((row["status"], cells))
        if table.row_count:
            console.print(table)
        for status, cells in others:
            style = "red" if status in ("disqualified", "failed") else "dim"
            console.print(f"[{style}]{escape(cells[0])}  {escape(cells[1])}[/]", soft_wrap=True)
        console.print(escape(race["verdict"]), soft_wrap=True)
        for note in race.get("notes", ()):
            console.print(escape(note), soft_wrap=True, style="yellow" if note.startswith("noise") else None)
    if swept and swept["fits"]:
        console.print()
        console.print(_fits(swept))
    for sentence in sentences(swept) if swept else ():
        console.print(escape(sentence), soft_wrap=True)
    if document.get("interrupted"):
        console.print("interrupted: what was measured so far is above", style="red")


def _fits(swept: dict[str, Any]) -> Any:
    """The powers by which time grows, as a rich table."""
    from rich.box import SIMPLE
    from rich.markup import escape
    from rich.table import Table

    table = Table(
        box=SIMPLE, show_edge=False, title=f"time grows as {swept['axis']} to the power", title_justify="left"
    )
    for heading in ("contestant", "power", "95 % interval", "of the last two", "FLOPs alone"):
        table.add_column(heading, justify="left" if heading == "contestant" else "right")
    for name, fit in swept["fits"].items():
        interval = f"{fit['low']:.2f}-{fit['high']:.2f}"
        table.add_row(escape(name), f"{fit['exponent']:.2f}", interval, f"{fit['last']:.2f}", f"{fit['flops']:.2f}")
    return table


SCALING = ("contestant", "devices", "rows", "ms", "quartiles", "speed-up", "95 % interval", "of the ideal", "tokens/s",
           "MB sent", "loss apart")  # fmt: skip


def scaling_rows(document: dict[str, Any], kind: str) -> list[tuple[str, ...]]:
    """The cells of each contestant and number of devices; a star marks devices that share processors."""
    rows = [row for row in document["scaling"]["rows"] if row["kind"] == kind]
    return [
        (
            row["contestant"], f"{row['devices']}{'*' if row['shared'] > 1.0 else ''}", str(row["rows"]),
            f"{row['median'] * 1e3:.2f}", f"{row['q1'] * 1e3:.2f}-{row['q3'] * 1e3:.2f}", f"{row['speedup']:.2f}",
            f"{row['low']:.2f}-{row['high']:.2f}", f"{row['efficiency']:.0%}", f"{row['tokens_per_second']:,.0f}",
            f"{row['sent'] / 1e6:.2f}", f"{row['loss_distance']:.1e}",
        )
        for row in sorted(rows, key=lambda row: (row["contestant"], row["devices"]))
    ]  # fmt: skip


def scaling_line(document: dict[str, Any], kind: str) -> str:
    """What was raced: the task of one device, and what grows."""
    task = next(race["task"] for race in document["races"] if race["kind"] == kind and race["at"] == 1)
    grows = {"strong": "the same batch for all", "weak": "as many times the rows as devices"}.get(kind)
    if grows is None:
        return f"apart: {task['title']}, length {task['length']}, as many runs as devices, which send nothing"
    return f"{kind} scaling over {document['scaling']['axis']}: {task['title']}, length {task['length']}, {grows}"


def _print_scaling(console: Any, document: dict[str, Any]) -> None:
    """A table for each kind, who has no figures and why, and what it says."""
    from rich.box import SIMPLE
    from rich.markup import escape
    from rich.table import Table

    for kind in dict.fromkeys(race["kind"] for race in document["races"]):
        console.print()
        console.print(f"[bold]{escape(scaling_line(document, kind))}[/]")
        table = Table(box=SIMPLE, show_edge=False, padding=(0, 1, 0, 0))
        for number, heading in enumerate(SCALING):
            table.add_column(heading, justify="left" if number == 0 else "right", no_wrap=number == 0)
        for cells in scaling_rows(document, kind):
            table.add_row(*map(escape, cells))
        if table.row_count:
            console.print(table)
    for race in document["races"]:
        for name, row in race["contestants"].items():
            if row["status"] != "raced" or "median" not in row:
                text = f"{race['kind']}, {race['at']} devices: {name}  {_cells(row)[0]}"
                console.print(escape(text), soft_wrap=True, style="red")
    for sentence in scaling.sentences(document["scaling"]):
        console.print(escape(sentence), soft_wrap=True)


def _print_long(console: Any, document: dict[str, Any]) -> None:
    """What a process holds of a long row, and who failed."""
    from rich.box import SIMPLE
    from rich.markup import escape
    from rich.table import Table

    console.print(escape(document["environment"]["processor"]))
    console.print(f"[bold]{escape(long_line(document))}[/]")
    table = Table(box=SIMPLE, show_edge=False, padding=(0, 1, 0, 0))
    for number, heading in enumerate(LONG):
        table.add_column(heading, justify="left" if number == 0 else "right", no_wrap=number == 0)
    for cells in long_cells(document):
        if len(cells) == len(LONG):
            table.add_row(*map(escape, cells))
        else:
            console.print(escape(f"{cells[0]}, {cells[1]} processes: {cells[2]}"), soft_wrap=True, style="red")
    if table.row_count:
        console.print(table)
