"""What attention gives is an average of the values; the scores only say how the average is weighted."""

from __future__ import annotations

from typing import Any

import numpy as np

from .common import Claim, Report, Table, back, into

CLAIM = "Attention is a weighted average of the values: uniform, soft or all on one, by the scores alone."
VALUES = np.array([[0.0, 0.0], [4.0, 0.0], [4.0, 3.0], [0.0, 3.0]])
KEYS = np.eye(4)
# The query's score is its product with each key: nothing preferred, the third a little, the third far ahead.
QUERIES = {"uniform": [0.0, 0.0, 0.0, 0.0], "soft": [0.0, 1.0, 2.0, 0.5], "one key": [0.0, 0.0, 50.0, 0.0]}


def run(B: Any) -> Report:
    q, k, v = (into(B, np.asarray(x, np.float32)) for x in (list(QUERIES.values()), KEYS, VALUES))
    weights = back(B, B.attention_weights(q, k, scale=1.0))
    outs = back(B, B.attention(q, k, v, scale=1.0))
    apart = float(np.abs(outs - weights @ VALUES).max())
    sums = float(np.abs(weights.sum(1) - 1).max())

    def draw(figure: Any) -> None:
        places = figure.subplots(1, 4)
        for axes, name, row in zip(places, QUERIES, weights, strict=False):
            axes.bar(range(1, 5), row, color="C0")
            axes.set(title=f"{name}: the weights", ylim=(0, 1.05), xlabel="value", xticks=range(1, 5))
        axes = places[3]
        axes.fill(*VALUES.T, color="0.9")
        axes.plot(*VALUES.T, "ks")
        for number, row in enumerate(VALUES):
            axes.annotate(str(number + 1), row, xytext=(5, 5), textcoords="offset points")
        for number, (name, out) in enumerate(zip(QUERIES, outs, strict=True)):
            axes.plot(*out, "o", color=f"C{number + 1}", markersize=9, zorder=3, label=name)
        axes.set(title="values 1 to 4, and the outputs", xlim=(-0.6, 4.8), ylim=(-0.6, 4.8))
        axes.legend(loc="upper left", fontsize=8)

    inside = bool((weights >= 0).all()) and sums < 1e-6
    return Report(
        (
            Claim("The output is the weights times the values (to 1e-5).", f"{apart:.1e} apart", apart < 1e-5),
            Claim("No weight is negative and each row sums to 1, so the output lies between the values.",
                  f"smallest {weights.min():.1e}, sums off 1 by {sums:.1e}", inside),
            Claim("Equal scores give the plain mean.", str(outs[0].tolist()), np.allclose(outs[0], VALUES.mean(0))),
            Claim("One score far ahead gives its value alone.", str(outs[2].tolist()), np.allclose(outs[2], VALUES[2])),
        ),
        (
            Table("three weight vectors", ("query", "w1", "w2", "w3", "w4", "out"),
                  [(name, *(f"{x:.4f}" for x in w), f"({o[0]:.3f}, {o[1]:.3f})")
                   for name, w, o in zip(QUERIES, weights, outs, strict=True)]),
        ),
        draw,
        size=(12, 3.4),
    )  # fmt: skip
