"""What a map of weights shows, and what it does not: the same answer with quite other weights."""

from __future__ import annotations

from typing import Any

import numpy as np

from core_numpy.contract.shuffle import random_words

from .common import Claim, Report, Table, accuracy, back, classifier, digits, heat, into, share, train

CLAIM = "The weights point at the repeat; yet other weights, far from those, give the same prediction."
STEPS, ROWS, TRIES = 2000, 400, 24


def probability(B: Any, model: Any, tokens: Any, **call: Any) -> np.ndarray:
    """Of the answer "repeated", by row."""
    return back(B, B.softmax(model(tokens, **call)))[:, 1]


def run(B: Any) -> Report:
    learnt, valid = digits()
    # One head, and the answer is read from the first token: all it knows of the others came through row 0.
    config = classifier(B, heads=1, pool="first")
    model, _ = train(B, config, learnt, steps=STEPS, batch=128, schedule="linear", warmup=50, lr=5e-3)
    rows, tokens = valid["tokens"][:ROWS], into(B, valid["tokens"][:ROWS])
    plain = back(B, model.attention_maps(tokens)[0])[:, 0, 0]
    says = probability(B, model, tokens)
    repeats = rows[:, 1:] == rows[:, :1]
    asked = np.flatnonzero(repeats.any(1))
    hits = float(repeats[asked, plain[asked, 1:].argmax(1)].mean())
    guess = float(repeats[asked].mean())
    # Other weights: row 0 may see only half of the keys, drawn anew each time; does the answer stay?
    moved, chosen = np.zeros(ROWS), plain.copy()
    bits = random_words(11, 0, TRIES * ROWS * 8).reshape(TRIES, ROWS, 8) % 2 == 0
    for seen in bits:
        seen[:, 0] |= ~seen.any(1)
        mask = np.ones((ROWS, 1, 8, 8), bool)
        mask[:, 0, 0] = seen
        other = back(B, model.attention_maps(tokens, mask=into(B, mask))[0])[:, 0, 0]
        same = np.abs(probability(B, model, tokens, mask=into(B, mask)) - says) < 0.05
        distance = np.abs(other - plain).sum(1) / 2
        better = same & (distance > moved)
        moved[better], chosen[better] = distance[better], other[better]
    strong = moved >= 0.5
    shares = {"repeated": float(strong[asked].mean()), "not repeated": float(strong[~repeats.any(1)].mean())}

    def draw(figure: Any) -> None:
        left, middle, right = figure.subplots(1, 3, width_ratios=(1, 1.2, 1.2))
        row = int(asked[0])
        picture = back(B, model.attention_maps(tokens[row : row + 1])[0])[0, 0]
        heat(left, picture, [str(digit) for digit in rows[row]], "the map: queries down, keys across")
        shown = int(asked[moved[asked].argmax()])
        place = np.arange(8)
        middle.bar(place - 0.2, plain[shown], 0.4, label="its own weights")
        middle.bar(place + 0.2, chosen[shown], 0.4, label="others, same answer")
        middle.set_xticks(place, [str(digit) for digit in rows[shown]])
        middle.set(title="row 0 of one sequence", ylim=(0, 1.05))
        middle.legend(fontsize=8)
        right.hist([moved[asked], moved[~repeats.any(1)]], bins=10, range=(0, 1), label=list(shares))
        right.set(title="how far the weights move, answer kept", xlabel="total variation", ylabel="rows")
        right.legend(fontsize=8)

    return Report(
        (
            Claim("Row 0's largest weight on a later digit lies on a repeat twice as often as by chance, or more.",
                  f"{share(hits, len(asked))}; by chance {guess:.3f}", hits >= 2 * guess),
            Claim("Weights moved by 0.5 or more leave the prediction within 0.05, in half of the rows or more.",
                  f"{float(strong.mean()):.3f} of rows; " + ", ".join(f"{n}: {s:.3f}" for n, s in shares.items()),
                  strong.mean() >= 0.5),
        ),
        (Table(f"one head, {STEPS} updates", ("measure", "value"),
               [("accuracy (95 % interval)", share(accuracy(B, model, valid))),
                ("largest weight on a repeat", share(hits, len(asked))), ("by chance", guess),
                *((f"rows moved by 0.5, {name}", value) for name, value in shares.items())]),),
        draw,
        size=(13, 4),
    )  # fmt: skip
