"""The same race at many values of one axis: how time grows, by which power, and where two curves cross."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .figures import unpaired_interval
from .machine import cores
from .racing import Say, needed, run_tasks
from .task import PRECISIONS, RECURRENT, Task

SIZE_AXES = ("length", "width", "layers", "batch")
AXES = (*SIZE_AXES, "threads", "precision", "remat")
# Around the size that was chosen.
FACTORS = (0.5, 1, 2, 4)
RESAMPLES = 1000


def values_of(axis: str, base: Task, given: str | None) -> list[Any]:
    """The values of the axis: those given as "A,B,...", or powers of two around the base's own."""
    if given is None:
        if axis in SIZE_AXES:
            own = getattr(base.shape, axis)
            least = base.shape.heads if axis == "width" else 1
            return sorted({max(int(own * factor), least) for factor in FACTORS})
        most = cores()
        if axis == "threads":
            return [n for n in (1, 2, 4, 8, 16, 32, 64) if n < most] + [most]
        return list(PRECISIONS) if axis == "precision" else [False, True]
    words = [word.strip() for word in given.split(",") if word.strip()]
    if axis in ("precision", "remat"):
        known: dict[str, Any] = {"off": False, "on": True} if axis == "remat" else {name: name for name in PRECISIONS}
        if not words or any(word not in known for word in words):
            raise ValueError(f"values of {axis} must be of {', '.join(known)}; got {given!r}")
        return [known[word] for word in dict.fromkeys(words)]
    if not words or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ValueError(f"values of {axis} must be positive integers such as 64,128,256; got {given!r}")
    return sorted({int(word) for word in words})


def task_at(base: Task, axis: str, value: Any) -> Task:
    """The base with another value. A wider model has more heads of the same size, as models grow."""
    if axis == "width":
        size = base.shape.width // base.shape.heads
        if value % size:
            raise ValueError(f"widths must be multiples of the head size ({size}) at this size; got {value}")
        return base.replace(width=value, heads=value // size)
    return base if axis == "threads" else base.replace(**{axis: value})


def sweep(
    axis: str,
    base: Task,
    names: Sequence[str],
    *,
    values: str | None = None,
    architectures: Sequence[str] | None = None,
    rounds: int,
    seconds: float,
    threads: int | None,
    timeout: float,
    say: Say,
) -> dict[str, Any]:
    """A document as `run` gives, with "sweep": {"axis", "values", "curves", "fits", "crossings"}."""
    if axis not in AXES:
        raise ValueError(f"sweep must be one of {', '.join(AXES)}; got {axis!r}")
    points = values_of(axis, base, values)
    tasks = {value: task_at(base, axis, value) for value in points}  # refuses a value before anybody starts
    whole: dict[str, Any] | None = None
    facts: dict[str, dict[str, Any]] | None = None
    at: list[Any] = []
    for value, task in tasks.items():
        document = run_tasks(
            [task.replace(architecture=name) for name in architectures or needed(names, alone=True)],
            names, rounds=rounds, seconds=seconds, threads=value if axis == "threads" else threads, timeout=timeout,
            say=say, label=f"{axis} {value}: ", facts=facts,
        )  # fmt: skip
        if axis not in ("threads", "precision"):
            facts = document["environment"]["devices"]
        for race in document["races"]:
            race["at"] = value
        at.append(value)
        if whole is None:
            whole = document
        else:
            whole["races"] += document["races"]
            whole["interrupted"] = document["interrupted"]
        if document["interrupted"]:
            break
    assert whole is not None  # there is at least one value
    whole["sweep"] = {"axis": axis, "values": at, **analysis(axis, whole["races"])}
    return whole


def analysis(axis: str, races: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """{"curves", "fits", "crossings"} of races that carry their value as "at".

    curves: name -> [[value, seconds, FLOPs], ...]. Only where the axis is a number that FLOPs depend on are there fits:
    the exponent of a straight line through the logarithms, its 95 % interval over resampled rounds, the exponent of
    the last two values alone, and the FLOPs' own exponent.
    """
    curves: dict[str, list[list[Any]]] = {}
    samples: dict[str, list[Sequence[float]]] = {}
    for race in races:
        for name, row in race["contestants"].items():
            if row["status"] == "raced" and "median" in row:
                curve = curve_name(name, race["task"])
                curves.setdefault(curve, []).append([race["at"], row["median"], race["task"]["flops"]])
                samples.setdefault(curve, []).append(row["rounds"])
    if axis not in SIZE_AXES:
        return {"curves": curves, "fits": {}, "crossings": []}
    fits = {name: fit(points, samples[name]) for name, points in curves.items() if len(points) > 1}
    return {"curves": curves, "fits": fits, "crossings": crossings(curves, samples)}


def curve_name(name: str, task: Mapping[str, Any]) -> str:
    """The contestant, and its architecture where that is neither the common one nor in the name already."""
    architecture = task.get("spec", {}).get("architecture", "gpt")
    return name if architecture == "gpt" or architecture in name else f"{name} ({architecture})"


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Of the straight line through (log x, log y), least squares."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def fit(points: Sequence[Sequence[Any]], samples: Sequence[Sequence[float]]) -> dict[str, float]:
    """{"exponent", "low", "high", "last", "flops"} of one curve with at least two points."""
    x, y, flops = zip(*points, strict=True)
    rng, drawn = np.random.default_rng(0), []
    for _ in range(RESAMPLES):
        medians = [float(np.median(rng.choice(seconds, len(seconds)))) for seconds in samples]
        drawn.append(slope(x, medians))
    low, high = np.quantile(drawn, [0.025, 0.975])
    return {
        "exponent": slope(x, y), "low": float(low), "high": float(high),
        "last": slope(x[-2:], y[-2:]), "flops": slope(x, flops),
    }  # fmt: skip


def crossings(
    curves: Mapping[str, Sequence[Sequence[Any]]], samples: Mapping[str, Sequence[Sequence[float]]]
) -> list[dict[str, Any]]:
    """Where two curves change places: straight between neighbouring values in logarithms.

    Each: {"a", "b", "at"}: a is the faster one below, b above. Values at which the two lie within each other's noise
    say nothing. An attention and a recurrent model that do not change places are listed with "at": None, a the
    faster one wherever they can be told apart.
    """
    found: list[dict[str, Any]] = []
    for a, b in itertools.combinations(curves, 2):
        ours, theirs = ({point[0]: i for i, point in enumerate(curves[name])} for name in (a, b))
        gaps = []
        for x in sorted(ours.keys() & theirs.keys()):
            ratio, low, high = unpaired_interval(samples[a][ours[x]], samples[b][theirs[x]])
            if not low <= 1.0 <= high:
                gaps.append((x, math.log(ratio)))
        before = len(found)
        for (x0, g0), (x1, g1) in itertools.pairwise(gaps):
            if g0 * g1 < 0.0:
                at = math.exp(math.log(x0) + g0 / (g0 - g1) * math.log(x1 / x0))
                found.append({"a": a if g0 < 0 else b, "b": b if g0 < 0 else a, "at": at})
        recurrent = [any(name in curve for name in RECURRENT) for curve in (a, b)]
        if len(found) == before and gaps and recurrent[0] != recurrent[1]:
            found.append({"a": a if gaps[0][1] < 0 else b, "b": b if gaps[0][1] < 0 else a, "at": None})
    return found


def sentences(swept: Mapping[str, Any]) -> list[str]:
    """The crossings in words."""
    axis, values, said = swept["axis"], swept["values"], []
    for crossing in swept["crossings"]:
        a, b, at = crossing["a"], crossing["b"], crossing["at"]
        if at is None:
            said.append(
                f"{a} is faster than {b} at every {axis} from {values[0]} to {values[-1]} that tells them apart"
            )
        else:
            said.append(f"{a} is faster than {b} up to {axis} {at:.0f}, and slower above")
    return said
