"""Who may attend to whom, as weights; and what a model learns whose mask is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np

from .common import Claim, Report, Table, accuracy, back, classifier, digits, heat, into, share, train
from .padding import inverted, padded, weights, without

CLAIM = "A mask says who may attend to whom; a missing, inverted or misplaced one costs the accuracy, without an error."
STEPS = 800
RIGHT = ("padding masked", "causal, answer at the last", "last two bottom-right")


def run(B: Any) -> Report:
    learnt, valid = digits()
    short, judged = padded(learnt), padded(valid)
    model, _ = train(B, classifier(B), short, steps=STEPS)
    scores = {
        "padding masked": accuracy(B, model, judged),
        "mask forgotten at use": accuracy(B, model, without(judged)),
    }
    scores["trained without the mask"] = accuracy(
        B, train(B, classifier(B), without(short), steps=STEPS)[0], without(judged)
    )
    scores["trained with it inverted"] = accuracy(
        B, train(B, classifier(B), inverted(short), steps=STEPS)[0], inverted(judged)
    )
    first, _ = train(B, classifier(B, causal=True, pool="first"), learnt, steps=STEPS)
    last, _ = train(B, classifier(B, causal=True, pool="last"), learnt, steps=STEPS)
    scores["causal, answer at the first"] = accuracy(B, first, valid)
    scores["causal, answer at the last"] = accuracy(B, last, valid)
    for name, offset in (("last two bottom-right", 6), ("last two top-left", 0)):
        parts = (B.causal_mask(6, 8, q_offset=0), B.causal_mask(2, 8, q_offset=offset))
        mask = into(B, np.concatenate([back(B, part) for part in parts]))
        scores[name] = accuracy(B, last, valid, mask=mask)
    maps, right = weights(B), scores["padding masked"]

    def draw(figure: Any) -> None:
        top, bottom = figure.subfigures(2, 1, height_ratios=(1.4, 1))
        for axes, (name, picture) in zip(top.subplots(2, 4).flat, maps.items(), strict=True):
            heat(axes, picture, title=name)
        top.suptitle("weights: queries down, keys across", fontsize=10)
        axes = bottom.subplots()
        axes.barh(list(scores), list(scores.values()), color=["C0" if name in RIGHT else "C3" for name in scores])
        axes.axvline(0.5, linestyle="--", color="grey")
        axes.set(xlabel="validation accuracy (chance 0.5); red: a mistake", xlim=(0.3, 1.02))
        axes.invert_yaxis()

    mistakes = (("Without the padding mask", "trained without the mask", 0.05),
                ("With the mask inverted", "trained with it inverted", 0.4))  # fmt: skip
    return Report(
        (
            *(Claim(f"{text}, training loses {loss} or more.", f"{scores[n]:.3f} against {right:.3f}",
                    right - scores[n] >= loss) for text, n, loss in mistakes),
            Claim("A causal mask hides the answer from the first token: chance (under 0.55).",
                  share(scores["causal, answer at the first"]), scores["causal, answer at the first"] < 0.55),
            Claim("Decoding two tokens, top-left alignment loses 0.2 or more against bottom-right.",
                  f"{scores['last two top-left']:.3f} against {scores['last two bottom-right']:.3f}",
                  scores["last two bottom-right"] - scores["last two top-left"] > 0.2),
        ),
        (Table(f"accuracy, {STEPS} updates each", ("mask", "accuracy (95 % interval)"),
               [(name, share(score)) for name, score in scores.items()]),),
        draw,
        size=(10, 9),
    )  # fmt: skip
