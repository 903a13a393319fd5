"""A race as pictures. Needs matplotlib."""

from __future__ import annotations

import os
from typing import Any

OURS, PEER = "#4878a8", "#b0b0b0"


def finishers(race: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Name and row of everybody with a time, fastest first."""
    rows = [(name, row) for name, row in race["contestants"].items() if row["status"] == "raced" and "ratio" in row]
    return sorted(rows, key=lambda item: item[1]["median"])


def draw(document: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """A PNG of bars, one panel a race: time against the fastest, with its interval; ours in blue."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    races = document["races"]
    counts = [max(len(finishers(race)), 1) for race in races] or [1]
    figure = Figure(figsize=(7, 1 + sum(0.3 * count + 0.7 for count in counts)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(counts), 1, squeeze=False, height_ratios=counts)
    for axes, race in zip(panels[:, 0], races, strict=False):
        rows = finishers(race)[::-1]
        ratios = [row["ratio"] for _, row in rows]
        # A bootstrap interval need not hold its own centre: an error bar must not have a negative length.
        below = [max(row["ratio"] - row["ratio_low"], 0.0) for _, row in rows]
        above = [max(row["ratio_high"] - row["ratio"], 0.0) for _, row in rows]
        colours = [OURS if row.get("ours") else PEER for _, row in rows]
        axes.barh([name for name, _ in rows], ratios, xerr=(below, above), capsize=3, color=colours)
        task = race["task"]
        what = {"step": "update"}.get(task.get("spec", {}).get("measure", "step"), task.get("spec", {}).get("measure"))
        axes.set_title(f"{task.get('title', task['size'])}: time per {what}, fastest = 1", fontsize=10)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("{x:g}")
        axes.tick_params(axis="both", which="both", labelsize=7)
    figure.savefig(path)
