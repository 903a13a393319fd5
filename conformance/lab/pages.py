"""What a measured experiment is written as: a table on the terminal, a picture, JSON, an HTML page."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core_numpy.contract.json_file import read_object

from .common import Report

SCHEMA = 1


def draw(report: Report, path: Path) -> None:
    """Write the picture as PNG; no display and no global state of matplotlib are touched."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=report.size, dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    report.draw(figure)
    figure.savefig(path)


def as_document(report: Report, claim: str, spent: Mapping[str, float]) -> dict[str, Any]:
    """The experiment in what JSON can say; seconds, by the clock and of the processor, are rounded."""
    return {
        "claim": claim,
        "held": all(one.held for one in report.claims),
        "claims": [{"text": one.text, "measured": one.measured, "held": bool(one.held)} for one in report.claims],
        "tables": [
            {"title": one.title, "columns": list(one.columns), "rows": [[_cell(x) for x in row] for row in one.rows]}
            for one in report.tables
        ],
        "notes": list(report.notes),
        **{name: round(seconds, 2) for name, seconds in spent.items()},
    }  # fmt: skip


def _cell(value: Any) -> Any:
    return value if isinstance(value, str | int | float) else value.item()


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def print_report(name: str, document: Mapping[str, Any]) -> None:
    """The tables, then each claim with what was measured."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 118)
    for one in document["tables"]:
        table = Table(title=f"{name}: {one['title']}", title_justify="left")
        for number, column in enumerate(one["columns"]):
            table.add_column(column, justify="right" if number else "left", overflow="fold")
        for row in one["rows"]:
            table.add_row(*(_text(value) for value in row))
        console.print(table)
    for claim in document["claims"]:
        verdict = "[green]held[/green]" if claim["held"] else "[red]did not hold[/red]"
        console.print(f"{verdict}: ", end="")
        console.print(f"{claim['text']} Measured: {claim['measured']}.", markup=False, highlight=False)
    for note in document["notes"]:
        console.print(note, markup=False, highlight=False)
    console.print(f"{document['seconds']:.1f} s, {document['cpu_seconds']:.1f} s of the processor\n", highlight=False)


def write_page(path: Path, document: Mapping[str, Any], pictures: Path) -> None:
    """One self-contained HTML page, in the style of the suite's report."""
    found = document["experiments"]
    images = {name: (pictures / f"{name}.png").read_bytes() for name in found}
    write_html(path, "lab.html", title=f"The lab, on {document['backend']}", found=found, images=images)


def read_results(folder: Path) -> dict[str, Any]:
    """What `conformance lab --out FOLDER` wrote, as the suite's report takes it: lab.json with the pictures inside."""
    document = read_object(folder / "lab.json")
    if document.get("schema") != SCHEMA or "experiments" not in document:
        raise ValueError(f"{folder / 'lab.json'} must be the lab's document of schema {SCHEMA}")
    return document | {"pictures": {name: (folder / f"{name}.png").read_bytes() for name in document["experiments"]}}


def write_html(path: Path, template: str, *, images: Mapping[str, bytes], **values: Any) -> None:
    """A page from a template beside this file; pictures are put inside, what comes from outside is escaped."""
    import jinja2

    from ..report.html import data_uri
    from ..summary import write_text

    here = Path(__file__).parent
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, loader=jinja2.FileSystemLoader(here)
    )
    style = (here.parent / "report" / "page.css").read_text(encoding="utf-8")
    uris = {name: data_uri(png) for name, png in images.items()}
    page = environment.get_template(template).render(images=uris, style=style, text=_text, **values)
    write_text(path, page)
