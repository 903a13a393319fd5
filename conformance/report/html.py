"""One self-contained page from the documents of `run`, of training runs and of `race`. Any of them may be missing."""

from __future__ import annotations

import base64
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..peers import FEATURES
from ..race import scaling
from ..race.charts import race_charts, scaling_charts, sweep_charts
from ..race.sweep import sentences
from ..race.table import HEADINGS, race_line, table_rows, threads_of
from .cases import anchor, case_entries, definitions, features

FAILED, ABSENT, KNOWN = "failed", "not offered", "known difference"
# A page is read by people; the JSON document holds everything.
MOST_FAILURES = 200
# The failures that stand open above the tables; the others are folded.
OPEN_FAILURES = 10
CLOSEST = 10
FIRST_UPDATES = 20

Document = Mapping[str, Any]


def write_report(
    path: str | os.PathLike[str],
    *,
    conformance: Document | None = None,
    training: Document | None = None,
    race: Document | None = None,
    race_png: bytes | None = None,
    lab: Document | None = None,
    notes: Sequence[str] = (),
    title: str = "Attention conformance",
) -> None:
    """Write the page, whole or not at all.

    conformance: the JSON document of `conformance run`. training: {"curves": {name: [[step, loss], ...]}, "validation":
    {name: bits per byte}, "sentences": [...], "png": bytes}. race: the document of `race.run`. lab: the document of
    `conformance lab --json`, with "pictures": {name: bytes}, "link": where its own page is, and "rest": the
    command for the other experiments, if there are such.
    """
    from ..summary import write_text

    page = render(
        conformance=conformance, training=training, race=race, race_png=race_png, lab=lab, notes=notes, title=title
    )  # fmt: skip
    write_text(Path(path), page)


def render(
    *,
    conformance: Document | None = None,
    training: Document | None = None,
    race: Document | None = None,
    race_png: bytes | None = None,
    lab: Document | None = None,
    notes: Sequence[str] = (),
    title: str = "Attention conformance",
) -> str:
    """The page as text. What comes from outside is escaped."""
    try:
        import jinja2
        from markupsafe import Markup
    except ImportError as error:
        raise ImportError(f"the HTML page needs the package jinja2: pip install jinja2 ({error})") from error
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    parts = {
        kind: (Path(__file__).parent / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js")
    }
    template = environment.from_string(parts["html"])
    page: str = template.render(
        title=title,
        style=Markup(parts["css"]),
        script=Markup(parts["js"]),
        notes=list(notes),
        conformance=None if conformance is None else conformance_section(conformance),
        training=None if training is None else training_section(training),
        race=None if race is None else race_section(race, race_png),
        lab=None if lab is None else lab_section(lab),
        environment=environment_section(conformance, race),
        count=count_cell,
        mark=mark,
        percent=percent,
    )
    return page


def percent(share: float | None) -> str:
    """A share of the budget; a dash where there is none (a wrong shape, an error, a value that must be exact)."""
    if share is None:
        return "–"
    return f"{100 * share:.3g} %" if math.isfinite(share) else "beyond measure"


def mark(status: str) -> str:
    """The class that colours a status."""
    return {"passed": "good", FAILED: "bad", KNOWN: "known", ABSENT: "absent"}.get(status, "bad")


def count_cell(cell: Mapping[str, Any] | None, target: str, function: str, feature: str = "") -> Any:
    """One table cell of counts, a link to the cases behind it."""
    from markupsafe import Markup

    if cell is None:
        return Markup('<td class="quiet">–</td>')
    parts = []
    if cell["passed"] or cell[FAILED]:
        parts.append(Markup('<span class="good">{} passed</span>').format(cell["passed"]))
    if cell[FAILED]:
        parts.append(Markup('<span class="bad">{} failed</span>').format(cell[FAILED]))
    if cell[KNOWN]:
        parts.append(Markup('<span class="known">{} known</span>').format(cell[KNOWN]))
    if cell[ABSENT]:
        parts.append(Markup('<span class="absent">{} not offered</span>').format(cell[ABSENT]))
    if cell["share"] > 0:
        parts.append(Markup('<span class="quiet">{}</span>').format(percent(cell["share"])))
    link = Markup('<td><a href="#cases" data-target="{}" data-function="{}" data-feature="{}">{}</a></td>')
    return link.format(target, function, feature, Markup(" ").join(parts))


def conformance_section(document: Document) -> dict[str, Any]:
    """Failures; rows by function (those that nobody offers apart) and by feature of attention, columns by target; the
    closest calls of each target."""
    targets = document.get("targets", {})
    cases = {name: list(found.get("cases", [])) for name, found in targets.items()}
    functions = list(dict.fromkeys(case.get("function", "") for found in cases.values() for case in found))
    rows: list[dict[str, Any]] = [
        {
            "function": function,
            "cells": [
                _counts([case for case in found if case.get("function", "") == function]) for found in cases.values()
            ],
        }
        for function in functions
    ]
    for row in rows:
        row["offered"] = any(cell and any(cell[kind] for kind in ("passed", FAILED, KNOWN)) for cell in row["cells"])
    known = definitions()
    of = {name: features(known.get(name)) for name in {c.get("id", "?") for found in cases.values() for c in found}}

    def using(feature: str) -> list[Any]:
        return [_counts([case for case in found if feature in of[case.get("id", "?")]]) for found in cases.values()]

    by_feature = [
        {"feature": feature, "cells": using(feature)}
        for feature in dict.fromkeys(("plain", *FEATURES))
        if any(feature in names for names in of.values())
    ]
    failures = [_case(name, case) for name, found in cases.items() for case in found if case.get("status") == FAILED]
    closest = []
    for name, found in cases.items():
        judged = [case for case in found if case.get("status") == "passed" and case.get("share")]
        judged.sort(key=lambda case: -case["share"])
        if judged:
            closest.append((name, [_case(name, case) for case in judged[:CLOSEST]]))
    return {
        "targets": list(targets),
        "notes": [(name, "; ".join(found["notes"])) for name, found in targets.items() if found.get("notes")],
        "totals": [_counts(found) for found in cases.values()],
        "rows": rows,
        "idle": sum(not row["offered"] for row in rows),
        "features": by_feature,
        "failures": failures[:MOST_FAILURES],
        "open": OPEN_FAILURES,
        "more_failures": max(len(failures) - MOST_FAILURES, 0),
        "closest": closest,
        "cases": case_entries(targets),
        "diagnoses": [
            (name, {"note": "", "guesses": [], "unexplained": []} | found["diagnosis"])
            for name, found in targets.items()
            if found.get("diagnosis")
        ],
    }


def _counts(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    if not cases:
        return None
    found: dict[str, Any] = {"passed": 0, FAILED: 0, KNOWN: 0, ABSENT: 0}
    for case in cases:
        # A status that this page does not know must not look like a pass.
        status = case.get("status")
        found[status if status in found else FAILED] += 1
    shares = [
        case["share"] for case in cases if case.get("share") is not None and case.get("status") not in (ABSENT, KNOWN)
    ]
    return found | {"share": max(shares, default=0.0)}


def _case(target: str, case: Mapping[str, Any]) -> dict[str, Any]:
    rules = case.get("rules", case.get("rule", ""))
    return {
        "id": case.get("id", "?"),
        "anchor": anchor(target, case.get("id", "?")),
        "target": target,
        "rules": rules if isinstance(rules, str) else ", ".join(rules),
        "how": ", ".join(str(case[key]) for key in ("dtype", "kernel") if case.get(key)),
        "detail": case.get("detail", ""),
        "share": case.get("share") or 0.0,
    }


def training_section(training: Document) -> dict[str, Any]:
    """The curves' picture, what they end with, and the first updates side by side."""
    curves = {name: dict(map(tuple, points)) for name, points in training.get("curves", {}).items()}
    steps = sorted({step for curve in curves.values() for step in curve})[:FIRST_UPDATES]
    table = [
        (step, [f"{curve[step]:.4f}" if step in curve else "" for curve in curves.values()]) for step in steps
    ]  # fmt: skip
    sentences = list(training.get("sentences", []))
    sentences += [
        f"{name}: {bits:.4f} bits per byte on held-out text." for name, bits in training.get("validation", {}).items()
    ]
    if table:
        sentences.append(f"Losses of the first {len(table)} updates, in nats:")
    return {"names": list(curves), "rows": table, "sentences": sentences, "png": data_uri(training.get("png"))}


def race_section(document: Document, png: bytes | None) -> dict[str, Any]:
    """Each race's table with a bar for the ratio and its charts; a sweep's curves and what they say."""
    from markupsafe import Markup

    swept = document.get("sweep")
    axis, races = swept and swept["axis"], []
    for one in document.get("races", []):
        rows = table_rows(one)
        slowest = max((row["ratio"] for row in one["contestants"].values() if "ratio" in row), default=1.0)
        cells = []
        for row in rows:
            ratio = one["contestants"][row[0]].get("ratio", 0.0)
            cells.append({"cells": row, "width": f"{12 * ratio / slowest:.2f}"})
        title = race_line(one, axis)
        charts = [(caption, Markup(svg)) for caption, svg in race_charts(one, document.get("environment", {}))]
        races.append({"title": title, "verdict": one["verdict"], "notes": one.get("notes", ()), "rows": cells,
                      "charts": charts})  # fmt: skip
    place = document.get("environment", {})
    said = f"{place['processor']}, {threads_of(place)}." if "processor" in place and "threads" in place else ""
    scaled = document.get("scaling")
    drawn = (sweep_charts(swept) if swept else []) + (scaling_charts(scaled) if scaled else [])
    curves = [(caption, Markup(svg)) for caption, svg in drawn]
    words = (sentences(swept) if swept else []) + (scaling.sentences(scaled) if scaled else [])
    found = {"races": races, "headings": HEADINGS, "png": data_uri(png), "place": said}
    return found | {"curves": curves, "sentences": words}


def lab_section(document: Document) -> dict[str, Any]:
    """Each experiment's claims with what was measured, and its picture."""
    pictures = document.get("pictures", {})
    experiments = [
        {"name": name, "claim": one["claim"], "claims": one["claims"], "png": data_uri(pictures.get(name))}
        for name, one in document.get("experiments", {}).items()
    ]
    said = {name: document.get(name, "") for name in ("link", "rest")}
    return {"backend": document.get("backend", "?"), "experiments": experiments, **said}


def environment_section(conformance: Document | None, race: Document | None) -> list[tuple[str, str]]:
    """Names and values, nested ones written as paths."""
    found: dict[str, str] = {}
    for document in (conformance, race):
        if document is not None:
            _flatten(document.get("environment", {}), "", found)
    return list(found.items())


def _flatten(value: Any, name: str, into: dict[str, str]) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _flatten(inner, f"{name} {key}".strip(), into)
    else:
        into[name] = f"{value:.4g}" if isinstance(value, float) else str(value)


def data_uri(png: bytes | None) -> str | None:
    """A picture inside the page."""
    return None if png is None else "data:image/png;base64," + base64.b64encode(png).decode()
