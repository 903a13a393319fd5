"""A plan for a model on 1 to 4,096 devices: memory, time and communication, computed and not measured.

    time of the products = model FLOPs per device / (peak x the share of the peak that is assumed)
    time of an axis      = bytes that leave a device / speed of the links that the axis lies on
    a step takes between max(products, communication), where all of it overlaps, and their sum, where none does

`python -m conformance.plan` prints the table of docs/scaling.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from core_numpy.contract.arguments import Parser, ended
from core_numpy.contract.checks.common import require_int
from core_numpy.contract.communication import local_parameters, step_communication, wire_bytes
from core_numpy.contract.config import ModelConfig
from core_numpy.contract.cost import step_cost
from core_numpy.contract.parallel import Layout

from .summary import write_json

# The shape of Llama 2 7B: 6.74 billion parameters.
SEVEN_BILLION = ModelConfig(
    vocab=32000, width=4096, heads=32, layers=32, hidden=11008, max_length=4096, positions="rotary", norm="rms",
    activation="swiglu", attention_bias=False, ffn_bias=False,
)  # fmt: skip


@dataclass(frozen=True)
class Device:
    """What is assumed of a device and its links, per device and direction."""

    name: str = "H200"
    memory: float = 141e9
    peak: float = 989e12
    share: float = 0.45
    inside: float = 450e9
    outside: float = 50e9
    per_host: int = 8


@dataclass(frozen=True)
class Row:
    """One line of the plan; bytes and seconds of one device and one step."""

    devices: int
    layout: str
    batch: int
    length: int
    weights: float
    activations: float
    fits: bool
    products: float
    communication: float
    fastest: float
    slowest: float
    tokens_per_second: tuple[float, float]


# Devices -> layout: shards inside a host, copies between hosts; context where one row is longer than a device's share.
LAYOUTS = {
    1: Layout(), 8: Layout(fsdp=8), 64: Layout(data=8, fsdp=8), 256: Layout(data=32, fsdp=8),
    512: Layout(data=64, fsdp=8), 1024: Layout(data=128, fsdp=4, tensor=2), 4096: Layout(data=512, fsdp=4, tensor=2),
}  # fmt: skip


def row(config: ModelConfig, layout: Layout, device: Device, rows: int, length: int) -> Row:
    """The figures of one layout with `rows` rows on each device that has rows of its own."""
    batch = rows * layout.parts
    cost = step_cost(config, rows, length, itemsize=2).total
    spread = layout.tensor * layout.context
    cut, whole = local_parameters(config, layout)
    # float32: parameters, gradients and two moments; and one block's bfloat16 parameters, gathered, twice.
    weights = 16.0 * (cut + whole) / layout.fsdp + 4.0 * (cut + whole) / max(config.layers, 1)
    # Every block recomputed: its input is kept, and one block's activations while it is at work.
    kept = rows * length * config.width * 2.0 * config.layers / layout.context
    activations = kept + cost.activations / max(config.layers, 1) / spread
    products = cost.flops * 4 / 3 / spread / (device.peak * device.share)  # a third more for recomputing
    messages = step_communication(config, layout, batch, length, itemsize=2)
    seconds = communication_seconds(layout, wire_bytes(messages), device)
    tokens = batch * length
    fastest, slowest = max(products, seconds), products + seconds
    return Row(
        layout.devices, str(layout), batch, length, weights, activations, weights + activations <= device.memory,
        products, seconds, fastest, slowest, (tokens / slowest, tokens / fastest),
    )  # fmt: skip


def communication_seconds(layout: Layout, sent: dict[str, int], device: Device) -> float:
    """Each axis on the links that it lies on: inside a host while the devices inside of it fit there."""
    total, inside = 0.0, 1
    for axis in ("tensor", "context", "fsdp", "data"):
        inside *= getattr(layout, axis)
        total += sent[axis] / (device.inside if inside <= device.per_host else device.outside)
    return total


def plan(rows: int = 4, length: int = 4096, device: Device | None = None) -> list[Row]:
    """The table of docs/scaling.md."""
    return [row(SEVEN_BILLION, layout, device or Device(), rows, length) for layout in LAYOUTS.values()]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, or write the document."""
    name = "python -m conformance.plan"
    parser = Parser(
        prog=name, description="A 7-billion model on H200s.", epilog=f"example: {name} --rows 2 --length 8192"
    )
    parser.add_argument("--rows", type=int, default=4, help="rows on each device (default 4)")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a row (default 4096)")
    parser.add_argument("--json", metavar="FILE", help="write the plan as JSON; - for standard output")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    options = parser.parse_args(argv)
    return ended(lambda: _run(options.rows, options.length, options.json), name, debug=options.debug)


def _run(each: int, length: int, file: str | None) -> int:
    rows = plan(require_int("--rows", each, 1), require_int("--length", length, 1))
    if file:
        found: dict[str, Any] = {"computed": True, "device": asdict(Device()), "rows": [asdict(r) for r in rows]}
        write_json(file, {"schema": 1, **found})
    if file != "-":
        _show(rows)
    return 0


def _show(rows: Sequence[Row]) -> None:
    print("computed, not measured")
    print("| devices | layout | rows | GB weights | GB activations | s products | s links | s a step | tokens/s |")
    print("|---:|---|---:|---:|---:|---:|---:|---:|---:|")
    for r in rows:
        low, high = r.tokens_per_second
        fits = "" if r.fits else " (too much)"
        print(
            f"| {r.devices:,} | `{r.layout}` | {r.batch:,} | {r.weights / 1e9:.1f}{fits} | {r.activations / 1e9:.1f} | "
            f"{r.products:.2f} | {r.communication:.2f} | {r.fastest:.2f} to {r.slowest:.2f} | "
            f"{low:,.0f} to {high:,.0f} |"
        )


if __name__ == "__main__":
    raise SystemExit(main())
