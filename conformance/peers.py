"""What others wrote, judged: `main` is `conformance peers`, which writes docs/peers.md.

The suite must blame nobody who is right: each failure of a peer is explained in differences/<peer>.toml, or is ours to
mend. The page has the share of the error budget that each peer uses, feature by feature.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from core_numpy.contract.arguments import Parser

from . import deviations
from .functions import ATTENTION
from .runner import ABSENT, FAILED, KNOWN, PASSED, Result
from .targets.peers import PEERS

# The package that each peer comes from; it is left out where that is not installed.
PACKAGES = {
    "torch-sdpa": "torch", "torch-mha": "torch", "torch-flex": "torch", "jax-nn": "jax", "flax-nnx": "flax",
    "flax-linen": "flax", "equinox": "equinox", "keras-torch": "keras", "keras-jax": "keras",
    "transformers-sdpa": "transformers", "transformers-eager": "transformers", "x-transformers": "x-transformers",
    "onnx-reference": "onnx", "onnxruntime": "onnxruntime", "mlx": "mlx", "tinygrad": "tinygrad",
}  # fmt: skip


def _heads(case: Any) -> tuple[int, int]:
    shapes = [case.inputs[name].get("shape") or case.inputs[name].get("reshape") for name in ("q", "k")]
    q, k = ([1] if shape is None else shape for shape in shapes)
    return (q[-3], k[-3]) if len(q) > 2 and len(k) > 2 else (1, 1)


def _has(name: str) -> Callable[[Any], bool]:
    return lambda case: name in case.inputs or bool(case.arguments.get(name))


# A case counts for each feature that it uses; "plain" is one that uses none of the others.
FEATURES: dict[str, Callable[[Any], bool]] = {
    "grouped": lambda case: _heads(case)[0] != _heads(case)[1],
    "mask": _has("mask"),
    "bias": _has("bias"),
    "causal": _has("causal"),
    "window": _has("window"),
    "lengths": _has("kv_lengths"),
    "segments": _has("q_segments"),
    "scale": lambda case: "scale" in case.arguments,
    "soft-cap": _has("softcap"),
    "sinks": _has("sinks"),
    "dropout": _has("dropout_rate"),
    "weights": lambda case: case.function == "attention_weights",
}


def features_of(case: Any) -> list[str]:
    return [name for name, uses in FEATURES.items() if uses(case)] or ["plain"]


def cell(results: Sequence[Result]) -> str:
    """Worst share of the budget of what passed; known differences behind it; a dash where nothing is offered."""
    passed = [r.share for r in results if r.status == PASSED and r.share is not None]
    known, failed = (sum(r.status == status for r in results) for status in (KNOWN, FAILED))
    parts = [f"{100 * max(passed):.0f} %"] if passed else []
    parts += [f"{known} known"] if known else []
    parts += [f"**{failed} failed**"] if failed else []
    return ", ".join(parts) or "–"


def installed() -> list[str]:
    found = []
    for name in PEERS:
        try:
            importlib.metadata.version(PACKAGES[name])
        except importlib.metadata.PackageNotFoundError:
            print(f"{name} is left out: {PACKAGES[name]} is not installed (pip install 'attention-conformance[peers]')",
                  file=sys.stderr)  # fmt: skip
        else:
            found.append(name)
    return found


def page(results: dict[str, list[Result]], cases: Sequence[Any], level: str) -> str:
    """docs/peers.md."""
    by_id = {case.id: case for case in cases}
    columns = ["plain", *FEATURES]
    lines = [
        "# Peers",
        "",
        "What others wrote, judged by the same cases as our own three packages. Each number is the largest share",
        "of the error budget (`docs/tolerance.md`) that any case of the feature used; over 100 % fails. *Known*",
        "counts the calls whose difference is listed below, with its reason; a difference that is not listed",
        "fails, and so does a listed one that does not occur. A dash: the peer does not offer the feature in this",
        "form; that is not a pass.",
        "",
        f"Written by `python -m conformance peers --write docs/peers.md` at level `{level}`.",
        "",
        f"| peer | {' | '.join(columns)} |",
        f"| --- |{' ---: |' * len(columns)}",
    ]
    for name, found in results.items():
        mine = [r for r in found if r.function in ATTENTION and r.case in by_id]
        cells = [cell([r for r in mine if column in features_of(by_id[r.case])]) for column in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    left = [name for name in PEERS if name not in results]
    lines += ["", f"Not judged here: {', '.join(left)}."] if left else []
    dtypes = ("float64", "float32", "bfloat16", "float16")
    lines += ["", f"| peer | version | {' | '.join(dtypes)} | calls passed | known | not offered |",
              f"| --- | --- |{' ---: |' * (len(dtypes) + 3)}"]  # fmt: skip
    for name, found in results.items():
        mine = [r for r in found if r.function in ATTENTION]
        cells = [cell([r for r in mine if r.dtype == dtype]) for dtype in dtypes]
        cells += [str(sum(r.status == status for r in mine)) for status in (PASSED, KNOWN, ABSENT)]
        lines.append(f"| {name} | {importlib.metadata.version(PACKAGES[name])} | {' | '.join(cells)} |")
    lines += ["", "## Known differences", ""]
    for name in results:
        rows = deviations.load_deviations(name)
        if rows:
            lines += [f"### {name}", ""]
        for row in rows:
            where = f" ({', '.join(row.dtypes)})" if row.dtypes else ""
            where += f" (kernel {', '.join(row.kernels)})" if row.kernels else ""
            lines.append(f"- {row.rule}{where}: {row.reason} [[source]({row.link})]. Cases: {', '.join(row.cases)}.")
        if rows:
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def main(argv: Sequence[str]) -> int:
    from . import rows, summary
    from .workers import cores, judge_targets, selected

    parser = Parser(
        prog="conformance peers",
        description="Judge what others wrote, feature by feature.",
        epilog="example: conformance peers --write docs/peers.md",
    )
    parser.add_argument("peers", nargs="*", metavar="PEER", help="default: all whose package is installed")
    parser.add_argument("--list", action="store_true", help="list the peers and stop")
    parser.add_argument("--level", default="quick", choices=rows.LEVELS)
    parser.add_argument("--write", metavar="FILE", help="write the page; default: standard output")
    parser.add_argument("--json", metavar="FILE", help="write the results as JSON; - for standard output")
    parser.add_argument("--jobs", type=int, metavar="N", help="peers judged at a time; default: one per core")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    options = parser.parse_args(argv)
    if options.list:
        print("\n".join(f"{name:20} {PACKAGES[name]}" for name in PEERS))
        return 0
    unknown = [name for name in options.peers if name not in PEERS]
    if unknown:
        raise ValueError(f"unknown peers {', '.join(unknown)}; known are {', '.join(PEERS)}")
    names = list(dict.fromkeys(options.peers)) or installed()
    judged = judge_targets(names, options.level, "attention", lambda text: None, options.jobs or cores())
    results = {name: deviations.apply(name, judged[name][0], whole=True) for name in names}
    text = page(results, selected(options.level, "attention"), options.level)
    if options.json:
        facts = {judged[name][0][0].target: judged[name][1] for name in names if judged[name][0]}
        summary.write_json(
            options.json, summary.document([r for found in results.values() for r in found], facts, options.level)
        )
    if options.write:
        summary.write_text(Path(options.write), text)
    elif options.json != "-":
        print(text, end="")
    wrong = [r for found in results.values() for r in found if r.status == FAILED]
    for r in wrong:
        print(f"FAILED {r.target} {r.case} ({r.dtype}, {r.kernel}): {r.detail}", file=sys.stderr)
    return int(bool(wrong))
