"""What a run says: the table for the terminal, the JSON document, JUnit XML. The HTML page is in `report`."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from .runner import ABSENT, FAILED, KNOWN, PASSED, Result, four_digits, printable

SCHEMA = 2


def environment(facts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Machine and versions, without anything that names a person or a place."""
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "targets": facts,
    }


def document(
    results: Sequence[Result],
    facts: dict[str, dict[str, Any]],
    level: str,
    suite: str | None = None,
    unusable: dict[str, str] | None = None,
) -> dict[str, Any]:
    """The JSON document of a run: per target its counts and every judged call. facts: what each target says of itself,
    and under "notes" what it should be told.
    suite: the outside suite that was run, None for our own cases. unusable: the targets that could not be judged, and
    why. A call has "errors", where it is off, if it failed or if it used the most of its budget among the calls of its
    case.

    The same run gives the same bytes, `seconds` aside.
    """
    named = {}
    for name in facts:
        mine = [r for r in results if r.target == name]
        worst: dict[str, Result] = {}
        for r in mine:
            if r.status == PASSED and (r.case not in worst or used(r) > used(worst[r.case])):
                worst[r.case] = r
        notes = {"notes": facts[name]["notes"]} if facts[name].get("notes") else {}
        named[name] = {"counts": counts(mine), "cases": [_call(r, worst.get(r.case) is r) for r in mine], **notes}
    return {
        "schema": SCHEMA,
        "level": level,
        "suite": suite,
        "targets": named,
        "unusable": unusable or {},
        "environment": environment({name: of_itself(about) for name, about in facts.items()}),
    }


def of_itself(about: dict[str, Any]) -> dict[str, Any]:
    """What a target says of itself, without what is said of it."""
    return {name: value for name, value in about.items() if name != "notes"}


def used(r: Result) -> float:
    """The share of the budget for comparing calls: what has no number comes behind what has one."""
    return -1.0 if r.share is None else r.share


def _call(r: Result, worst: bool) -> dict[str, Any]:
    return {
        "id": r.case,
        "rules": list(r.rules),
        "function": r.function,
        "dtype": r.dtype,
        "kernel": r.kernel,
        "status": r.status,
        "share": four_digits(r.share),
        "where": r.where,
        "comparisons": r.comparisons,
        "detail": r.detail,
        "seconds": round(r.seconds, 4),
    } | ({"errors": r.errors} if r.errors and (worst or r.status in (FAILED, KNOWN)) else {})


def counts(results: Sequence[Result]) -> dict[str, int]:
    table = dict.fromkeys((PASSED, FAILED, ABSENT, KNOWN), 0)
    for result in results:
        table[result.status] += 1
    return table | {"comparisons": sum(result.comparisons for result in results)}


def write_text(path: str | Path, text: str) -> None:
    """Whole or not at all: a temporary file beside it, renamed."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror or error}") from error


def write_json(path: str | Path, value: Any) -> None:
    """To a file, or to standard output where the path is "-"."""
    text = json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n"
    if str(path) == "-":
        sys.stdout.write(text)
    else:
        write_text(path, text)


def write_junit(path: str | Path, results: Sequence[Result], unusable: dict[str, str] | None = None) -> None:
    """One test case per judged call; what is not offered is skipped; a target that could not be judged is an error."""
    suites = ElementTree.Element("testsuites")
    for target in sorted({r.target for r in results}):
        mine = [r for r in results if r.target == target]
        numbers = counts(mine)
        skipped = numbers[ABSENT] + numbers[KNOWN]
        totals = {"tests": str(len(mine)), "failures": str(numbers[FAILED]), "skipped": str(skipped)}
        suite = ElementTree.SubElement(suites, "testsuite", {"name": target, **totals})
        for r in mine:
            place = {"classname": f"{target}.{r.function}", "name": f"{r.case}[{r.dtype}-{r.kernel}]"}
            node = ElementTree.SubElement(suite, "testcase", {**place, "time": f"{r.seconds:.4f}"})
            if r.status == FAILED:
                ElementTree.SubElement(node, "failure", message=r.detail)
            elif r.status in (ABSENT, KNOWN):
                ElementTree.SubElement(node, "skipped", message=r.detail)
    for target, why in (unusable or {}).items():
        suite = ElementTree.SubElement(suites, "testsuite", {"name": target, "tests": "1", "errors": "1"})
        node = ElementTree.SubElement(suite, "testcase", {"classname": target, "name": "import"})
        ElementTree.SubElement(node, "error", message=printable(why))
    write_text(path, ElementTree.tostring(suites, encoding="unicode"))


GROUPS = (
    ("attention", ("attention", "attention_weights", "attention_with_lse", "merge_attention")),
    ("masks", ("causal_mask", "sliding_window_mask", "padding_mask", "padding_mask_from_tokens", "segment_mask",
               "prefix_mask", "combine_masks", "from_blocked", "mask_to_bias", "positions_from_mask")),
    ("encodings", ("embed", "sinusoidal_encoding", "rotary_frequencies", "rotary_tables", "apply_rotary",
                   "permute_rotary", "alibi_slopes", "alibi_bias", "relative_buckets", "relative_bias")),
    ("layers", ("softmax", "layer_norm", "rms_norm", "gelu", "silu", "relu", "dropout", "cross_entropy")),
    ("random", ("split", "fold_in", "random_bits", "uniform", "normal", "bernoulli")),
    ("models", ("Transformer",)),
    ("training", ("Trainer",)),
    ("signatures", ("signature",)),
    ("differences", ("differences",)),
)  # fmt: skip


def rows(results: Sequence[Result], target: str) -> list[dict[str, Any]]:
    """Per group of functions: the counts, and the worst share of the budget with its case; None where it has none."""
    table = []
    for group, functions in GROUPS:
        mine = [r for r in results if r.target == target and r.function in functions]
        if not mine:
            continue
        judged = [r for r in mine if r.status not in (ABSENT, KNOWN)]
        worst = max(judged, key=lambda r: (r.status == FAILED, used(r)), default=None)
        table.append(
            {
                "group": group,
                **counts(mine),
                "share": worst.share if worst else None,
                "worst": f"{worst.case} ({worst.dtype}, {worst.kernel})" if worst else "",
            }
        )
    return table


def percent(share: float | None) -> str:
    """A share of the budget for the terminal; a dash where there is none."""
    return "–" if share is None else f"{100 * min(share, 1e4):.3g} %"


def print_run(
    results: Sequence[Result],
    facts: dict[str, dict[str, Any]],
    failures: int = 20,
    reasons: dict[str, str] | None = None,
) -> None:
    """A table per target, then the failures, each case with its reason: rules, and the fault it is there for."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 118)
    whole = not sys.stdout.isatty()  # in a file or a pipe a failure is one line, for grep
    for target, about in facts.items():
        table = Table(title=f"{target}: {', '.join(f'{k} {v}' for k, v in of_itself(about).items())}")
        for name in ("", "passed", "failed", "not offered", "compared", "budget used", "worst case"):
            table.add_column(name, justify="left" if name in ("", "worst case") else "right", overflow="fold")
        for row in rows(results, target):
            style = "red" if row[FAILED] else ""
            table.add_row(
                row["group"], str(row[PASSED]), str(row[FAILED]), str(row[ABSENT]), str(row["comparisons"]),
                percent(row["share"]), row["worst"], style=style,
            )  # fmt: skip
        console.print(table)
    wrong = [r for r in results if r.status == FAILED]
    open_reasons = dict(reasons or {})  # of a case that fails in several dtypes once
    for r in wrong[:failures]:
        console.print(
            f"FAILED {r.target} {r.case} ({r.dtype}, {r.kernel}): {r.detail}",
            style="red",
            markup=False,
            highlight=False,
            soft_wrap=whole,
        )
        if reason := open_reasons.pop(r.case, ""):
            console.print(f"       {reason}", style="dim", markup=False, highlight=False, soft_wrap=whole)
    if len(wrong) > failures:
        console.print(f"... and {len(wrong) - failures} more failures; --json FILE has them all")
    total = counts(results)
    text = f"{total[PASSED]} passed, {total[FAILED]} failed, {total[ABSENT]} not offered"
    text += f", {total[KNOWN]} known differences" if total[KNOWN] else ""
    console.print(f"{text}; {total['comparisons']} comparisons", highlight=False)
