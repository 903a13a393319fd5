"""The report on a terminal."""

from __future__ import annotations

import sys
from typing import Any

from .rows import Row


def say(row: Row) -> None:
    """One line on standard error as soon as a row is known; a bar would not say which program is slow."""
    if sys.stderr.isatty() or row.status == "failed":
        print(f"{row.status:7} {row.program} {row.check} {row.target}: {row.detail}", file=sys.stderr, flush=True)


def show(rows: list[Row], on: dict[str, Any] | None) -> None:
    """Programs down, targets across; then what the compiled programs need, and what a device gave."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for check, title in (("lowered", "lowered by jax.export"), ("ran", "ran"), ("refused", "controls that must fail")):
        chosen = [row for row in rows if row.check == check]
        if chosen:
            console.print(_grid(Table, chosen, title))
    compiled = [row for row in rows if row.check == "compiled for"]
    if compiled:
        table = Table("program", "compiled for", "MB per device", "GFLOP per device", "collectives", title="compiled")
        for row in compiled:
            table.add_row(row.program, row.target, *_figures(row))
        console.print(table)
    if on is not None:
        console.print(f"on {on['device']}: {on['summary']}")
    counts = {status: sum(row.status == status for row in rows) for status in ("ok", "failed", "absent")}
    console.print(f"{counts['ok']} ok, {counts['failed']} failed, {counts['absent']} with something absent")
    for row in rows:
        if row.status == "failed":
            console.print(f"FAILED {row.program} {row.check} {row.target}: {row.detail}", markup=False)


def _grid(table_class: Any, rows: list[Row], title: str) -> Any:
    targets = list(dict.fromkeys(row.target for row in rows))
    table = table_class("program", *targets, title=title)
    marks = {"ok": "yes", "failed": "[red]NO[/red]", "absent": "absent"}
    for program in dict.fromkeys(row.program for row in rows):
        found = {row.target: marks[row.status] for row in rows if row.program == program}
        table.add_row(program, *(found.get(target, "") for target in targets))
    return table


def _figures(row: Row) -> tuple[str, ...]:
    if row.status != "ok":
        return (row.status, "", row.detail[:80])
    figures = row.figures
    flops = figures.get("flops")
    sent = ", ".join(f"{n['count']} {kind} {n['bytes'] / 1e6:.2f} MB" for kind, n in figures["collectives"].items())
    return (f"{figures['memory'] / 1e6:.1f}", "" if flops is None else f"{flops / 1e9:.2f}", sent or "none")
