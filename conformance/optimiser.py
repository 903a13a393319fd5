"""The optimiser alone: one recorded stream of gradients, the parameters after every update.

A free run of training mixes the optimiser's rounding with the model's, and a normalising optimiser turns the rounding
of a small gradient into whole steps. Here the gradients are given, so the error of every element after every update has
a bound from the recursions themselves (`_grown`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .budget import MEANING, UNIT
from .compare import Disagreement, Tally, check_kind, check_within
from .inputs import build, rounded, widened
from .memory import remembered
from .reference import reference

if TYPE_CHECKING:
    from .models import ModelCase
    from .targets.protocol import Target

Arrays = dict[str, np.ndarray]
# Roundings of one line of the recursions: three, and head-room for another order of the same operations.
EACH = 4.0


def judge_stream(case: ModelCase, target: Target, dtype: str, tally: Tally) -> None:
    """The parameters after each update against the float64 reference, element by element."""
    config, params, stream = recorded(case, dtype)
    want, limits = remembered(("stream", case.id, dtype), lambda: expected(config, params, stream, dtype))
    got = target.optimise(config, params, stream)
    if len(got) != len(want):
        raise Disagreement(f"the parameters must come back after each of {len(want)} updates; got {len(got)}")
    for t, (mine, right, bound) in enumerate(zip(got, want, limits, strict=True), start=1):
        if list(mine) != list(right):
            raise Disagreement(f"parameters must be named {list(right)}; got {list(mine)}")
        for name, value in right.items():
            label = f"{name} after update {t}"
            check_kind(label, mine[name], value.shape, dtype)
            check_within(tally, label, mine[name], value, bound[name])


def by_name(after: list[Arrays]) -> Arrays:
    """The parameters of all updates, or their bounds, under the names of the comparisons."""
    return {f"{name} after update {t}": x for t, arrays in enumerate(after, start=1) for name, x in arrays.items()}


def limits_by_name(case: ModelCase, dtype: str) -> Arrays:
    """The bounds of `judge_stream` under the names of its comparisons."""
    config, params, stream = recorded(case, dtype)
    return by_name(remembered(("stream", case.id, dtype), lambda: expected(config, params, stream, dtype))[1])


def recorded(case: ModelCase, dtype: str) -> tuple[Any, Arrays, list[Arrays]]:
    """The TrainConfig, the initial parameters, and the gradients of each update in the run's dtype."""
    assert case.stream is not None and case.train is not None
    config = reference().TrainConfig.from_dict({**case.train, "precision": dtype})
    params: Arrays = {}
    stream: list[Arrays] = [{} for _ in range(case.train["steps"])]
    for name, spec in case.stream.items():
        # Small beside the steps, so that the rounding of the parameters does not hide that of the steps.
        params[name] = rounded(build(case.id, name, {"shape": spec["shape"], "scale": 0.01}), dtype)
        for t, grads in enumerate(stream):
            grads[name] = rounded(build(f"{case.id}/{t}", name, spec), dtype)
    return config, params, stream


def expected(config: Any, params: Arrays, stream: list[Arrays], dtype: str) -> tuple[list[Arrays], list[Arrays]]:
    """The reference's parameters after each update in float64, and their bounds."""
    from core_numpy import optimizer
    from core_numpy.contract.schedule import learning_rate

    now = {name: widened(p) for name, p in params.items()}
    state = optimizer.initial_state(config, now)
    errors = {name: {"p": np.zeros(p.shape), "m": np.zeros(p.shape), "v": np.zeros(p.shape)} for name, p in now.items()}
    want, limits = [], []
    for t, given in enumerate(stream, start=1):
        grads = {name: widened(g) for name, g in given.items()}
        norm = optimizer.global_norm(grads)
        clipped = optimizer.clip(grads, norm, config.clip_norm)
        # The norm is a sum of squares; its rounding moves every clipped gradient alike.
        relative = (
            EACH * np.sqrt(sum(g.size for g in grads.values())) if norm != optimizer.global_norm(clipped) else 0.0
        )
        lr = learning_rate(config, t)
        before = state
        old, (now, state) = now, optimizer.update(config, now, clipped, state, t=t, lr=lr)
        limit: Arrays = {}
        for name, g in clipped.items():
            slots = {slot: before[slot][name] for slot in before}
            limit[name] = _grown(config, errors[name], old[name], now[name], g, relative, slots, t, lr, UNIT[dtype])
            if dtype == "float64":
                limit[name] = limit[name] + MEANING * (np.abs(now[name]) + lr)
        if config.ema is not None:
            for name in now:
                errors[name]["ema"] = _averaged(config.ema, errors[name], now[name], state["ema"][name], UNIT[dtype])
                limit[average(name)] = errors[name]["ema"]
                if dtype == "float64":
                    limit[average(name)] = limit[average(name)] + MEANING * (np.abs(state["ema"][name]) + lr)
        averages = {average(name): x for name, x in state.get("ema", {}).items()}
        want.append(now | averages)
        limits.append(limit)
    return want, limits


def average(name: str) -> str:
    """Under which name a parameter's average stands beside the parameters."""
    return f"average of {name}"


def _averaged(d: float, errors: Arrays, p: np.ndarray, mean: np.ndarray, u: float) -> np.ndarray:
    """ema = d ema + (1 - d) p:    de <- d de + (1 - d) dp + c u (|ema| + (1 - d) |p|); it starts as the parameters."""
    before = errors.get("ema", np.zeros(p.shape))
    return d * before + (1 - d) * errors["p"] + EACH * u * (np.abs(mean) + (1 - d) * np.abs(p))


def _grown(
    config: Any,
    errors: Arrays,
    old: np.ndarray,
    new: np.ndarray,
    g: np.ndarray,
    relative: float,
    slots: Arrays,
    t: int,
    lr: float,
    u: float,
) -> np.ndarray:
    """The bound of a parameter's error after an update; `errors` of parameter and moments are carried on in place.

    m = b1 m + (1 - b1) g:      dm <- b1 dm + (1 - b1) dg + c u (b1 |m| + (1 - b1) |g|), and likewise v
    step = (m / c1) / (sqrt(v / c2) + eps):     dstep = dm / (c1 D) + |step| (dD / D + 2 c u), D the denominator
    p = p - lr (step + decay p):    dp <- dp (1 + lr decay) + lr dstep + c u (lr |step| + lr decay |p|) + 6 u |p|

    The last term: p is rounded twice where decay and step are taken one after the other; right ones use a third of it.
    """
    b1, b2 = config.betas
    dg = relative * u * np.abs(g)
    c = EACH * u
    m = slots["moment1"]
    if config.optimizer == "adamw":
        v = slots["moment2"]
        dm = b1 * errors["m"] + (1 - b1) * dg + c * (b1 * np.abs(m) + (1 - b1) * np.abs(g))
        dv = b2 * errors["v"] + (1 - b2) * 2 * np.abs(g) * dg + c * (b2 * v + (1 - b2) * g * g)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        first, second = 1 - b1**t, 1 - b2**t
        root = np.sqrt(v / second)
        below = root + config.eps
        droot = np.divide(dv / second, 2 * root, out=np.zeros_like(root), where=root > 0)
        step = m / first / below
        dstep = dm / first / below + np.abs(step) * (droot / below + 2 * c)
        errors["m"], errors["v"] = dm, dv
    elif config.optimizer == "lion":
        mixed = b1 * m + (1 - b1) * g
        dmixed = b1 * errors["m"] + (1 - b1) * dg + c * (b1 * np.abs(m) + (1 - b1) * np.abs(g))
        step = np.sign(mixed)
        dstep = np.where(np.abs(mixed) <= dmixed, 2.0, 0.0)  # where the sign itself is rounding
        errors["m"] = b2 * errors["m"] + (1 - b2) * dg + c * (b2 * np.abs(m) + (1 - b2) * np.abs(g))
    else:
        step = b1 * m + g
        dstep = errors["m"] = b1 * errors["m"] + dg + c * (b1 * np.abs(m) + np.abs(g))
    decay = config.weight_decay if old.ndim >= 2 else 0.0
    errors["p"] = errors["p"] * (1 + lr * decay) + lr * dstep
    errors["p"] = errors["p"] + c * (lr * np.abs(step) + lr * decay * np.abs(old)) + 6.0 * u * np.abs(new)
    return errors["p"]
