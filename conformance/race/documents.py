"""Results in files: read with care, and compared with each other."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core_numpy.contract.json_file import read_object

from .figures import unpaired_interval
from .racing import SCHEMA
from .table import TEXT_WIDTH


def read(path: str) -> dict[str, Any]:
    """A document that `run` gave, from a file; ValueError says what is wrong with one that is none."""
    try:
        document = read_object(Path(path))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    if not {"schema", "environment", "races"} <= document.keys():
        raise ValueError(f"{path} is no result of a race: it lacks schema, environment or races")
    if document["schema"] != SCHEMA:
        raise ValueError(
            f"{path} was written by another version of the race (schema {document['schema']!r}; this one reads "
            f"{SCHEMA}); run that race again"
        )
    for race in document["races"]:
        if not isinstance(race, dict) or not {"task", "contestants", "verdict"} <= race.keys():
            raise ValueError(f"{path} is damaged: a race without task, contestants or verdict")
        for name, row in race["contestants"].items():
            rounds = row.get("rounds") if isinstance(row, dict) else None
            if not isinstance(rounds, list) or not all(isinstance(x, int | float) and x > 0 for x in rounds):
                raise ValueError(f"{path} is damaged: the rounds of {name} are not positive numbers")
    return document


def finite(value: Any) -> Any:
    """The same with None for every number that JSON has no way to write: the loss of a contestant that diverged."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def compare(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """{"schema", "changed": {field: [in first, in second]}, "rows": [...], "only": [...]} of two documents.

    A row: race, contestant, seconds before and after, their ratio with a 95 % interval (the rounds of two runs are no
    pairs), and the ratio that is left when both are divided by their machine's matrix product.
    """
    old, new = _entries(first), _entries(second)
    places = [document["environment"] for document in (first, second)]
    products = places[1].get("matmul_gflops", 0.0) / (places[0].get("matmul_gflops") or float("nan"))
    rows = []
    for key in [key for key in old if key in new]:
        before, after = old[key], new[key]
        ratio, low, high = unpaired_interval(after, before)
        rows.append({
            "race": key[0], "contestant": key[1], "before": before, "after": after, "ratio": ratio, "low": low,
            "high": high, "against_machine": ratio * products,
        })  # fmt: skip
    only = [f"{race}: {name} only in the {side}" for entries, other, side in ((old, new, "first"), (new, old, "second"))
            for race, name in entries if (race, name) not in other]  # fmt: skip
    return {"schema": SCHEMA, "changed": _changed(*map(_flat, places)), "rows": rows, "only": only}


def _entries(document: Mapping[str, Any]) -> dict[tuple[str, str], list[float]]:
    return {
        (_race_name(race), name): row["rounds"]
        for race in document["races"]
        for name, row in race["contestants"].items()
        if row["status"] == "raced" and row["rounds"]
    }


def _race_name(race: Mapping[str, Any]) -> str:
    """What tells a race from the others of its document: the task, a sweep's value, the kind of scaling."""
    at = f" at {race['at']}" if "at" in race else ""
    return race["task"]["title"] + at + (f" {race['kind']}" if "kind" in race else "")


def _flat(place: Mapping[str, Any]) -> dict[str, Any]:
    """What may explain a difference: not the load, nor the products' own noise."""
    names = ("platform", "processor", "cores", "threads", "python", "device", "precision")
    versions = {f"version of {name}": version for name, version in place.get("versions", {}).items()}
    return {name: place.get(name) for name in names} | versions


def _changed(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {name: [a.get(name), b.get(name)] for name in {**a, **b} if a.get(name) != b.get(name)}


def show_comparison(found: Mapping[str, Any]) -> None:
    """On standard output: what differs around the runs, then the table."""
    import statistics

    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else TEXT_WIDTH, highlight=False)
    for name, (a, b) in found["changed"].items():
        console.print(f"{name}: {a} -> {b}", markup=False)
    table = Table(box=SIMPLE, show_edge=False)
    for heading in ("race", "contestant", "ms before", "ms after", "ratio", "95 % interval", "per product", ""):
        table.add_column(heading, justify="left" if heading in ("race", "contestant", "") else "right")
    for row in found["rows"]:
        told = "faster" if row["high"] < 1.0 else "slower" if row["low"] > 1.0 else "within the noise"
        before, after = (f"{statistics.median(row[side]) * 1e3:.2f}" for side in ("before", "after"))
        table.add_row(
            row["race"], row["contestant"], before, after, f"{row['ratio']:.3f}", f"{row['low']:.3f}-{row['high']:.3f}",
            f"{row['against_machine']:.3f}", told,
        )  # fmt: skip
    if table.row_count:
        console.print(table)
    else:
        console.print("no contestant has rounds in both: nothing to compare")
    for line in found["only"]:
        console.print(line, markup=False)
