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
    """A PNG: the curves of a sweep or of several devices, else bars, a panel a race: time against the fastest."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    for kind, size, drawing in (("scaling", (10, 3.6), draw_scaling), ("sweep", (7, 4.5), draw_sweep),
                                ("long", (5, 3.6), draw_long)):  # fmt: skip
        if document.get(kind):
            figure = Figure(figsize=size, dpi=120, layout="constrained")
            FigureCanvasAgg(figure)
            drawing(figure, document[kind])
            figure.savefig(path)
            return
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


def draw_sweep(figure: Any, swept: dict[str, Any]) -> None:
    """Time against the value, both in logarithms where the value is a number, with the fitted powers in the legend."""
    axes = figure.subplots()
    numbers = not any(isinstance(value, str | bool) for value in swept["values"])
    for name, points in swept["curves"].items():
        x, y, _ = zip(*points, strict=True)
        fit = swept["fits"].get(name)
        label = name if fit is None else f"{name}: power {fit['exponent']:.2f}"
        axes.plot(x if numbers else [str(value) for value in x], [value * 1e3 for value in y], marker="o", label=label)
    for crossing in swept["crossings"]:
        if crossing["at"] is not None:
            axes.axvline(crossing["at"], color="#999999", linewidth=0.8, linestyle=":")
    axes.set_yscale("log")
    if numbers:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(swept["axis"])
    axes.set_ylabel("milliseconds")
    if swept["curves"]:
        axes.legend(fontsize=7)


def draw_scaling(figure: Any, scaled: dict[str, Any]) -> None:
    """The speed-up against the devices with its interval, strong and weak side by side; hollow where devices share."""
    kinds = list(dict.fromkeys(row["kind"] for row in scaled["rows"])) or ["strong"]
    for axes, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        rows = [row for row in scaled["rows"] if row["kind"] == kind]
        counts = sorted({row["devices"] for row in rows} or {1})
        axes.plot(counts, counts, color="#999999", linewidth=0.8, linestyle=":", label="ideal")
        for number, name in enumerate(dict.fromkeys(row["contestant"] for row in rows)):
            own = sorted((row for row in rows if row["contestant"] == name), key=lambda row: row["devices"])
            x, y, colour = [row["devices"] for row in own], [row["speedup"] for row in own], f"C{number}"
            below = [max(row["speedup"] - row["low"], 0.0) for row in own]
            above = [max(row["high"] - row["speedup"], 0.0) for row in own]
            axes.errorbar(x, y, yerr=(below, above), color=colour, capsize=3, linewidth=1.2, label=name)
            for row in own:
                face = "white" if row["shared"] > 1.0 else colour
                axes.plot(
                    row["devices"], row["speedup"], "o", markersize=6, color=colour, markerfacecolor=face, zorder=3
                )
        axes.set_xticks(counts)
        axes.set_xlabel("devices (hollow: they share processors)")
        axes.set_ylabel("work in the same time, one device = 1")
        axes.set_title("apart" if kind == "apart" else f"{kind} scaling, {scaled['axis']}", fontsize=10)
        axes.legend(fontsize=7)


def draw_long(figure: Any, found: dict[str, Any]) -> None:
    """What a process holds of a long row against their number, and the share that would be ideal, in logarithms."""
    axes = figure.subplots()
    rows = [row for row in found["rows"] if row["status"] == "measured"]
    counts = sorted({row["devices"] for row in rows} or {1})
    for number, name in enumerate(dict.fromkeys(row["contestant"] for row in rows)):
        own = [row for row in rows if row["contestant"] == name]
        held, colour = [row["held"] / 1e6 for row in own], f"C{number}"
        axes.plot([row["devices"] for row in own], held, "o-", color=colour, label=name)
        axes.plot(counts, [held[0] / count for count in counts], ":", color=colour, linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.set_xticks(counts)
    axes.set_xlabel("processes (dotted: the whole's share)")
    axes.set_ylabel("MB in each")
    axes.set_title(f"attention over {found['positions']:,} positions, both passes", fontsize=10)
    if rows:
        axes.legend(fontsize=7)
