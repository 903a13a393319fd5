"""Why scores are divided by the root of the head size: otherwise the softmax saturates and its gradient dies."""

from __future__ import annotations

from typing import Any

import numpy as np

from .common import Claim, Report, Table, back, into, mean_interval, shown

CLAIM = "Unscaled scores spread as the square root of the width, until the softmax picks one key and learns no more."
WIDTHS, DRAWS, KEYS = (8, 64, 512), 400, 16


def score_gradient(B: Any, q: Any, k: Any, v: Any, grad: np.ndarray, scale: float) -> np.ndarray:
    """The gradient of sum(grad * out) for each score, read at a bias of zeros that is added to the scores."""
    bias = np.zeros((DRAWS, 1, 1, KEYS), np.float32)
    if B.__name__ == "backend_torch":
        leaf = into(B, bias).requires_grad_()
        (B.attention(q, k, v, bias=leaf, scale=scale) * into(B, grad)).sum().backward()
        return back(B, leaf.grad)
    if B.__name__ == "backend_jax":
        import jax

        return back(B, jax.grad(lambda b: (B.attention(q, k, v, bias=b, scale=scale) * grad).sum())(into(B, bias)))
    return B.attention_vjp(grad, q, k, v, bias=bias, scale=scale)["bias"]


def measure(B: Any, width: int, scale: float) -> dict[str, tuple[float, float, float]]:
    """Over many draws of one query and 16 keys: spread of the scores, largest weight, length of the gradient."""
    keys = B.split(B.key(width), 4)
    shapes = ((1, width), (KEYS, width), (KEYS, 8), (1, 8))
    q, k, v, grad = (B.normal(key, (DRAWS, 1, *shape)) for key, shape in zip(keys, shapes, strict=True))
    squares = (((back(B, q) * back(B, k)).sum(-1) * scale) ** 2).mean((1, 2))
    largest = back(B, B.attention_weights(q, k, scale=scale)).max(-1)[:, 0, 0]
    lengths = np.sqrt((score_gradient(B, q, k, v, back(B, grad), scale) ** 2).sum((1, 2, 3)))
    spread = tuple(float(np.sqrt(x)) for x in mean_interval(squares))
    return {"score": spread, "weight": mean_interval(largest), "gradient": mean_interval(lengths)}  # type: ignore[dict-item]


def run(B: Any) -> Report:
    found = {(scaled, width): measure(B, width, width**-0.5 if scaled else 1.0)
             for scaled in (False, True) for width in WIDTHS}  # fmt: skip
    names = {"score": "standard deviation of the scores", "weight": "largest weight", "gradient": "gradient norm"}
    plain, scaled = ({what: [found[s, w][what][0] for w in WIDTHS] for what in names} for s in (False, True))
    power = float(np.polyfit(np.log(WIDTHS), np.log(plain["score"]), 1)[0])

    def draw(figure: Any) -> None:
        for axes, (what, name) in zip(figure.subplots(1, 3), names.items(), strict=True):
            for number, (one, label) in enumerate(((False, "unscaled"), (True, "scaled"))):
                middle, low, high = np.transpose([found[one, width][what] for width in WIDTHS])
                axes.errorbar(
                    WIDTHS, middle, yerr=(middle - low, high - middle), marker="os"[number], capsize=4, label=label
                )
            axes.set_xscale("log", base=2)
            axes.set(xlabel="width", title=name, ylim=(0, None))
            axes.set_xticks(WIDTHS, [str(width) for width in WIDTHS], minor=False)
            axes.legend()

    flat = all(abs(x - 1) < 0.1 for x in scaled["score"])
    lost, kept = plain["gradient"][2] / plain["gradient"][0], scaled["gradient"][2] / scaled["gradient"][0]
    return Report(
        (
            Claim("Unscaled, scores spread as width to the 0.5.", f"to the {power:.3f}", abs(power - 0.5) < 0.05),
            Claim("Scaled, it is 1.", ", ".join(f"{x:.3f}" for x in scaled["score"]), flat),
            Claim("Unscaled at 512, one key takes nearly all weight; scaled it does not.",
                  f"{plain['weight'][2]:.3f} against {scaled['weight'][2]:.3f}",
                  plain["weight"][2] > 0.9 and scaled["weight"][2] < 0.5),
            Claim("The gradient that reaches the scores shrinks from width 8 to 512 only without the scale.",
                  f"to {lost:.2f} of it unscaled, to {kept:.2f} scaled", lost < 0.5 and 0.8 < kept < 1.25),
        ),
        (
            Table(f"{DRAWS} draws of a query and {KEYS} keys, mean and 95 % interval", ("width", *names.values()),
                  [(f"{w} {'scaled' if s else 'unscaled'}", *(shown(*one[what], ".3f") for what in names))
                   for (s, w), one in found.items()]),
        ),
        draw,
        size=(12, 3.8),
    )  # fmt: skip
