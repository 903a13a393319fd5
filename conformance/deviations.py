"""Known differences of peers: rows of differences/<target>.toml, strict both ways.

A row says which calls differ (`cases`, with * and ?; optionally `dtypes` and `kernels`), the `rule` that they break,
the `reason`, a `link` to where the difference is published or reported, what the failure says (`says`, a part of its
detail), and, where it is one of rounding, in which arithmetic (`rounding`, of `targets.peers.roundings`): it explains
what is as far off as that arithmetic on the same inputs. A failure that a row explains is a known
difference; a row that explains nothing fails the run, as does a failure that no row explains.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from importlib import resources
from typing import Any

from .runner import ABSENT, FAILED, KNOWN, Result
from .targets.peers import PEERS, roundings


@dataclass(frozen=True)
class Deviation:
    """One row."""

    cases: tuple[str, ...]
    rule: str
    reason: str
    link: str
    says: str = ""
    dtypes: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    rounding: str = ""

    def covers(self, result: Result) -> bool:
        """Whether the row speaks of this call."""
        return (
            any(fnmatchcase(result.case, pattern) for pattern in self.cases)
            and (not self.dtypes or result.dtype in self.dtypes)
            and (not self.kernels or result.kernel in self.kernels)
        )

    def explains(self, result: Result) -> bool:
        if result.status != FAILED or not self.covers(result) or self.says not in result.detail:
            return False
        if not self.rounding:
            return True
        # Only results: a gradient that is off is not explained by how scores are stored.
        measured = result.share is not None and result.where.startswith("out")
        return measured and roundings.explains(self.rounding, result.case, result.dtype, result.share or 0.0)


def load_deviations(target: str) -> tuple[Deviation, ...]:
    """The rows of a target; none where it has no file."""
    file = resources.files(__package__) / "differences" / f"{target}.toml"
    if target not in PEERS or not file.is_file():
        return ()
    rows = []
    for row in tomllib.loads(file.read_text(encoding="utf-8")).get("difference", []):
        known = set(Deviation.__dataclass_fields__)
        wrong = sorted(set(row) - known) + sorted({"cases", "rule", "reason", "link"} - set(row))
        if wrong:
            raise ValueError(f"differences/{target}.toml: row {row.get('reason', '?')!r} is wrong in {wrong}")
        values: dict[str, Any] = {n: tuple(x) if isinstance(x, list) else x for n, x in row.items()}
        rows.append(Deviation(**values))
    return tuple(rows)


def apply(target: str, results: Sequence[Result], *, whole: bool) -> list[Result]:
    """The results with what is known marked as such. whole: all cases were run, so that each row explains something."""
    rows = load_deviations(target)
    used: set[Deviation] = set()
    marked = []
    for result in results:
        row = next((row for row in rows if row.explains(result)), None)
        if row is not None:
            used.add(row)
            result = replace(result, status=KNOWN, detail=f"{row.reason} ({result.detail})"[:400])
        marked.append(result)
    for row in rows if whole else ():
        if row in used:
            continue
        judged = [result for result in results if row.covers(result) and result.status != ABSENT]
        said = "did not occur" if judged else "was not met: no such call was judged"
        marked.append(_stale(target, row, f"the listed difference {row.reason!r} {said}"))
    return marked


def _stale(target: str, row: Deviation, detail: str) -> Result:
    return Result(
        case=row.cases[0], rules=(row.rule,), function="differences", target=target, dtype="any", kernel="any",
        status=FAILED, share=None, where="", comparisons=0, detail=detail, seconds=0.0,
    )  # fmt: skip
