"""More heads cost nothing: the same width, cut into more pieces. What changes is how many patterns there are."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np

from .common import Claim, Report, Table, accuracy, back, classifier, digits, heat, into, share, train

CLAIM = "Heads are free: the same parameters and FLOPs for any number of them; their patterns differ."
HEADS, STEPS, ROWS = (1, 2, 4, 8), 800, 200


def apart(maps: np.ndarray) -> float:
    """Total variation between the heads' weights, mean over pairs of heads, rows and queries; 0 equal, 1 disjoint."""
    pairs = combinations(range(maps.shape[1]), 2)
    return float(np.mean([np.abs(maps[:, a] - maps[:, b]).sum(-1).mean() / 2 for a, b in pairs]))


def run(B: Any) -> Report:
    learnt, valid = digits()
    tokens = into(B, valid["tokens"][:ROWS])
    rows, trained, before = [], {}, {}
    for heads in HEADS:
        config = classifier(B, heads=heads)
        cost = B.step_cost(config, 64, 8).total
        start = back(B, B.Transformer(config, seed=0).attention_maps(tokens)[0])
        model, _ = train(B, config, learnt, steps=STEPS)
        maps = back(B, model.attention_maps(tokens)[0])
        trained[heads], before[heads] = maps, start
        differ = (f"{apart(start):.3f}", f"{apart(maps):.3f}") if heads > 1 else ("one head", "one head")
        rows.append((heads, cost.parameters, cost.flops, share(accuracy(B, model, valid)), *differ))
    four = apart(trained[4])

    def draw(figure: Any) -> None:
        labels = [str(digit) for digit in valid["tokens"][0]]
        for number, axes in enumerate(figure.subplots(1, 4)):
            image = heat(axes, trained[4][0, number], labels, f"head {number}")
        figure.colorbar(image, ax=figure.axes, label="weight", shrink=0.7)
        figure.suptitle("the four heads of a trained block, one row of digits: queries down, keys across", fontsize=10)

    return Report(
        (
            Claim("Parameters are the same for 1, 2, 4 and 8 heads.", ", ".join(str(row[1]) for row in rows),
                  len({row[1] for row in rows}) == 1),
            Claim("FLOPs of a training step are the same.", ", ".join(str(row[2]) for row in rows),
                  len({row[2] for row in rows}) == 1),
            Claim("The patterns of four trained heads differ (0.1 or more apart), more than before training.",
                  f"{four:.3f} apart, {apart(before[4]):.3f} before", four >= 0.1 and four > apart(before[4])),
        ),
        (
            Table("one block of width 32, its heads",
                  ("heads", "parameters", "FLOPs of a step", "accuracy (95 % interval)", "apart before", "apart after"),
                  rows),
        ),
        draw,
        size=(11, 3.4),
    )  # fmt: skip
