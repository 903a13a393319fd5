"""The course's claims, each a small experiment: measured in the package you name, drawn, and held or not.

Each module of `EXPERIMENTS` says its claim, uses only the public API and is meant to be read.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core_numpy.contract.arguments import Parser

EXPERIMENTS = (
    "bottleneck", "average", "scaling", "permutation", "heads", "masks", "positions", "cost", "block", "norm", "maps",
)  # fmt: skip
BACKENDS = {"backend_torch": "torch", "backend_jax": "jax", "core_numpy": "numpy"}


def experiment(name: str) -> Any:
    """The module of an experiment."""
    return importlib.import_module(f".{name}", __name__)


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m conformance lab`: 0 every claim held, 1 one did not, 2 a wrong argument, 3 no such framework here."""
    parser = Parser(
        prog="conformance lab",
        description="The course's claims about attention, measured.",
        epilog="example: conformance lab bottleneck positions --backend backend_torch --out lab",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(EXPERIMENTS)}")
    parser.add_argument("--backend", choices=list(BACKENDS), help="default: the first of these that is installed")
    parser.add_argument("--out", metavar="DIR", help="write NAME.png of each, lab.json and lab.html there")
    parser.add_argument("--json", metavar="FILE", help="write the results as JSON; - for standard output")
    parser.add_argument("--list", action="store_true", help="list the claims and stop")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    options = parser.parse_args(argv)
    for name in options.names:
        if name not in EXPERIMENTS:
            raise ValueError(f"there is no experiment {name!r}; there are {', '.join(EXPERIMENTS)}")
    names = list(dict.fromkeys(options.names)) or list(EXPERIMENTS)
    if options.list:
        for name in names:
            print(f"{name:12} {experiment(name).CLAIM}")
        return 0
    out = None if options.out is None else writable_folder(options.out)
    if options.json not in (None, "-"):
        writable_folder(Path(options.json).parent, "--json")
    return measure(names, backend_of(options.backend), out, options.json)


def backend_of(name: str | None) -> Any:
    """The package of that name, or the first whose framework is installed."""
    name = name or next(n for n, needs in BACKENDS.items() if importlib.util.find_spec(needs))
    needs = BACKENDS[name]
    if importlib.util.find_spec(needs) is None:
        raise ImportError(f"{name} needs {needs}, which is not installed: pip install 'attention-conformance[{needs}]'")
    return importlib.import_module(name)


def writable_folder(path: str | Path, option: str = "--out") -> Path:
    """The folder, made where it is missing: what takes minutes to measure is not to be lost at the end."""
    path = Path(path)
    for tool in ("matplotlib", "jinja2"):
        if option == "--out" and importlib.util.find_spec(tool) is None:
            raise ImportError(f"{option} needs the package {tool}: pip install 'attention-conformance[tools]'")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{option}: {path} cannot be made: {error.strerror}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ValueError(f"{option}: {path} cannot be written to")
    return path


def measure(names: Sequence[str], B: Any, out: Path | None, json: str | None) -> int:
    """Run the experiments one after the other, print each and write what is asked for, after each what is there."""
    from ..summary import write_json
    from .pages import SCHEMA, as_document, draw, print_report, write_page

    backend = B.__name__
    found: dict[str, Any] = {}
    document: dict[str, Any] = {"schema": SCHEMA, "backend": backend, "experiments": found}
    for name in names:
        if json != "-":
            print(f"{name} on {backend} ...", file=sys.stderr, flush=True)
        start, cpu = time.perf_counter(), time.process_time()
        report = experiment(name).run(B)
        spent = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
        found[name] = as_document(report, experiment(name).CLAIM, spent)
        if json != "-":
            print_report(name, found[name])
        if out is not None:
            draw(report, out / f"{name}.png")
            write_json(out / "lab.json", document)
            write_page(out / "lab.html", document, out)
        if json not in (None, "-"):
            write_json(json, document)
    if json == "-":
        write_json(json, document)
    return int(any(not claim["held"] for one in found.values() for claim in one["claims"]))
