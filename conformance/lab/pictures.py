"""Attention maps as PNG: all layers by all heads in one picture, and each layer with its tokens at the axes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .common import heat

LABEL = 12  # characters of a label that a picture shows


def draw_grid(path: Path, maps: Sequence[np.ndarray]) -> None:
    """Every map (H, T, S) small, layers down and heads across: where to look closer."""
    layers, (heads, T, S) = len(maps), maps[0].shape
    times = max(1, 32 // S)  # few tokens are drawn larger, so that the lines between maps stay thin
    down, across = T * times + 1, S * times + 1
    # One picture of all: hundreds of axes would take minutes. NaN is the line between two maps.
    canvas = np.full((layers * down + 1, heads * across + 1), np.nan)
    for layer, weights in enumerate(maps):
        for head, one in enumerate(weights.repeat(times, axis=1).repeat(times, axis=2)):
            canvas[layer * down + 1 : (layer + 1) * down, head * across + 1 : (head + 1) * across] = one
    each = max(0.9, 0.02 * S) if layers * heads > 16 else 1.6  # inches of a map
    width, height = heads * each, layers * each * T / S
    figure = _figure((width + 2.0, height + 0.6))
    axes = _place(figure, 0.8, 0.2, width, height)
    axes.set_facecolor("#9db4c8")
    image = axes.imshow(canvas, cmap="Greys", vmin=0.0, vmax=1.0, interpolation="nearest", aspect="auto")
    axes.set_xticks([head * across + across / 2 for head in range(heads)], [f"head {head}" for head in range(heads)])
    axes.set_yticks([n * down + down / 2 for n in range(layers)], [f"layer {n}" for n in range(layers)])
    axes.tick_params(length=0, labelsize=8, top=True, bottom=False, labeltop=True, labelbottom=False)
    _bar(figure, image, 0.8 + width + 0.2, 0.2 + height)
    figure.savefig(path)


def draw_layer(path: Path, layer: np.ndarray, labels: Sequence[str], number: int) -> None:
    """One layer (H, T, T): its heads side by side, at most four in a row, the tokens at the axes."""
    shown = [shortened(label) for label in drawable(labels)]
    longest = max(map(len, shown))
    heads, columns = len(layer), min(len(layer), 4)
    rows = -(-heads // columns)
    # Inches: a line of labels needs about 0.16 for each, and 0.085 for each character of the longest.
    each, beside, title = max(1.8, 0.16 * len(shown)), 0.2 + 0.085 * longest, 0.3
    below = beside if longest > 2 else 0.3
    width, height = columns * (each + beside) + 1.3, rows * (each + below + title) + 0.4
    figure = _figure((width, height))
    for head in range(heads):
        row, column = divmod(head, columns)
        bottom = height - 0.4 - row * (each + below + title) - title - each
        axes = _place(figure, beside + column * (each + beside), bottom, each, each)
        image = heat(axes, layer[head], shown, f"head {head}")
        axes.tick_params(labelsize=8, length=2)
        axes.tick_params(axis="x", rotation=90 if longest > 2 else 0)
        for text in (*axes.get_xticklabels(), *axes.get_yticklabels()):
            text.set_parse_math(False)  # a token may be a dollar sign
    figure.text(beside / width, 1 - 0.12 / height, f"layer {number}: queries down, keys across", va="top", fontsize=11)
    _bar(figure, image, width - 1.1, height - 0.4 - title)
    figure.savefig(path)


def shortened(label: str) -> str:
    return label if len(label) <= LABEL else label[: LABEL - 1] + "…"


def drawable(labels: Sequence[str]) -> list[str]:
    """The labels, with a square for each character that the font has no picture of."""
    from matplotlib.font_manager import findfont, get_font

    known = get_font(findfont("DejaVu Sans")).get_charmap()
    return ["".join(sign if ord(sign) in known and sign.isprintable() else "□" for sign in label) for label in labels]


def _figure(size: tuple[float, float]) -> Any:
    """Its parts are placed by hand: matplotlib's own layouts take seconds with a dozen axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=110)
    FigureCanvasAgg(figure)
    return figure


def _place(figure: Any, left: float, bottom: float, width: float, height: float) -> Any:
    """Axes at a place in inches."""
    across, up = figure.get_size_inches()
    return figure.add_axes((left / across, bottom / up, width / across, height / up))


def _bar(figure: Any, image: Any, left: float, top: float) -> None:
    """What black and white mean, at most three inches high."""
    high = min(3.0, top - 0.2)
    figure.colorbar(image, cax=_place(figure, left, top - high, 0.15, high), label="weight")
