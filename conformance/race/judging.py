"""From rows to places: whose losses agree, how long each took, and what may be concluded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .figures import loss_distance, quartiles, ratio_interval, spread, verdict
from .lane import AGREEMENT_UPDATES
from .task import Task

Row = dict[str, Any]
# Greedy decoding turns on the largest of 256 logits; where two are equal to rounding, the rest of that row differs.
# A wrong cache, position or mask changes nearly all of them.
LEAST_SHARE_DECODED = 0.9


def judge(rows: dict[str, Row], tolerances: Mapping[str, float], expected: Mapping[str, Any] | None = None) -> None:
    """Write each one's distance from the reference's losses; who is too far away is disqualified.

    The reference is `expected`, where it was computed apart; else "numpy" where it runs, else the first that does.
    """
    running = [name for name, row in rows.items() if row["status"] == "raced" and row["losses"]]
    if not running:
        return
    reference = "numpy" if expected is not None or "numpy" in running else running[0]
    truth = expected if expected is not None else rows[reference]
    for name in running:
        row = rows[name]
        row["loss_reference"] = reference
        distance = loss_distance(row["losses"][:AGREEMENT_UPDATES], truth["losses"][:AGREEMENT_UPDATES])
        row["loss_distance"] = distance
        row["loss_distance_all"] = loss_distance(row["losses"], truth["losses"])
        if not distance <= tolerances[name]:
            row["status"] = "disqualified"
            row["reason"] = (
                f"its losses differ from {reference}'s by {distance:.1e} (relative) in the first {AGREEMENT_UPDATES} "
                f"updates; allowed are {tolerances[name]:.0e}"
            )
        elif row.get("decoded") is not None and truth.get("decoded") is not None:
            _judge_decoded(row, truth["decoded"], reference)


def _judge_decoded(row: Row, truth: Sequence[Sequence[int]], reference: str) -> None:
    pairs = [
        (a, b) for ours, theirs in zip(row["decoded"], truth, strict=True) for a, b in zip(ours, theirs, strict=True)
    ]
    row["decoded_share"] = sum(a == b for a, b in pairs) / len(pairs)
    if row["decoded_share"] < LEAST_SHARE_DECODED:
        row["status"] = "disqualified"
        row["reason"] = f"only {row['decoded_share']:.0%} of the tokens that it decoded are {reference}'s"


def conclude(rows: dict[str, Row], task: Task, peak: float) -> dict[str, Any]:
    """Fill in the figures of everybody with rounds; gives {"verdict", "notes"} over those who count."""
    times = {name: row["rounds"] for name, row in rows.items() if row["status"] == "raced" and row["rounds"]}
    shared = min((len(seconds) for seconds in times.values()), default=0)
    # Rounds are compared in pairs; an interrupted or failed one leaves some with a round more.
    times = {name: seconds[:shared] for name, seconds in times.items()}
    fastest = min(times, key=lambda name: quartiles(times[name])[1]) if times else None
    for name, seconds in times.items():
        row = rows[name]
        low, middle, high = quartiles(seconds)
        row |= {"q1": low, "median": middle, "q3": high, "tokens_per_second": task.tokens / middle}
        row |= {"gflops": task.flops / middle / 1e9, "share_of_peak": task.flops / middle / peak if peak else None}
        row["compile_seconds"] = max(row["first_step_seconds"] - middle, 0.0)
        if row.get("memory_before") is not None and row.get("memory_peak") is not None:
            row["memory_growth"] = row["memory_peak"] - row["memory_before"]
        ratio, below, above = ratio_interval(seconds, times[fastest or name])
        row |= {"ratio": ratio, "ratio_low": below, "ratio_high": above}
    notes = [*_against_peers(rows, times), *_noise(times)]
    return {"verdict": verdict(times), "notes": notes}


def _against_peers(rows: dict[str, Row], times: Mapping[str, Sequence[float]]) -> list[str]:
    """Each of ours against the best peer of its class (framework, eager or compiled)."""
    sentences = []
    for name in times:
        row = rows[name]
        rivals = [
            other for other in times if rows[other].get("group") == row.get("group") and not rows[other].get("ours")
        ]
        if not row.get("ours") or not rivals:
            continue
        best = min(rivals, key=lambda other: quartiles(times[other])[1])
        ratio, low, high = ratio_interval(times[name], times[best])
        row["best_peer"] = {"name": best, "ratio": ratio, "low": low, "high": high}
        known = "" if high < 1.0 or low > 1.0 else "; the difference lies within the noise"
        sentences.append(
            f"{name} takes {ratio:.3f} of the time of {best}, the best peer in {row['group']} "
            f"(95 % interval {low:.3f} to {high:.3f}){known}"
        )
    return sentences


def _noise(times: Mapping[str, Sequence[float]]) -> list[str]:
    """A warning where the machine's own unrest is larger than the difference that decides."""
    if len(times) < 2:
        return []
    order = sorted(times, key=lambda name: quartiles(times[name])[1])
    first, second = order[:2]
    unrest = max(spread(times[first]), spread(times[second]))
    difference = quartiles(times[second])[1] / quartiles(times[first])[1] - 1.0
    if unrest <= difference:
        return []
    return [
        f"noise: half of the rounds of {first} or {second} lie more than {unrest / 2:.0%} apart from their median, and "
        f"{difference:.1%} separate the two; more rounds or a quieter machine would tell"
    ]
