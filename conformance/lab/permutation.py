"""Attention sees a set: shuffle the tokens and the outputs shuffle along. Only an encoding of positions breaks that."""

from __future__ import annotations

from typing import Any

import numpy as np

from core_numpy.contract.shuffle import permutation

from .common import Claim, Report, Table, back, into

CLAIM = "Attention is permutation equivariant; encodings of positions break it."
SCHEMES = ("none", "learned", "sinusoidal", "rotary", "alibi", "relative")
LENGTH = 12


def run(B: Any) -> Report:
    order = permutation(3, 0, LENGTH)
    tokens = np.arange(LENGTH, dtype=np.int32)[None]
    found, pictures = {}, {}
    for scheme in SCHEMES:
        config = B.ModelConfig(
            vocab=LENGTH, width=32, heads=4, layers=2, max_length=LENGTH, positions=scheme, kind="encoder", head="none"
        )
        model = B.Transformer(config, seed=0)
        # Larger than the usual start (0.02), as training would make them: a table near 0 encodes next to nothing.
        params = B.get_params(model)
        grown = {n: x * 25 if n in ("positions.weight", "relative.weight") else x for n, x in params.items()}
        B.set_params(model, {name: value.astype(np.float32) for name, value in grown.items()})
        out = back(B, model(into(B, tokens)))[0]
        shuffled = back(B, model(into(B, tokens[:, order])))[0]
        # Equivariant: the output for the shuffled tokens is the shuffled output.
        difference = np.abs(shuffled - out[order])
        found[scheme] = float(np.linalg.norm(shuffled - out[order]) / np.linalg.norm(out))
        pictures[scheme] = difference

    def draw(figure: Any) -> None:
        places = figure.subplots(2, 3)
        for axes, (scheme, difference) in zip(places.flat, pictures.items(), strict=True):
            image = axes.imshow(difference, vmin=0, vmax=1.0, cmap="magma", aspect="auto")
            axes.set_title(f"{scheme}: relative distance {found[scheme]:.1e}", fontsize=9)
            axes.set(xlabel="feature", ylabel="token")
        figure.colorbar(image, ax=places, label="|f(shuffled) - shuffled f|")

    broken = {scheme: value for scheme, value in found.items() if scheme != "none"}
    least = min(broken, key=lambda scheme: broken[scheme])
    return Report(
        (
            Claim("Without positions, shuffling commutes with the model, to rounding (1e-5).",
                  f"{found['none']:.1e} apart", found["none"] < 1e-5),
            Claim("Every encoding breaks it (by more than 1e-2).",
                  f"least with {least}, {broken[least]:.2g}", broken[least] > 1e-2),
        ),
        (
            Table("f(shuffled) against shuffled f, two random blocks", ("positions", "relative distance"),
                  [(scheme, f"{value:.2e}") for scheme, value in found.items()]),
        ),
        draw,
        size=(10, 5.4),
    )  # fmt: skip
