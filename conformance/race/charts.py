"""The race's part of the HTML page: loss curves, roofline and a sweep's curves as SVG in the page's own colours.

Figures are vector graphics without scripts; each point says its name and values when pointed at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from .pictures import finishers

# Told apart on white and on black, and by most who see fewer colours (Okabe and Ito 2008, less yellow and black).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#8c564b", "#9467bd", "#bcbd22")
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, LINE = 640, 300, 64, 40, 12, 15


@dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[tuple[float, float]]
    line: bool = True
    dashed: bool = False


class Scale:
    """From values to pixels, straight or in logarithms."""

    def __init__(self, values: Sequence[float], start: float, end: float, log: bool) -> None:
        self.log, self.start, self.end = log, start, end
        low, high = min(values), max(values)
        if low == high:  # one value stands in the middle
            low, high = (low / 2, high * 2) if log else (low - 0.5, high + 0.5)
        self.low, self.high = low, high

    def __call__(self, value: float) -> float:
        turn = math.log if self.log else float
        share = (turn(value) - turn(self.low)) / (turn(self.high) - turn(self.low))
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Between two and some eight round numbers inside."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            few = self.high / self.low < 100
            found = [m * 10.0**d for d in decades for m in ((1, 2, 5) if few else (1,))]
        else:
            step = 10.0 ** math.floor(math.log10(self.high - self.low))
            step *= next(m for m in (0.2, 0.5, 1, 2) if (self.high - self.low) / (m * step) <= 8)
            found = [i * step for i in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        return [x for x in found if self.low <= x <= self.high] or [self.low, self.high]


def plot(series: Sequence[Series], x_label: str, y_label: str, *, log_x: bool = False, log_y: bool = False) -> str:
    """An SVG of lines or dots with a legend; "" where there is nothing to draw."""
    pairs = [point for one in series for point in one.points]
    if not pairs:
        return ""
    right = WIDTH - 12
    legend = LINE * math.ceil(len(series) / 3) + 8
    x = Scale([a for a, _ in pairs], LEFT, right, log_x)
    y = Scale([b for _, b in pairs], HEIGHT - BOTTOM, TOP, log_y)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT + legend}" role="img" style="max-width: {WIDTH}px; width: 100%"',
        f' font-size="11" fill="currentColor"><title>{escape(y_label)} against {escape(x_label)}</title>',
        *_axes(x, y, right, x_label, y_label),
    ]
    for number, one in enumerate(series):
        colour, (row, column) = COLOURS[number % len(COLOURS)], divmod(number, 3)
        parts += _drawn(one, x, y, colour)
        at_x, at_y = LEFT + column * (right - LEFT) / 3, HEIGHT + LINE * row + 10
        parts.append(f'<rect x="{at_x:.0f}" y="{at_y - 8}" width="9" height="9" fill="{colour}"/>')
        parts.append(f'<text x="{at_x + 14:.0f}" y="{at_y}">{escape(one.name)}</text>')
    return "".join(parts) + "</svg>"


def _axes(x: Scale, y: Scale, right: float, x_label: str, y_label: str) -> list[str]:
    """Lines with their numbers, and what they count."""
    parts, foot = [], HEIGHT - BOTTOM
    for tick in x.ticks():
        parts.append(f'<path d="M{x(tick):.1f} {TOP}V{foot}" stroke="currentColor" opacity=".12"/>')
        parts.append(f'<text x="{x(tick):.1f}" y="{foot + 15}" text-anchor="middle">{tick:g}</text>')
    for tick in y.ticks():
        parts.append(f'<path d="M{LEFT} {y(tick):.1f}H{right}" stroke="currentColor" opacity=".12"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:.3g}</text>')
    turned = f'transform="translate(14 {HEIGHT / 2}) rotate(-90)"'
    parts.append(f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(f'<text {turned} text-anchor="middle">{escape(y_label)}</text>')
    return parts


def _drawn(one: Series, x: Scale, y: Scale, colour: str) -> list[str]:
    """A line and its dots, or the dots alone."""
    places = [(x(a), y(b), a, b) for a, b in one.points]
    parts = []
    if one.line and len(places) > 1:
        path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b, _, _ in places)
        dashes = ' stroke-dasharray="5 4"' if one.dashed else ""
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dashes}/>')
    radius = 2.2 if one.line else 4.5
    for a, b, first, second in places if len(places) <= 40 else ():
        said = f"{escape(one.name)}: {first:.4g}, {second:.4g}"
        parts.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="{radius}" fill="{colour}"><title>{said}</title></circle>')
    return parts


def race_charts(race: Mapping[str, Any], environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(caption, SVG) of one race: the losses that were made, and how near each came to the machine's roof."""
    rows = finishers(dict(race))
    losses = [Series(name, list(enumerate(row["losses"], 1))) for name, row in rows if row.get("losses")]
    made = [("Losses of the updates that each made, in nats: equal work gives one curve.",
             plot(losses, "update", "loss"))]  # fmt: skip
    moved, peak, bandwidth = (
        race["task"].get("bytes_moved"),
        environment.get("matmul_gflops"),
        environment.get("gbytes"),
    )
    if moved and peak and bandwidth and rows:
        intensity = race["task"]["flops"] / moved
        ridge = peak / bandwidth
        low, high = min(intensity, ridge) / 4, max(intensity, ridge) * 4
        roof = Series("roof", [(low, low * bandwidth), (ridge, peak), (high, peak)], dashed=True)
        dots = [Series(name, [(intensity, row["gflops"])], line=False) for name, row in rows]
        caption = (
            f"Roofline: {peak:.0f} GFLOP/s of the fastest matrix product, {bandwidth:.0f} GB/s of copying. A step of "
            f"this size has {intensity:.0f} FLOPs for each byte that it must move."
        )
        made.append((caption, plot([roof, *dots], "FLOPs per byte", "GFLOP/s", log_x=True, log_y=True)))
    return [(caption, svg) for caption, svg in made if svg]


def scaling_charts(scaled: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(caption, SVG) of each kind: the speed-up of everybody against the devices, and the ideal."""
    made = []
    for kind in dict.fromkeys(row["kind"] for row in scaled["rows"]):
        rows = sorted((row for row in scaled["rows"] if row["kind"] == kind), key=lambda row: row["devices"])
        names = dict.fromkeys(row["contestant"] for row in rows)
        curves = [Series(n, [(r["devices"], r["speedup"]) for r in rows if r["contestant"] == n]) for n in names]
        ideal = Series("ideal", sorted({(row["devices"], row["devices"]) for row in rows}), dashed=True)
        what = "runs apart" if kind == "apart" else f"{kind} scaling over {scaled['axis']}"
        caption = f"Work in the same time against devices, {what}; one device is 1."
        made.append((caption, plot([ideal, *curves], "devices", "times one device")))
    return made


def sweep_charts(swept: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(caption, SVG): the curves of a sweep over numbers; a sweep over words has its tables alone."""
    if any(isinstance(value, str | bool) for value in swept["values"]):
        return []
    curves = [Series(name, [(x, y * 1e3) for x, y, _ in points]) for name, points in swept["curves"].items()]
    svg = plot(curves, swept["axis"], "milliseconds", log_x=True, log_y=True)
    return [(f"Time against {swept['axis']}, both in logarithms: a power is a straight line.", svg)] if svg else []
