"""What a compiled program sends between its devices, read off its HLO text.

    %all-reduce.3 = (f32[128,64]{1,0}, f32[64]{0}) all-reduce(...)   ->  kind "all-reduce", 33,024 bytes per device

The bytes are those of the result on one device, as it stands in the program; what goes over the wires follows from
the kind (core_numpy.contract.communication).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")
SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4,
         "f64": 8, "s64": 8, "u64": 8}  # fmt: skip
# An asynchronous pair is counted at its start, where the operands stand beside the results.
_INSTRUCTION = re.compile(r"=\s+(?P<shape>\(.*?\)|\S+)\s+(?P<kind>" + "|".join(KINDS) + r")(?P<start>-start)?\(")
_ARRAY = re.compile(r"\b(?P<type>" + "|".join(SIZES) + r")\[(?P<dims>[0-9,]*)\]")
# A computation's head, the loops in its body, and the other computations that it names.
_HEAD = re.compile(r"^(?:ENTRY )?%?(?P<name>[\w.-]+) .*\{$")
_BODY = re.compile(r"\bwhile\(.*\bbody=%?(?P<name>[\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(?P<n>\d+)"\}')
_CALLS = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation|branch_computations|called_computations)="
    r"(?P<names>\{[^}]*\}|%?[\w.-]+)"
)


@dataclass(frozen=True)
class Collective:
    """One instruction: its kind, the bytes of its result on one device, and how often a run comes to it."""

    kind: str
    bytes: int
    times: int = 1


def collectives(hlo: str) -> list[Collective]:
    """Every collective instruction of a program's text, in the order of the text.

    times: the product of the known trip counts of the loops around it; a loop whose count XLA does not know is one.
    """
    often = _how_often(hlo)
    return [Collective(found.kind, found.bytes, often.get(where, 1)) for where, found in _found(hlo)]


def _inside(hlo: str) -> Iterator[tuple[str, str]]:
    """(computation, line) of each line; "" outside of all."""
    where = ""
    for line in hlo.splitlines():
        head = _HEAD.match(line)
        if head is not None:
            where = head["name"]
        elif line.startswith("}"):
            where = ""
        else:
            yield where, line


def _how_often(hlo: str) -> dict[str, int]:
    """Computation -> how often a run of the program comes to it, where that is not once."""
    callers: dict[str, list[tuple[str, int]]] = {}
    for where, line in _inside(hlo):
        body, trips = _BODY.search(line), _TRIPS.search(line)
        looped = (body["name"], int(trips["n"])) if body is not None and trips is not None else ("", 1)
        for called in _CALLS.finditer(line):
            for name in re.findall(r"[\w.-]+", called["names"]):
                callers.setdefault(name, []).append((where, looped[1] if name == looped[0] else 1))

    @cache
    def count(name: str) -> int:
        return sum(times * count(caller) for caller, times in callers[name]) if name in callers else 1

    return {name: count(name) for name in callers}


def _found(hlo: str) -> Iterator[tuple[str, Collective]]:
    for where, line in _inside(hlo):
        match = _INSTRUCTION.search(line)
        if match is None:
            continue
        sizes = [_bytes(array) for array in _ARRAY.finditer(match["shape"])]
        if match["start"] and match["kind"] in ("all-gather", "collective-permute"):
            # (operands..., results..., and for a permute two words of context): the results are the second half.
            sizes = [size for size in sizes if size > 4] or sizes
            sizes = sizes[len(sizes) // 2 :]
        yield where, Collective(match["kind"], sum(sizes))


def routes(hlo: str) -> set[tuple[int, int]]:
    """(from, to) of every message that a program's permutes send."""
    found = re.findall(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", hlo)
    return {(int(a), int(b)) for pairs in found for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs)}


def _bytes(array: re.Match[str]) -> int:
    size = SIZES[array["type"]]
    for axis in filter(None, array["dims"].split(",")):
        size *= int(axis)
    return size


def summed(found: list[Collective]) -> dict[str, dict[str, int]]:
    """Kind -> how many a run comes to, and their bytes."""
    table: dict[str, dict[str, int]] = {}
    for item in found:
        row = table.setdefault(item.kind, {"count": 0, "bytes": 0})
        row["count"] += item.times
        row["bytes"] += item.times * item.bytes
    return table
