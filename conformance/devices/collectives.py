"""What a compiled program sends between its devices, read off its HLO text.

    %all-reduce.3 = (f32[128,64]{1,0}, f32[64]{0}) all-reduce(...)   ->  kind "all-reduce", 33,024 bytes per device

The bytes are those of the result on one device, as it stands in the program; what goes over the wires follows from
the kind (core_numpy.contract.communication).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")
SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4,
         "f64": 8, "s64": 8, "u64": 8}  # fmt: skip
# An asynchronous pair is counted at its start, where the operands stand beside the results.
_INSTRUCTION = re.compile(r"=\s+(?P<shape>\(.*?\)|\S+)\s+(?P<kind>" + "|".join(KINDS) + r")(?P<start>-start)?\(")
_ARRAY = re.compile(r"\b(?P<type>" + "|".join(SIZES) + r")\[(?P<dims>[0-9,]*)\]")


@dataclass(frozen=True)
class Collective:
    """One instruction: its kind and the bytes of its result on one device."""

    kind: str
    bytes: int


def collectives(hlo: str) -> list[Collective]:
    """Every collective instruction of a program's text, in the order of the text; one in a loop counts once."""
    return list(_found(hlo))


def _found(hlo: str) -> Iterator[Collective]:
    for line in hlo.splitlines():
        match = _INSTRUCTION.search(line)
        if match is None:
            continue
        sizes = [_bytes(array) for array in _ARRAY.finditer(match["shape"])]
        if match["start"] and match["kind"] in ("all-gather", "collective-permute"):
            # (operands..., results..., and for a permute two words of context): the results are the second half.
            sizes = [size for size in sizes if size > 4] or sizes
            sizes = sizes[len(sizes) // 2 :]
        yield Collective(match["kind"], sum(sizes))


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
    """Kind -> how many, and their bytes."""
    table: dict[str, dict[str, int]] = {}
    for item in found:
        row = table.setdefault(item.kind, {"count": 0, "bytes": 0})
        row["count"] += 1
        row["bytes"] += item.bytes
    return table
