"""Where the norm stands: gradients by layer at the start, and what a learning rate does with and without warm-up."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from core_numpy.contract import data

from .common import Claim, Report, Table, batches
from .extrapolation import text_model

CLAIM = "Pre-norm trains deep stacks at rates where post-norm, without warm-up, does not."
DEPTHS, RATES, WARMUPS, STEPS, WARM = (2, 6), (1e-3, 1e-2), (False, True), 120, 60


def model_of(B: Any, place: str, depth: int) -> Any:
    return B.Transformer(text_model(B, "learned", width=32, heads=2, layers=depth, norm_place=place), seed=0)


def layer_norms(B: Any, model: Any, batch: data.Batch) -> list[float]:
    """The gradient's norm over the parameters of each block."""
    grads = B.loss_and_gradients(model, batch)[1]
    squares = [0.0] * model.config.layers
    for name, grad in grads.items():
        if name.startswith("blocks."):
            squares[int(name.split(".")[1])] += float((grad.astype(np.float64) ** 2).sum())
    return [square**0.5 for square in squares]


def run(B: Any) -> Report:
    text = data.byte_tokens(data.default_text())
    whole = next(data.evaluation_batches(text, batch=len(text), length=32))
    first = next(batches(whole, 16, 1))
    norms = {place: layer_norms(B, model_of(B, place, DEPTHS[-1]), first) for place in ("pre", "post")}
    ends: dict[tuple[str, int, float, bool], float] = {}
    for place, depth, rate, warm in product(norms, DEPTHS, RATES, WARMUPS):
        # No clipping: it would hide what the norms' places do.
        options = B.TrainConfig(steps=STEPS, batch=16, lr=rate, warmup=WARM if warm else 0, clip_norm=None)
        trainer = B.Trainer(model_of(B, place, depth), options)
        losses = [r["loss"] for r in trainer.fit(batches(whole, 16, STEPS))]
        ends[place, depth, rate, warm] = float(np.mean(losses[-20:]))
    deep, fast = DEPTHS[-1], RATES[-1]
    spread = {place: max(x) / min(x) for place, x in norms.items()}

    def draw(figure: Any) -> None:
        left, *others = figure.subplots(1, 3)
        for place, values in norms.items():
            left.plot(range(1, deep + 1), values, marker="o", label=place)
        left.set(xlabel="block", ylabel="gradient norm at the start", title=f"{deep} blocks", ylim=(0, None))
        left.legend()
        for axes, depth in zip(others, DEPTHS, strict=True):
            for (place, warm), mark in zip(product(norms, WARMUPS), ("o-", "o--", "s-", "s--"), strict=True):
                values = [ends[place, depth, rate, warm] for rate in RATES]
                axes.plot(RATES, values, mark, label=f"{place}, {'warm-up' if warm else 'no warm-up'}")
            axes.set(xscale="log", xlabel="learning rate", ylabel="nats per byte", title=f"{depth} blocks")
            axes.legend(fontsize=8)

    pre, post, warmed = (ends[key] for key in (("pre", deep, fast, False), ("post", deep, fast, False),
                                               ("post", deep, fast, True)))  # fmt: skip
    return Report(
        (
            Claim("At the start, gradients are as even over the blocks with pre-norm as with post-norm, or more.",
                  f"largest by smallest: pre {spread['pre']:.2f}, post {spread['post']:.2f}",
                  spread["pre"] <= spread["post"]),
            Claim(f"{deep} blocks at {fast} without warm-up: pre-norm ends lower than post-norm by 0.1 or more.",
                  f"{pre:.3f} against {post:.3f}", post - pre >= 0.1),
            Claim("Warm-up helps post-norm there.", f"{warmed:.3f} against {post:.3f}", warmed < post),
        ),
        (
            Table(f"nats per byte, last 20 of {STEPS} updates", ("norm, blocks, rate", "no warm-up", "warm-up"),
                  [(f"{p}, {d}, {r:g}", *(f"{ends[p, d, r, w]:.3f}" for w in WARMUPS))
                   for p, d, r in product(norms, DEPTHS, RATES)]),
        ),
        draw,
        size=(13, 4),
    )  # fmt: skip
