"""The list of cases in the HTML page: what each asks for, and what each target gave, to be filtered and opened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Worst first: what a reader came for.
ORDER = ("failed", "known difference", "passed", "not offered")


def case_entries(targets: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry per case and target, with its calls; failures first, then in the order of the run."""
    known = definitions()
    entries: list[dict[str, Any]] = []
    for target, found in targets.items():
        grouped: dict[str, list[Mapping[str, Any]]] = {}
        for case in found.get("cases", []):
            grouped.setdefault(case.get("id", "?"), []).append(case)
        entries += [_entry(target, name, calls, known.get(name)) for name, calls in grouped.items()]
    return sorted(entries, key=lambda entry: ORDER.index(entry["status"]))


def _entry(target: str, name: str, calls: Sequence[Mapping[str, Any]], case: Any) -> dict[str, Any]:
    rules = calls[0].get("rules", ())
    statuses = [call.get("status") if call.get("status") in ORDER else "failed" for call in calls]
    return {
        "id": name,
        "target": target,
        "function": calls[0].get("function", ""),
        "rules": rules if isinstance(rules, str) else ", ".join(rules),
        # A case has the worst status of its calls.
        "status": min(statuses, key=ORDER.index),
        "share": max((call.get("share") or 0.0 for call in calls if call.get("status") == "passed"), default=0.0),
        "why": getattr(case, "why", ""),
        "given": describe(case) if case is not None else [],
        "calls": [
            {
                "how": f"{call.get('dtype', '')}, {call.get('kernel', '')}",
                "status": status,
                "share": call.get("share") or 0.0,
                "comparisons": call.get("comparisons", 0),
                "detail": call.get("detail") or call.get("where", ""),
            }
            for call, status in zip(calls, statuses, strict=True)
        ],
    }


def definitions() -> dict[str, Any]:
    """The cases that this version knows, by id."""
    from ..workers import selected

    return {case.id: case for case in selected("exhaustive", None)}


def describe(case: Any) -> list[tuple[str, str]]:
    """Name and description of each input and argument of a case."""
    named: dict[str, Any] = {}
    for field in ("inputs", "batch", "call", "config", "train", "loss", "arguments"):
        values = getattr(case, field, None)
        named |= {name: _text(value) for name, value in (values or {}).items()}
    return list(named.items())


def _text(value: Any) -> str:
    if not isinstance(value, dict):
        return "none" if value is None else str(value)
    if "shape" in value:
        shape = "×".join(map(str, value["shape"]))
        rest = ", ".join(f"{k} {v}" for k, v in value.items() if k != "shape")
        return f"{shape or 'a number'}{', ' + rest if rest else ''}"
    text = str(value.get("values", value))
    text += f" as {'×'.join(map(str, value['reshape']))}" if "reshape" in value else ""
    return text if len(text) <= 300 else text[:300] + " …"
