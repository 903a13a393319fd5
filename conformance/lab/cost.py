"""Time and memory against length: attention with all scores at once, attention block by block, and an LSTM."""

from __future__ import annotations

from typing import Any

from .clocks import LENGTHS, calls, crossing, exponent, peak, seconds
from .common import NOT_OFFERED, Claim, Report, Table

CLAIM = "Attention's time grows as the square of the length, an LSTM's as the length; blocks save memory, not work."
SECONDS = "processor seconds"


def run(B: Any) -> Report:
    times: dict[str, list[float]] = {}
    memory: dict[str, list[float]] = {}
    for length in LENGTHS:
        for name, timed in calls(B, length).items():
            if timed is not None:
                times.setdefault(name, []).append(seconds(timed))
                memory.setdefault(name, []).append(peak(timed))
    powers = {name: exponent(values) for name, values in times.items()}
    fast = "blockwise"

    def draw(figure: Any) -> None:
        for axes, (what, found) in zip(figure.subplots(1, 2), ((SECONDS, times), ("MiB taken", memory)), strict=True):
            for number, (name, values) in enumerate(found.items()):
                axes.plot(LENGTHS, values, marker="osv"[number], label=name)
            axes.set_xscale("log", base=2)
            axes.set_xticks(LENGTHS, [str(length) for length in LENGTHS])
            axes.set(xlabel="length", ylabel=what)
            if what == SECONDS:
                axes.set_yscale("log")
            axes.legend()

    claims = [Claim("Attention's time grows as length to the 1.5 to 2.5.", f"to the {powers[fast]:.2f}",
                    1.5 <= powers[fast] <= 2.5)]  # fmt: skip
    if "LSTM" in times:
        low, high = memory[fast][-1], memory["all scores"][-1]
        claims += [
            Claim(
                "The LSTM's grows as length to the 0.7 to 1.3.",
                f"to the {powers['LSTM']:.2f}",
                0.7 <= powers["LSTM"] <= 1.3,
            ),
            Claim(
                f"At {LENGTHS[-1]} blocks take less than half of the memory of all scores.",
                f"{low:.1f} against {high:.1f} MiB",
                low < high / 2,
            ),
        ]
        rest = [name for name in times if name != "LSTM"]
        notes = [f"Slower than the LSTM: {name}, {crossing(times[name], times['LSTM'])}." for name in rest]
    else:
        notes = ["core_numpy has one kernel, in blocks of queries, and NumPy has no LSTM."]
    lengths, absent = [str(n) for n in LENGTHS], [NOT_OFFERED for _ in LENGTHS]
    clock = [(n, *(f"{1e3 * t:.2f}" for t in values), f"{powers[n]:.2f}") for n, values in times.items()]
    clock += [(n, *absent, NOT_OFFERED) for n in ("all scores", "LSTM") if n not in times]
    room = [(n, *(f"{m:.1f}" for m in values)) for n, values in memory.items()]
    tables = (
        Table("processor milliseconds of a forward pass on one row, 4 heads of 16", ("", *lengths, "exponent"), clock),
        Table("MiB that it takes at its highest", ("", *lengths), room),
    )
    return Report(claims, tables, draw, size=(11, 4), notes=notes)
