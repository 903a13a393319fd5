"""The list of cases in the HTML page: what each asks for, what each target gave, and where it is off."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from ..errormap import SIDE
from ..functions import ATTENTION

# Worst first: what a reader came for.
ORDER = ("failed", "known difference", "passed", "not offered")
# Error maps per case: one for each dtype, the worst first.
MAPS = 3


def case_entries(targets: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry per case and target, with its calls; failures first, then in the order of the run."""
    known = definitions()
    inputs: dict[str, list[dict[str, Any]]] = {}
    entries: list[dict[str, Any]] = []
    for target, found in targets.items():
        grouped: dict[str, list[Mapping[str, Any]]] = {}
        for case in found.get("cases", []):
            grouped.setdefault(case.get("id", "?"), []).append(case)
        for name, calls in grouped.items():
            if name in known and name not in inputs:
                inputs[name] = list(describe(known[name]))
            entry = _entry(target, name, calls, known.get(name))
            entry["features"] = features(known.get(name))
            entry["given"] = inputs.get(name, [])
            entry["diagnosis"] = diagnosis_of(name, found.get("diagnosis") or {})
            entries.append(entry)
    return sorted(entries, key=lambda entry: ORDER.index(entry["status"]))


def anchor(target: str, case: str) -> str:
    """The page's name for a case of a target."""
    return "case-" + re.sub(r"[^A-Za-z0-9_.-]+", "-", f"{target}-{case}")


def _entry(target: str, name: str, calls: Sequence[Mapping[str, Any]], case: Any) -> dict[str, Any]:
    rules = calls[0].get("rules", ())
    statuses = [call.get("status") if call.get("status") in ORDER else "failed" for call in calls]
    # A case has the worst status of its calls, and their largest share.
    status = min(statuses, key=ORDER.index)
    shares = [call.get("share") or 0.0 for call, one in zip(calls, statuses, strict=True) if one == status]
    return {
        "id": name,
        "anchor": anchor(target, name),
        "target": target,
        "function": calls[0].get("function", ""),
        "rules": rules if isinstance(rules, str) else ", ".join(rules),
        "status": status,
        "judged": status in ("passed", "failed") and max(shares) > 0,
        "share": max(shares),
        "why": getattr(case, "why", ""),
        "maps": list(maps_of(calls)),
        "calls": [
            {
                "how": _how(call),
                "status": status,
                "share": call.get("share"),
                "comparisons": call.get("comparisons", 0),
                "detail": call.get("detail") or call.get("where", ""),
            }
            for call, status in zip(calls, statuses, strict=True)
        ],
    }


def _how(call: Mapping[str, Any]) -> str:
    return f"{call.get('dtype', '')}, {call.get('kernel', '')}"


def diagnosis_of(name: str, found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the target's diagnosis says of one case, with the evidence."""
    said = [(one["diagnosis"], one["evidence"]) for one in found.get("guesses", []) if name in one["explained"]]
    if not said and name in found.get("unexplained", []):
        return [("no known fault explains this case", "")]
    return said


def maps_of(calls: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The error maps of a case, failures first, one per dtype."""
    with_map = [call for call in calls if (call.get("errors") or {}).get("panels")]
    with_map.sort(key=lambda call: (call.get("status") != "failed", -(call.get("share") or 0.0)))
    seen: set[str] = set()
    for call in with_map:
        if call.get("dtype", "") in seen or len(seen) == MAPS:
            continue
        seen.add(call.get("dtype", ""))
        errors = call["errors"]
        cells = "".join(row for panel in errors["panels"] for row in panel["rows"])
        over = sum(character in "abcdefx" for character in cells)
        down, across = errors["pool"]
        yield {
            "name": errors["name"],
            "shape": _shape(errors["shape"]),
            "how": _how(call),
            "said": f"{over} of {len(cells)} squares over the budget" if over else "all within the budget",
            "pooled": f"Each square is the worst of {down}×{across} elements." if down * across > 1 else "",
            "panels": [{**panel, "pool": errors["pool"]} for panel in errors["panels"]],
        }


@cache
def definitions() -> dict[str, Any]:
    """The cases that this version knows, by id."""
    from ..workers import selected

    return {case.id: case for case in selected("exhaustive", None)}


def features(case: Any) -> list[str]:
    """What an attention case uses; none for the other functions."""
    from ..peers import features_of

    return features_of(case) if getattr(case, "function", "") in ATTENTION and hasattr(case, "inputs") else []


def describe(case: Any) -> Iterator[dict[str, Any]]:
    """Name and description of each input and argument of a case, with a picture of each boolean matrix."""
    from ..inputs import build

    for field in ("inputs", "batch", "call", "stream"):
        for name, spec in (getattr(case, field, None) or {}).items():
            made = build(case.id, name, spec) if isinstance(spec, dict) and "tree" not in spec else None
            array = made if isinstance(made, np.ndarray) else None
            yield {"name": name, "text": _text(spec) + ("" if array is None else _contents(array)), **_picture(array)}
    for field in ("config", "train", "loss", "arguments"):
        for name, value in (getattr(case, field, None) or {}).items():
            yield {"name": name, "text": _text(value), "rows": []}


def _contents(x: np.ndarray) -> str:
    """The range of an array, and how much of it is special."""
    if not x.size or x.dtype == bool:
        return "" if not x.size else f"; {int(x.sum())} of {x.size} True"
    wide = np.asarray(x, dtype=np.float64)
    finite = wide[np.isfinite(wide)]
    said = f"; {finite.min():.3g} to {finite.max():.3g}" if finite.size else ""
    for name, number in (("NaN", np.isnan(wide).sum()), ("infinite", np.isinf(wide).sum())):
        said += f", {int(number)} {name}" if number else ""
    return said


def _picture(x: np.ndarray | None) -> dict[str, Any]:
    """The first matrix of a boolean array that fits."""
    if x is None or x.dtype != bool or x.ndim < 2 or not x.size or max(x.shape[-2:]) > 2 * SIDE:
        return {"rows": []}
    first = x.reshape(-1, *x.shape[-2:])[0]
    return {
        "rows": ["".join("#" if seen else "." for seen in row) for row in first],
        "at": [0] * (x.ndim - 2),
        "pool": [1, 1],
    }


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "a number"


def _text(value: Any) -> str:
    if not isinstance(value, dict):
        return "none" if value is None else str(value)
    if "shape" in value:
        rest = ", ".join(f"{k} {v}" for k, v in value.items() if k != "shape")
        return f"{_shape(value['shape'])}{', ' + rest if rest else ''}"
    text = str(value.get("values", value))
    text += f" as {_shape(value['reshape'])}" if "reshape" in value else ""
    return text if len(text) <= 300 else text[:300] + " …"
