"""One process of attention over many positions: `torchrun ... parallel_long.py OUT FOLDER POSITIONS`.

On one process the whole is computed by `attention` and kept in FOLDER; on several it is spread over the context axis,
and each holds what it has against what was kept. The first writes the figures of all: how far apart, and the peak of
memory that the call took, forward and backward, beyond what the process had before.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import backend_torch as B
from backend_torch.place import Part
from backend_torch.ring import Ring, ring_attention

HEADS, SIZE = 1, 64
# A run over any number of processes up to four holds whole pieces of these.
PIECES = 8


def piece(what: str, number: int, length: int) -> torch.Tensor:
    """(1, H, length / PIECES, D) of q, k, v or the gradient of what comes out; nobody makes more than it holds."""
    rng = np.random.default_rng(["q", "k", "v", "grad"].index(what) * 100 + number)
    return torch.from_numpy(rng.standard_normal((1, HEADS, length // PIECES, SIZE), dtype=np.float32))


def held(ring: Ring, length: int) -> list[int]:
    """The pieces here, in the order in which a ring keeps them."""
    each = length // PIECES
    return [start // each + i for start in ring.starts(ring.place) for i in range(ring.size // each)]


def peak() -> int:
    """Bytes: the most that this process has held since `forget`."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def forget() -> int:
    """Start the peak anew, and say what is held now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return peak()


def work(length: int, numbers: list[int], ring: Ring | None) -> tuple[dict[str, torch.Tensor], int]:
    """What comes out and the gradients, of the pieces that are here; and bytes beyond those held before."""
    before = forget()
    arrays = {what: torch.cat([piece(what, i, length) for i in numbers], 2) for what in ("q", "k", "v", "grad")}
    q, k, v = (arrays[what].requires_grad_() for what in "qkv")
    if ring is None:
        out = B.attention(q, k, v, causal=True)
    else:
        out = ring_attention(Part(ring=ring), q, k, v, {"causal": True, "window": None, "sinks": None})
    out.backward(arrays["grad"])
    found = {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
    return found, peak() - before  # type: ignore[return-value]


def main(out: str, folder: str, length: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, count = dist.get_rank(), dist.get_world_size()

    def ring(positions: int) -> Ring:
        return Ring(dist.group.WORLD, rank, count, positions, True)

    # What is made once - threads, connections, code - is there before it is counted.
    work(1024, held(ring(1024), 1024), ring(1024))
    numbers = held(ring(length), length)
    found, memory = work(length, numbers, None if count == 1 else ring(length))
    apart = 0.0
    for name, x in found.items():
        for i, part in zip(numbers, x.numpy().reshape(1, HEADS, len(numbers), -1, SIZE).swapaxes(0, 2), strict=True):
            file = Path(folder) / f"{name}-{i}.npy"
            if count == 1:
                np.save(file, part)
            else:
                want = np.load(file)
                apart = max(apart, float(np.max(np.abs(part - want)) / np.max(np.abs(want))))
    said: list[Any] = [None] * count
    dist.all_gather_object(said, {"apart": apart, "memory": memory, "cpu": sum(resource.getrusage(0)[:2])})
    if rank == 0:
        Path(out).write_text(json.dumps(said), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
