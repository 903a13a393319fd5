"""What compiles, lowers and runs for which device; on a machine that has one, the suite and the race on it.

A machine without a device proves that programs are built for it, shard and fit. It proves no numbers: the report
says "lowered" and "compiled for", never "passed on".
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from core_numpy.contract.arguments import Parser

from ..summary import write_json
from .rows import Row

SCHEMA = 1


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m conformance devices`: 0 where nothing failed, 1 where something did."""
    parser = Parser(
        prog="conformance devices",
        description="What compiles and lowers for which device; on a machine that has one, the suite and the race.",
        epilog="example: conformance devices --aot --json devices.json",
    )
    parser.add_argument("--aot", action="store_true", help="compile in full for a TPU v5e and an H200 (extra [aot])")
    parser.add_argument(
        "--on",
        metavar="DEVICE",
        choices=("cuda", "tpu", "cpu"),
        help="run the suite and the race on this device (cuda, tpu, cpu); default: one found",
    )
    parser.add_argument("--no-run", action="store_true", help="leave a device that is here alone")
    parser.add_argument("--json", metavar="FILE", help="write everything as JSON; - for standard output")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    options = parser.parse_args(argv)
    from . import here, table

    rows: list[Row] = []
    for row in _rows(options.aot):
        rows.append(row)
        table.say(row)
    document: dict[str, Any] = {"schema": SCHEMA, "environment": here.environment()}
    device = None if options.no_run else options.on or here.found()
    if device is not None:
        document["on"] = here.run(
            device, say=lambda text: print(text, file=sys.stderr, flush=True), quiet=options.json == "-"
        )
    document["rows"] = [asdict(row) for row in rows]
    if options.json:
        write_json(options.json, document)
    if options.json != "-":
        table.show(rows, document.get("on"))
    failed = any(row.status == "failed" for row in rows) or document.get("on", {}).get("failed", False)
    return int(failed)


def _rows(aot: bool) -> Iterator[Row]:
    import importlib.util

    if importlib.util.find_spec("jax") is None or importlib.util.find_spec("flax") is None:
        yield Row("jax.export", "tpu, cuda, rocm", "lowered", "absent", "jax is not installed")
    else:
        import jax

        # What is lowered here is run on the CPU. A plug-in for a device, libtpu say, would take the device.
        jax.config.update("jax_platforms", "cpu")
        from . import lowering

        yield from lowering.rows()
    if importlib.util.find_spec("torch") is None:
        yield Row("train step", "meta", "ran", "absent", "torch is not installed")
    else:
        from . import meta

        yield from meta.rows()
    if aot:
        from . import aot as compiling

        yield from compiling.rows()
