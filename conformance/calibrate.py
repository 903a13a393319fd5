"""`conformance calibrate`: what share of the budget right implementations use, over random sizes, scales and dtypes.

The constants of `budget` are right where the worst share of a right implementation stays under a third and the weakest
planted fault takes ten times its budget: both are measured here, and a gap that closes is exit status 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from core_numpy.contract.arguments import Parser

from .memory import remembering
from .rows import ALL, Case
from .runner import FAILED, PASSED, Result, judge
from .targets import load
from .targets.protocol import Target

LIMIT = 1.0 / 3.0
GAP = 10.0
# The planted faults that took least of their budget when all were measured (docs/tolerance.md); --short tries these.
WEAKEST = ("sum-half", "layer-norm-one-pass", "weights-stored", "rotary-half-table", "scores-query-half")
# Cases of --short, of attention and of layers each.
FEW = 5


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
        # Every second case without what fast kernels do not serve, so that these are measured too.
        lean = i % 2 == 1
        if draw.random() < 0.3 and not lean:
            arguments["softcap"] = float(draw.uniform(1, 20))
        if draw.random() < 0.3 and not lean:
            inputs["sinks"] = {"shape": [H]}
        gradients = tuple(name for name in ("q", "k", "v", "bias", "sinks") if name in inputs)
        yield Case(f"random-{seed}-{i}", ("attention-7",), "calibration",
                   "attention" if lean else "attention_with_lse", inputs, arguments,
                   gradients=gradients, kernels=True)  # fmt: skip


def random_layers(number: int, seed: int) -> Iterator[Case]:
    """Cases of the layers and of the rotation, of random length and scale, one function after the other."""
    draw = np.random.Generator(np.random.Philox(key=[seed, 1]))
    for i in range(number):
        rows, width = int(draw.integers(1, 9)), int(draw.choice([2, 3, 16, 63, 64, 65, 257, 1024]))
        x = {"shape": [rows, width], "scale": float(10.0 ** draw.uniform(-2, 1)),
             "distribution": str(draw.choice(["normal", "wide", "shifted"]))}  # fmt: skip
        function, arguments = _LAYERS[i % len(_LAYERS)]
        inputs: dict[str, Any] = {"x": x}
        if function == "cross_entropy":
            inputs = {"logits": x, "targets": {"shape": [rows], "high": width}}
        elif function == "apply_rotary":
            table = {"shape": [rows, max(width // 2, 1)], "distribution": "unit"}
            inputs = {"x": {**x, "shape": [2, rows, 2 * max(width // 2, 1)]}, "cos": table, "sin": table}
        elif "norm" in function:
            inputs["weight"] = {"shape": [width]}
            if function == "layer_norm":
                inputs["bias"] = {"shape": [width]}
        gradients = tuple(n for n in ("x", "weight", "bias", "logits") if n in inputs)
        yield Case(f"random-{seed}-layer-{i}", ("layers-1",), "calibration", function, inputs, dict(arguments),
                   gradients=gradients)  # fmt: skip


_LAYERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("softmax", {}),
    ("layer_norm", {"eps": 1e-5}),
    ("rms_norm", {"eps": 1e-6}),
    ("gelu", {}),
    ("gelu", {"approximate": "tanh"}),
    ("silu", {}),
    ("cross_entropy", {"label_smoothing": 0.1, "z_loss": 1e-3}),
    ("apply_rotary", {}),
)


def target_of(name: str) -> Target:
    """A target by name; the zoo's right variants have names too."""
    if not name.startswith("honest-"):
        return load(name)
    from .zoo import variants
    from .zoo.faults import Faulty

    found = {variant.id: variant for variant in variants()}
    if name not in found:
        raise ValueError(f"no right variant is called {name!r}; there are {', '.join(found)}")
    return Target(Faulty(found[name]), name)


def measure(
    names: Sequence[str], number: int, seed: int, seen: Callable[[str], None] = lambda text: None
) -> list[Result]:
    """Every random case on every kernel of every target, in every dtype."""
    results = []
    for name in names:
        target = target_of(name)
        for case in (*random_cases(number, seed), *random_layers(number, seed)):
            seen(f"{name} {case.id}")
            if not target.offers(case.function):
                continue
            for dtype in ALL:
                for kernel in target.kernels()[1:] or ["auto"] if case.kernels else ["auto"]:
                    results.append(judge(case, target, dtype, kernel))
    return [result for result in results if result.status in (PASSED, FAILED)]


def planted(ids: Sequence[str] | None, seen: Callable[[str], None] = lambda text: None) -> dict[str, float]:
    """The share of its budget that each planted fault takes at its best case, the weakest first; without those that
    break what must be exact, and those that only all elements together show. ids: None for all of the zoo."""
    from .zoo import all_faults, catch

    chosen = [fault for fault in all_faults() if ids is None or fault.id in ids]
    shares = {}
    for fault in chosen:
        seen(fault.id)
        shares[fault.id] = catch(fault).share
    by_budget = {name: share for name, share in shares.items() if share > 1.0}
    return dict(sorted(by_budget.items(), key=lambda item: item[1]))


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="conformance calibrate",
        description="The share of the error budget that right implementations use, and that planted faults take.",
        epilog="example: conformance calibrate backend_torch --cases 50 --png shares.png",
    )
    parser.add_argument("targets", nargs="*", default=["core_numpy", "honest-narrow", "honest-online", "backend_torch"])
    parser.add_argument("--cases", type=int, metavar="N", help="random cases of attention, and as many of layers")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--short", action="store_true", help=f"{FEW} cases of each, and the weakest faults alone")
    parser.add_argument("--png", metavar="FILE", help="draw the shares")
    parser.add_argument("--json", metavar="FILE", help="write the shares as JSON; - for standard output")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    options = parser.parse_args(argv)
    number = options.cases if options.cases is not None else FEW if options.short else 40
    if number < 1:
        raise ValueError(f"--cases must be at least 1; got {number}")
    from .progress import Bar

    with remembering(), Bar(None, quiet=options.json == "-") as seen:
        results = measure(options.targets, number, options.seed, seen)
        if not results:
            raise ValueError("no case could be judged: the targets offer nothing of attention and layers")
        faults = planted(WEAKEST if options.short else None, seen)
    table = summarise(results)
    if options.json:
        from .summary import write_json

        shares = {name: float(f"{share:.4g}") for name, share in faults.items()}
        document = {"schema": 2, "cases": number, "seed": options.seed, "shares": table, "faults": shares}
        write_json(options.json, document)
    if options.json != "-":
        _print(table, faults)
    if options.png:
        _plot(results, faults, options.png)
    return int(any(row["worst"] > LIMIT for row in table) or min(faults.values()) < GAP)


def _taken(result: Result) -> float:
    """A failure without a share (a wrong shape, a value that must be exact) is no small one."""
    return (1.0 if result.status == FAILED else 0.0) if result.share is None else result.share


def summarise(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Per target, kernel and dtype: how many calls, the median and the worst share, and where that was."""
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.target, result.kernel, result.dtype), []).append(result)
    rows = []
    for (target, kernel, dtype), group in groups.items():
        worst = max(group, key=lambda r: (r.status == FAILED, _taken(r)))
        rows.append(
            {
                "target": target,
                "kernel": kernel,
                "dtype": dtype,
                "calls": len(group),
                "median": float(f"{np.median([_taken(r) for r in group]):.3g}"),
                "worst": float(f"{max(_taken(worst), 1.0 if worst.status == FAILED else 0.0):.3g}"),
                "where": f"{worst.function} {worst.where}",
            }
        )
    return rows


def _print(table: Sequence[dict[str, Any]], faults: dict[str, float]) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = Table(title="share of the error budget used by right implementations")
    for name in table[0]:
        shown.add_column(name, justify="right" if name in ("calls", "median", "worst") else "left", overflow="fold")
    for row in table:
        shown.add_row(*(str(value) for value in row.values()), style="red" if row["worst"] > LIMIT else "")
    console = Console(width=None if sys.stdout.isatty() else 118)
    console.print(shown)
    worst = max(row["worst"] for row in table)
    name, least = next(iter(faults.items()))
    console.print(
        f"right implementations use {worst:.3g} of the budget at most (allowed: a third); of {len(faults)} planted "
        f"faults the weakest, {name}, takes {least:.3g} times (at least {GAP:g})",
        style="red" if worst > LIMIT or least < GAP else "",
        highlight=False,
    )


def _plot(results: Sequence[Result], faults: dict[str, float], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.subplots()
    labels: list[tuple[str, ...]] = sorted({(r.target, r.kernel, r.dtype) for r in results})
    jitter = np.random.Generator(np.random.Philox(0))
    for x, label in enumerate(labels):
        shares = [max(_taken(r), 1e-6) for r in results if (r.target, r.kernel, r.dtype) == label]
        axes.plot(x + jitter.uniform(-0.3, 0.3, len(shares)), shares, ".", alpha=0.4, markersize=3, color="steelblue")
    taken = list(faults.values())
    axes.plot(len(labels) + jitter.uniform(-0.4, 0.4, len(taken)), taken, "x", markersize=4, color="firebrick")
    axes.axhspan(LIMIT, GAP, color="gold", alpha=0.25, label="the gap: a third of the budget to ten times")
    axes.axhline(1.0, color="firebrick", linewidth=1, label="the budget")
    axes.set_yscale("log")
    named = [*(" ".join(label) for label in labels), "planted faults"]
    axes.set_xticks(range(len(named)), named, rotation=60, ha="right", fontsize=7)
    axes.set_ylabel("share of the error budget")
    axes.legend(loc="center left", fontsize=8)
    figure.savefig(path, dpi=150)
