"""Pictures of training, drawn without a display."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from .progress import bits_per_byte


def draw_losses(
    path: str | os.PathLike[str],
    curves: Mapping[str, Sequence[tuple[int, float]]],
    *,
    validation: Sequence[tuple[int, float]] = (),
    title: str = "",
    unit: str = "byte",
) -> None:
    """Write a PNG of bits per byte or token against updates; `curves` are name -> (step, loss in nats).

    `validation` are such pairs. Needs matplotlib. The figure is made without pyplot, so no display and no global
    state are touched.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    # Agreeing curves lie on top of each other: each later one is thinner and dashed, so that all are seen.
    for number, (name, points) in enumerate(curves.items()):
        steps, losses = [step for step, _ in points], [bits_per_byte(loss) for _, loss in points]
        style = ("-", "--", ":")[number % 3]
        axes.plot(steps, losses, style, linewidth=max(3.0 - number, 1.0), label=name)
    if validation:
        bits = [bits_per_byte(loss) for _, loss in validation]
        axes.plot([step for step, _ in validation], bits, "k*-", linewidth=1.0, markersize=7, label="validation")
    axes.set_xlabel("update")
    axes.set_ylabel(f"bits per {unit}")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
