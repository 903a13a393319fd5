"""What is timed, time and memory of a call, and what the figures say: parts of `cost`."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .recurrent import layer

LENGTHS, HEADS, SIZE = (64, 128, 256, 512, 1024, 2048), 4, 16
TURN = 0.1  # seconds, many times the tick by which a system books processor time


@dataclass(frozen=True)
class Timed:
    """A call that waits for its result; `room` is what it takes in MiB where the framework itself says so."""

    call: Callable[[], Any]
    room: float | None = None


def calls(B: Any, length: int) -> dict[str, Timed | None]:
    """What is measured at one length: forward passes on one row of `length` tokens, 64 features."""
    q, k, v = (B.normal(key, (1, HEADS, length, SIZE)) for key in B.split(B.key(length), 3))
    if B.__name__ == "core_numpy":
        return {"all scores": None, "blockwise": Timed(lambda: B.attention(q, k, v)), "LSTM": None}
    x = B.normal(B.key(1), (1, length, HEADS * SIZE))
    found: dict[str, Timed | None] = {}
    for name, kernel in (("all scores", "dense"), ("blockwise", "blockwise")):
        found[name] = _timed(B, lambda q, k, v, kernel=kernel: B.attention(q, k, v, kernel=kernel), q, k, v)
    return found | {"LSTM": _timed(B, layer(B, HEADS * SIZE), x)}


def _timed(B: Any, function: Callable[..., Any], *arrays: Any) -> Timed:
    """As the framework's users run it: compiled in JAX, whose compiler knows what it will take; eager in torch."""
    if B.__name__ != "backend_jax":
        return Timed(lambda: B.wait(function(*arrays)))
    import jax

    program = jax.jit(function).lower(*arrays).compile()
    room: Any = program.memory_analysis()
    taken = (room.temp_size_in_bytes + room.output_size_in_bytes) / 2**20
    return Timed(lambda: B.wait(program(*arrays)), taken)


def seconds(timed: Timed) -> float:
    """Of the processor, all threads together: the median of five turns, each of so many calls that it lasts a while.

    Other work on the machine stretches what a clock shows, and hardly this. One short call would show nothing: what
    threads of a framework have used is booked only now and then.
    """
    timed.call()  # touches the memory
    start = time.perf_counter()
    timed.call()
    number = max(1, round(TURN / (time.perf_counter() - start)))
    found: list[float] = []
    for _ in range(5):
        start = time.process_time()
        for _ in range(number):
            timed.call()
        found.append((time.process_time() - start) / number)
    return float(np.median(found))


def peak(timed: Timed) -> float:
    """Mebibytes that a call takes: what the framework says, or by the kernel's mark; NaN where Linux keeps none."""
    if timed.room is not None:
        return timed.room
    try:
        Path("/proc/self/clear_refs").write_text("5")  # sets the mark back to what is resident now
    except OSError:
        return float("nan")
    if hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)  # else what earlier calls freed is taken again without a trace
    before = _resident("VmRSS")
    timed.call()
    return max(_resident("VmHWM") - before, 0.0)


def _resident(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(field + ":")) / 1024


def exponent(values: list[float]) -> float:
    """The slope over the last four lengths in a doubly logarithmic picture, by least squares."""
    return float(np.polyfit(np.log(LENGTHS[-4:]), np.log(values[-4:]), 1)[0])


def crossing(ours: list[float], theirs: list[float]) -> str:
    """The length from which on attention is the slower one, between two measured ones on a straight line of logs."""
    gap = np.log(ours) - np.log(theirs)
    if gap[-1] <= 0:
        return f"nowhere up to {LENGTHS[-1]}"
    if (gap > 0).all():
        return f"from {LENGTHS[0]} on, or before"
    last = int(np.flatnonzero(gap <= 0)[-1])
    part = -gap[last] / (gap[last + 1] - gap[last])
    return f"from about {LENGTHS[last] * (LENGTHS[last + 1] / LENGTHS[last]) ** part:.0f} on"
