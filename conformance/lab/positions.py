"""What positions are worth: on the course's task, in the geometry of the sinusoids, and past the trained length."""

from __future__ import annotations

from typing import Any

import numpy as np

from .common import NOT_OFFERED, Claim, Report, Table, accuracy, back, classifier, digits, into, share, train
from .extrapolation import FACTORS, LENGTH, extrapolate

CLAIM = "Without positions a mean over digits cannot know which came first; how schemes carry past the trained length."
SCHEMES = ("none", "learned", "sinusoidal", "rotary", "alibi", "relative")
RECIPE: dict[str, Any] = {"steps": 500, "batch": 128, "lr": 5e-3, "warmup": 50, "schedule": "linear"}


def dot_products(B: Any, width: int = 64, length: int = 128) -> np.ndarray:
    """Products of the sinusoidal encoding of position 0 .. length - 1 with every other, divided by width / 2."""
    table = back(B, B.sinusoidal_encoding(into(B, np.arange(length)), width)).astype(np.float64)
    return table @ table.T / (width / 2)


def run(B: Any) -> Report:
    learnt, valid = digits()
    scores = {}
    for scheme in SCHEMES:
        # Sinusoids have size 1 and token rows start at 0.02: the original model, too, makes the rows larger first.
        config = classifier(B, positions=scheme, embedding_scale=50.0 if scheme == "sinusoidal" else None)
        scores[scheme] = accuracy(B, train(B, config, learnt, **RECIPE)[0], valid)
    products = dot_products(B)
    # The product depends on the distance alone where each diagonal of the table is constant.
    uneven = max(float(np.ptp(np.diagonal(products, d))) for d in range(len(products)))
    curves = extrapolate(B)

    def draw(figure: Any) -> None:
        left, middle, right = figure.subplots(1, 3, width_ratios=(1, 1, 1.5))
        left.barh(SCHEMES, [scores[s] for s in SCHEMES], color=["C3" if s == "none" else "C0" for s in SCHEMES])
        left.axvline(0.5, linestyle="--", color="grey")
        left.set(title="accuracy by scheme (chance 0.5)", xlim=(0.4, 1.02))
        left.invert_yaxis()
        middle.plot(products[0])
        middle.set(title="sinusoids: product by distance", xlabel="distance", ylabel="product / largest")
        for number, (scheme, curve) in enumerate(curves.items()):
            style = "--" if "," in scheme else "-"
            right.plot(
                [LENGTH * f for f in curve], list(curve.values()), style, marker="osv^D"[number % 5], label=scheme
            )
        right.set(title=f"trained at {LENGTH} bytes, read at up to {LENGTH * FACTORS[-1]}", xlabel="length",
                  ylabel="nats per byte", xscale="log")  # fmt: skip
        right.set_xticks([LENGTH * f for f in FACTORS], [str(LENGTH * f) for f in FACTORS])
        right.minorticks_off()
        right.legend(fontsize=8)

    absolute, distant = min(scores["learned"], scores["sinusoidal"]), max(scores[s] for s in SCHEMES[3:])
    far = {name: curve[8] - curve[1] for name, curve in curves.items() if 8 in curve}
    return Report(
        (
            Claim("Without positions, about 0.59 (under 0.7).", share(scores["none"]), scores["none"] < 0.7),
            Claim("With learned ones, about 1.00 (0.98).", share(scores["learned"]), scores["learned"] >= 0.98),
            Claim("One block tells the first digit by where it stands (learned, sinusoidal) better than by distance.",
                  f"worse of them {absolute:.3f}, best of the others {distant:.3f}", absolute > distant),
            Claim("Products of sinusoidal encodings depend on the distance alone and are largest at 0.",
                  f"at one distance they differ by {uneven:.1e}; next largest {products[0, 1:].max():.3f}",
                  uneven < 1e-4 and products[0, 1:].max() < 1),
            Claim("ALiBi and relative positions carry to 8 times the length better than sinusoids.",
                  f"nats per byte added: alibi {far['alibi']:.3f}, relative {far['relative']:.3f}, "
                  f"sinusoidal {far['sinusoidal']:.3f}", max(far["alibi"], far["relative"]) < far["sinusoidal"]),
        ),
        (
            Table(f"the repeat task, {RECIPE['steps']} updates of 128 rows", ("positions", "accuracy (95 % interval)"),
                  [(scheme, share(score)) for scheme, score in scores.items()]),
            Table(f"nats per byte of held-out text, trained at {LENGTH}", ("positions", *(f"{f} x" for f in FACTORS)),
                  [(name, *(f"{c[f]:.3f}" if f in c else NOT_OFFERED for f in FACTORS)) for name, c in curves.items()]),
        ),
        draw,
        size=(14, 4.5),
        notes=(f"A learned table has {LENGTH} rows: it is not offered beyond them (the model refuses such a text).",
               "Rotary with a scaling is the trained rotary model, its frequencies rescaled, not trained further."),
    )  # fmt: skip
