"""A race as text and as a picture."""

from __future__ import annotations

import os
from typing import Any

HEADINGS = ("contestant", "ms/update", "quartiles", "of best", "95 % interval", "tokens/s", "of peak", "first s",
            "memory MB", "loss apart")  # fmt: skip


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
        f"{row['median'] * 1e3:.2f}",
        f"{row['q1'] * 1e3:.2f}-{row['q3'] * 1e3:.2f}",
        f"{row['ratio']:.2f}",
        f"{row['ratio_low']:.2f}-{row['ratio_high']:.2f}",
        f"{row['tokens_per_second']:,.0f}",
        f"{row['share_of_peak']:.2f}",
        f"{row['first_step_seconds']:.2f}",
        "?" if growth is None else f"{growth:,.0f}",
        f"{row['loss_distance']:.1e}",
    )


def as_text(document: dict[str, Any]) -> str:
    """Every race of a document as a table with its verdict."""
    place = document["environment"]
    lines = [f"{place['processor']}, {place['threads']} threads, matrix product {place['matmul_gflops']:.0f} GFLOP/s"]
    for race in document["races"]:
        task = race["task"]
        lines += [
            "",
            f"{task['size']}: batch {task['batch']}, length {task['length']}, {task['flops'] / 1e9:.2f} GFLOP",
        ]
        rows = table_rows(race)
        full = [HEADINGS, *(row for row in rows if len(row) == len(HEADINGS))]
        widths = [max(len(row[i]) for row in full) for i in range(len(HEADINGS))]
        for row in full:
            # Names to the left, numbers to the right.
            lines.append("  ".join(cell.rjust(widths[i]) if i else cell.ljust(widths[i]) for i, cell in enumerate(row)))
        lines += [f"{row[0].ljust(widths[0])}  {row[1]}" for row in rows if len(row) != len(HEADINGS)]
        lines.append(race["verdict"])
    return "\n".join(lines)


def draw(document: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """A PNG of bars, one panel a size: time per update against the fastest, with its interval. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    races = document["races"]
    counts = [max(sum("ratio" in row for row in race["contestants"].values()), 1) for race in races]
    figure = Figure(figsize=(7, 1 + sum(0.4 * count + 0.7 for count in counts)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(races), 1, squeeze=False, height_ratios=counts)
    for axes, race in zip(panels[:, 0], races, strict=True):
        rows = [(name, row) for name, row in race["contestants"].items() if row["status"] == "raced" and "ratio" in row]
        rows.sort(key=lambda item: -item[1]["median"])
        ratios = [row["ratio"] for _, row in rows]
        # A bootstrap interval need not hold its own centre: an error bar must not have a negative length.
        below = [max(row["ratio"] - row["ratio_low"], 0.0) for _, row in rows]
        above = [max(row["ratio_high"] - row["ratio"], 0.0) for _, row in rows]
        axes.barh([name for name, _ in rows], ratios, xerr=(below, above), capsize=3, color="#4878a8")
        axes.set_title(f"{race['task']['size']}: time per update, fastest = 1", fontsize=10)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("{x:g}")
        axes.tick_params(axis="x", which="both", labelsize=7)
    figure.savefig(path)
