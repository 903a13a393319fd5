"""Train on short texts, read longer ones: a part of the experiment `positions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core_numpy.contract import data

from .common import train

LENGTH, FACTORS, STEPS = 32, (1, 2, 8), 300
TRAINED = ("learned", "sinusoidal", "rotary", "alibi", "relative", "none")
SCALINGS = ("linear", "ntk", "dynamic", "yarn")
Curve = dict[int, float]


def text_model(B: Any, scheme: str, **fields: Any) -> Any:
    """A language model of bytes with one block; the relative buckets reach over a few dozen bytes."""
    usual = {"vocab": 256, "width": 64, "heads": 4, "layers": 1, "max_length": LENGTH, "positions": scheme}
    # Sinusoids have size 1: the rows of the tokens, which start at 0.02, are brought to theirs.
    usual |= {"relative_max_distance": LENGTH, "embedding_scale": 50.0 if scheme == "sinusoidal" else None}
    return B.ModelConfig(**usual | fields)


def losses(B: Any, model: Any, valid: Any, factors: tuple[int, ...] = FACTORS) -> Curve:
    """Nats per byte of the same text, cut into windows of each length."""
    reader = B.Trainer(model, B.TrainConfig())
    found: Curve = {}
    for factor in factors:
        whole = data.evaluation_batches(valid, batch=max(FACTORS) // factor * 8, length=LENGTH * factor)
        found[factor] = reader.evaluate(whole)["loss"]
    return found


def stretched(B: Any, params: Mapping[str, Any], kind: str, valid: Any, factors: tuple[int, ...]) -> Curve:
    """The rotary model with its frequencies rescaled for each length, not trained further."""
    found: Curve = {}
    for factor in factors:
        # Dynamic looks at the running length by itself; the others are told how much longer the text is.
        scaling = B.RotaryScaling(
            kind=kind, factor=1.0 if kind == "dynamic" else float(factor), original_max_length=LENGTH
        )
        model = B.Transformer(text_model(B, "rotary", rotary_scaling=scaling))
        B.set_params(model, params)
        found |= losses(B, model, valid, (factor,))
    return found


def extrapolate(B: Any, steps: int = STEPS, held_out: int = 16384) -> dict[str, Curve]:
    """Nats per byte by scheme and by factor; a learned table has no rows past the length that it was trained at."""
    text, valid = data.split(data.byte_tokens(data.default_text()), length=LENGTH * max(FACTORS))
    windows = data.evaluation_batches(text, batch=len(text), length=LENGTH)
    whole, valid = next(windows), valid[: held_out + 1]
    found: dict[str, Curve] = {}
    for scheme in TRAINED:
        model, _ = train(B, text_model(B, scheme), whole, steps=steps, batch=16)
        found[scheme] = losses(B, model, valid, (1,) if scheme == "learned" else FACTORS)
        if scheme == "rotary":
            # At the trained length every scaling leaves the frequencies as they are.
            for kind in SCALINGS:
                longer = stretched(B, B.get_params(model), kind, valid, FACTORS[1:])
                found[f"rotary, {kind}"] = {1: found[scheme][1]} | longer
    return found
