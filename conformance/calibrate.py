"""`conformance calibrate`: what share of the budget right implementations use, over random sizes, scales and dtypes.

The constants of `budget` are right where the worst share stays under a third and the weakest planted fault is ten
times over: this draws the first half of that statement, `conformance zoo` the second.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .rows import ALL, Case
from .runner import FAILED, PASSED, Result, judge
from .targets import load

LIMIT = 1.0 / 3.0


def random_cases(number: int, seed: int) -> Iterator[Case]:
    """Attention cases of random shape, scale and restrictions; lengths around the edges of blocks among them."""
    draw = np.random.Generator(np.random.Philox(seed))
    lengths = [1, 2, 7, 31, 63, 64, 65, 127, 128, 129, 200]
    for i in range(number):
        G = int(draw.choice([1, 2]))
        H, D, Dv = G * int(draw.choice([1, 2, 3])), int(draw.choice([4, 16, 64])), int(draw.choice([4, 16, 64]))
        T, S = int(draw.choice(lengths)), int(draw.choice(lengths))
        scale = float(10.0 ** draw.uniform(-2, 1))
        arguments: dict[str, Any] = {}
        inputs: dict[str, Any] = {
            "q": {"shape": [2, H, T, D], "scale": scale},
            "k": {"shape": [2, G, S, D], "distribution": str(draw.choice(["normal", "dominant", "wide"]))},
            "v": {"shape": [2, G, S, Dv], "distribution": str(draw.choice(["normal", "positive", "wide"]))},
        }
        if draw.random() < 0.5:
            arguments |= {"causal": True, "q_offset": max(S - T, 0)}
        if draw.random() < 0.3:
            inputs["bias"] = {"shape": [1, H, T, S]}
        if draw.random() < 0.3:
            arguments["softcap"] = float(draw.uniform(1, 20))
        if draw.random() < 0.3:
            inputs["sinks"] = {"shape": [H]}
        gradients = tuple(name for name in ("q", "k", "v", "bias", "sinks") if name in inputs)
        yield Case(f"random-{seed}-{i}", ("attention-7",), "calibration", "attention_with_lse", inputs, arguments,
                   gradients=gradients, kernels=True)  # fmt: skip


def measure(names: Sequence[str], number: int, seed: int) -> list[Result]:
    """Every random case on every kernel of every target, in every dtype."""
    results = []
    for name in names:
        target = load(name)
        for case in random_cases(number, seed):
            for dtype in ALL:
                for kernel in target.kernels()[1:] or ["auto"]:
                    results.append(judge(case, target, dtype, kernel))
    return [result for result in results if result.status in (PASSED, FAILED)]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="conformance calibrate",
        description="The share of the error budget that right implementations use, over random attention cases.",
        epilog="example: conformance calibrate backend_torch --cases 50 --png shares.png",
    )
    parser.add_argument("targets", nargs="*", default=["core_numpy", "backend_torch"])
    parser.add_argument("--cases", type=int, default=40, metavar="N", help="random cases (default 40)")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--png", metavar="FILE", help="draw the shares")
    parser.add_argument("--json", metavar="FILE", help="write the shares as JSON; - for standard output")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    options = parser.parse_args(argv)
    results = measure(options.targets, options.cases, options.seed)
    if not results:
        raise ValueError("no case could be judged: the targets offer no attention_with_lse")
    table = summarise(results)
    if options.json:
        from .summary import write_json

        write_json(options.json, {"schema": 1, "cases": options.cases, "seed": options.seed, "shares": table})
    if options.json != "-":
        _print(table)
    if options.png:
        _plot(results, options.png)
    return int(any(row["worst"] > LIMIT for row in table))


def summarise(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Per target, kernel and dtype: how many calls, the median and the worst share, and where that was."""
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.target, result.kernel, result.dtype), []).append(result)
    return [
        {
            "target": target,
            "kernel": kernel,
            "dtype": dtype,
            "calls": len(group),
            "median": float(f"{np.median([r.share for r in group]):.3g}"),
            "worst": float(f"{max(r.share for r in group):.3g}"),
            "where": max(group, key=lambda r: r.share).where,
        }
        for (target, kernel, dtype), group in groups.items()
    ]


def _print(table: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = Table(title="share of the error budget used by right implementations")
    for name in table[0]:
        shown.add_column(name, justify="right" if name in ("calls", "median", "worst") else "left")
    for row in table:
        shown.add_row(*(str(value) for value in row.values()), style="red" if row["worst"] > LIMIT else "")
    Console().print(shown)


def _plot(results: Sequence[Result], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    labels = sorted({(r.target, r.kernel, r.dtype) for r in results})
    for x, label in enumerate(labels):
        shares = [max(r.share, 1e-6) for r in results if (r.target, r.kernel, r.dtype) == label]
        axes.plot([x] * len(shares), shares, ".", alpha=0.5)
    axes.axhline(1.0, color="firebrick", label="the budget")
    axes.axhline(LIMIT, color="darkorange", linestyle="--", label="a third")
    axes.set_yscale("log")
    axes.set_xticks(range(len(labels)), [" ".join(label) for label in labels], rotation=60, ha="right", fontsize=7)
    axes.set_ylabel("share of the error budget")
    axes.legend()
    figure.savefig(path, dpi=150)
