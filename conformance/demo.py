"""`python -m conformance demo`: conformance, short trainings, a race and a look at the lab, all in one page."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from core_numpy.contract.arguments import Parser
from core_numpy.contract.checks.common import require_int
from core_numpy.contract.plots import draw_losses

from . import race
from .lab.pages import read_results
from .race.process import package_environment
from .report.html import write_report
from .summary import write_json

PACKAGES = {"numpy": "core_numpy", "torch": "backend_torch", "jax": "backend_jax"}
# On two cores: about a minute and a half of conformance, one of training, one of racing.
STEPS = 100
CONTESTANTS = ("numpy", "torch", "jax")
PART_TIMEOUT = 240.0
# The experiments that train nothing: a few seconds together.
LAB = ("average", "scaling", "permutation")
# What a part has in bytes, for the page.
PICTURES = ("png", "pictures")


def main(argv: Sequence[str] | None = None) -> int:
    """Write demo/report.html; 0 where every part succeeded, 1 where one did not (the page says which)."""
    parser = Parser(
        prog="conformance demo",
        description="Conformance, a short training in every framework, a race and a look at the lab, in one HTML page.",
        epilog="example: conformance demo --out demo",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", default="demo", metavar="DIR", help="where the page and its data go (default demo)")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"training updates (default {STEPS})")
    parser.add_argument("--rounds", type=int, default=8, metavar="N", help="rounds of the race (default 8)")
    parser.add_argument("--json", metavar="FILE", help="write what the page shows as JSON; - for standard output")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    arguments = parser.parse_args(argv)
    for option in ("steps", "rounds"):
        require_int(f"--{option}", getattr(arguments, option), 1)
    # With --json - standard output is the document's.
    with contextlib.redirect_stdout(sys.stderr) if arguments.json == "-" else contextlib.nullcontext():
        document = _demo(Path(arguments.out), arguments.steps, arguments.rounds)
    if arguments.json:
        write_json(arguments.json, document)
    return 1 if document["failed"] else 0


def _demo(out: Path, steps: int, rounds: int) -> dict[str, Any]:
    """Run every part and write the page; gives what the page shows, without its pictures."""
    out.mkdir(parents=True, exist_ok=True)
    begin, notes = time.perf_counter(), []
    present = {name: package for name, package in PACKAGES.items() if importlib.util.find_spec(name) is not None}
    for name in PACKAGES.keys() - present.keys():
        notes.append(f"{name} is not installed, so {PACKAGES[name]} is left out.")
        _say(notes[-1])
    conformance = conformance_part(notes)
    training = training_part(present, steps, notes)
    document, png = race_part([name for name in CONTESTANTS if name in present], rounds, out, notes)
    lab = lab_part(present, out, notes)
    page = out / "report.html"
    write_report(
        page, conformance=conformance, training=training, race=document, race_png=png, lab=lab, notes=notes
    )  # fmt: skip
    seconds = time.perf_counter() - begin
    _say(f"{seconds:.0f} s; the report is {page}")
    shown = {"conformance": conformance, "training": training, "race": document, "lab": lab}
    return {
        "schema": 1, "report": str(page), "seconds": round(seconds, 1), "notes": notes,
        "failed": any(note.startswith("Part of this failed") for note in notes),
        **{name: None if part is None else {key: x for key, x in part.items() if key not in PICTURES}
           for name, part in shown.items()},
    }  # fmt: skip


def _say(text: str) -> None:
    print(text, flush=True)


def _run(arguments: Sequence[str], timeout: float) -> subprocess.CompletedProcess[str]:
    # Everything here is small: a second thread gains nothing, and on a busy machine waiting for it costs much.
    environment = {**package_environment(), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=timeout, env=environment
    )  # fmt: skip


def conformance_part(notes: list[str]) -> dict[str, Any] | None:
    """The quick level of the suite on what is installed, in a process of its own."""
    _say("conformance: every case of the quick level on every target ...")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "conformance.json"
        try:
            done = _run(["-m", "conformance", "run", "--level", "quick", "--json", str(path)], PART_TIMEOUT)
        except subprocess.TimeoutExpired:
            notes.append(f"Part of this failed: conformance took longer than {PART_TIMEOUT:.0f} s.")
            return None
        if not path.exists():
            notes.append(f"Part of this failed: conformance gave no result: {_last_line(done.stderr)}")
            return None
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for name, target in document["targets"].items():
        counts = {status: sum(case["status"] == status for case in target["cases"]) for status in ("passed", "failed")}
        _say(f"  {name}: {counts['passed']} passed, {counts['failed']} failed")
        if counts["failed"]:
            notes.append(f"Part of this failed: {counts['failed']} calls of {name}.")
    return document


def training_part(present: dict[str, str], steps: int, notes: list[str]) -> dict[str, Any]:
    """The same run on the command line of each backend: same seed, same text, so the same losses."""
    curves, validation, sentences = {}, {}, []
    for name, package in present.items():
        _say(f"training: {name}, {steps} updates of the tiny model ...")
        with tempfile.TemporaryDirectory() as folder:
            command = ["-m", package, "train", "--steps", str(steps), "--json", "--out", os.path.join(folder, "run")]
            try:
                done = _run(command, PART_TIMEOUT)
            except subprocess.TimeoutExpired:
                notes.append(f"Part of this failed: training in {name} took longer than {PART_TIMEOUT:.0f} s.")
                continue
        if done.returncode:
            notes.append(f"Part of this failed: training in {name}: {_last_line(done.stderr)}")
            continue
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        curves[name] = [[row["step"], row["loss"]] for row in rows if "loss" in row]
        validation[name] = rows[-1]["bits_per_byte"]
        _say(f"  {validation[name]:.4f} bits per byte on held-out text")
    if len(curves) > 1:
        first = list(zip(*(points[:20] for points in curves.values()), strict=True))
        apart = max(max(loss for _, loss in row) - min(loss for _, loss in row) for row in first)
        sentences.append(f"In the first {len(first)} updates the losses differ by {apart:.1e} nats at most.")
    points = {name: [(step, loss) for step, loss in curve] for name, curve in curves.items()}
    png = _picture(lambda path: draw_losses(path, points, title="tiny, on CPython's help topics"), notes)
    return {"curves": curves, "validation": validation, "sentences": sentences, "png": png}


def race_part(names: Sequence[str], rounds: int, out: Path, notes: list[str]) -> tuple[dict[str, Any], bytes | None]:
    """A short race of the eager and jitted ones; torch.compile takes its time and has its place in `race`."""
    _say(f"race: {', '.join(names)} ...")
    document = race.run(["tiny"], names, rounds=rounds, seconds=0.5, timeout=PART_TIMEOUT)
    (out / "race.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
    _say(race.as_text(document))
    for one in document["races"]:
        for name, row in one["contestants"].items():
            if row["status"] in ("failed", "disqualified"):
                notes.append(f"Part of this failed: {name} in the race: {row['reason']}")
    return document, _picture(lambda path: race.draw(document, path), notes)


def lab_part(present: dict[str, str], out: Path, notes: list[str]) -> dict[str, Any] | None:
    """The experiments that train nothing, in one framework; their own page lies beside this one."""
    package = next(present[name] for name in ("torch", "jax", "numpy") if name in present)
    _say(f"lab: {', '.join(LAB)} in {package} ...")
    if importlib.util.find_spec("matplotlib") is None:
        notes.append("The lab is left out: matplotlib is not installed.")
        return None
    try:
        done = _run(["-m", "conformance", "lab", *LAB, "--backend", package, "--out", str(out / "lab")], PART_TIMEOUT)
    except subprocess.TimeoutExpired:
        notes.append(f"Part of this failed: the lab took longer than {PART_TIMEOUT:.0f} s.")
        return None
    if done.returncode not in (0, 1):  # 1 is a claim that did not hold, which the page shows
        notes.append(f"Part of this failed: the lab: {_last_line(done.stderr)}")
        return None
    document = read_results(out / "lab")
    claims = [claim["held"] for one in document["experiments"].values() for claim in one["claims"]]
    _say(f"  {sum(claims)} of {len(claims)} claims held")
    if not all(claims):
        notes.append("Part of this failed: a claim of the lab did not hold.")
    return document | {"link": "lab/lab.html", "rest": f"conformance lab --backend {package} --out lab"}


def _picture(draw: Callable[[str], None], notes: list[str]) -> bytes | None:
    """What `draw` writes to a path, or None where matplotlib is missing."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "picture.png")
        try:
            draw(path)
        except ImportError as error:
            if "Pictures are left out: matplotlib is not installed." not in notes:
                notes.append("Pictures are left out: matplotlib is not installed.")
            _say(f"  no picture: {error}")
            return None
        return Path(path).read_bytes()


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "it said nothing"
