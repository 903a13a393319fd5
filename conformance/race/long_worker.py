"""One process of attention over many positions: `long_worker torch|jax OUT FOLDER PIECES POSITIONS...`.

On one process the whole is computed by `attention` and kept in FOLDER, in PIECES pieces; on several (RANK, WORLD_SIZE,
MASTER_PORT) it is spread over the context axis, and each holds what it has against what was kept. The first writes the
figures of all: how far apart, and for each number of positions the peak of memory that the call took, forward and
backward, beyond what the process had before.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from core_numpy.contract.parallel import pieces_of

HEADS, SIZE = 1, 64
ARRAYS = ("q", "k", "v", "grad")
FOUND = ("out", "dq", "dk", "dv")
# What comes out and the gradients, of the positions that are here; bytes beyond those held before; seconds.
Found = tuple[dict[str, np.ndarray], int, float]


def held(place: int, count: int, pieces: int) -> list[int]:
    """The pieces of one process, of so many of a row, in the order in which a ring keeps them."""
    each = pieces // (2 * count)
    return [start * each + i for start in pieces_of(place, count, True) for i in range(each)]


def part(what: str, numbers: list[int], size: int) -> np.ndarray:
    """(1, H, T here, D) of q, k, v or the gradient of what comes out; nobody makes more than it holds."""
    made = []
    for number in numbers:
        rng = np.random.default_rng([ARRAYS.index(what), number, size])
        made.append(rng.standard_normal((1, HEADS, size, SIZE), dtype=np.float32))
    return np.concatenate(made, 2)


def peak() -> int:
    """Bytes: the most that this process has held since `forget`."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def forget() -> int:
    """Start the peak anew, and say what is held now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return peak()


def torch_work(numbers: list[int], size: int, length: int, rank: int, count: int) -> Found:
    """In torch: `attention` of the whole on one process, the ring on several."""
    import torch
    import torch.distributed as dist

    import backend_torch as B
    from backend_torch.place import Part
    from backend_torch.ring import Ring, ring_attention

    before = forget()
    q, k, v, grad = (torch.from_numpy(part(what, numbers, size)) for what in ARRAYS)
    for x in (q, k, v):
        x.requires_grad_()
    began = time.perf_counter()
    if count == 1:
        out = B.attention(q, k, v, causal=True)
    else:
        here = Part(ring=Ring(dist.group.WORLD, rank, count, length, True))
        out = ring_attention(here, q, k, v, {"causal": True, "window": None, "sinks": None})
    out.backward(grad)
    seconds, taken = time.perf_counter() - began, peak() - before
    found = (out.detach(), q.grad, k.grad, v.grad)
    return {name: x.numpy() for name, x in zip(FOUND, found, strict=True)}, taken, seconds  # type: ignore[union-attr]


def jax_work(numbers: list[int], size: int, length: int, rank: int, count: int) -> Found:
    """The same in JAX; compiled before memory is counted."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    import backend_jax as B
    from backend_jax import place
    from backend_jax.parallel import make_mesh
    from backend_jax.ring import ring_attention
    from core_numpy.contract.parallel import Layout

    names = ("scale", "softcap", "bias", "window", "sinks", "kv_lengths", "q_segments", "dropout_key")
    options = {**dict.fromkeys(names), "causal": True, "dropout_rate": 0.0}

    def forward(q: Any, k: Any, v: Any) -> Any:
        return B.attention(q, k, v, causal=True) if count == 1 else ring_attention(q, k, v, dict(options))

    def work(q: Any, k: Any, v: Any, grad: Any) -> Any:
        out, pull = jax.vjp(forward, q, k, v)
        return out, *pull(grad)

    def given(what: str) -> jax.Array:
        return jax.make_array_from_callback(shape, sharding, lambda index: part(what, numbers, size))

    mesh = make_mesh(Layout(context=count))
    sharding, shape = NamedSharding(mesh, PartitionSpec(None, None, "context", None)), (1, HEADS, length, SIZE)
    with place.spread_over(mesh, True):
        described = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)] * 4
        compiled = jax.jit(work, out_shardings=sharding).lower(*described).compile()
    before = forget()
    arrays = [given(what) for what in ARRAYS]
    began = time.perf_counter()
    found = jax.block_until_ready(compiled(*arrays))
    seconds, taken = time.perf_counter() - began, peak() - before
    own = (np.asarray(x.addressable_shards[0].data) for x in found)
    return dict(zip(FOUND, own, strict=True)), taken, seconds


def begin(framework: str, rank: int, count: int) -> Callable[[Any], list[Any]]:
    """Meet the others; gives a function that lets each say something to all."""
    where = f"localhost:{os.environ.get('MASTER_PORT', '0')}"
    if framework == "torch":
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"tcp://{where}", rank=rank, world_size=count)

        def said_by_all(own: Any) -> list[Any]:
            said: list[Any] = [None] * count
            dist.all_gather_object(said, own)
            return said

        return said_by_all
    from backend_jax.parallel import said_by_all as heard
    from backend_jax.processes import connect

    if count > 1:
        connect(where, count, rank)
    return heard


def main(framework: str, out: str, folder: str, pieces: int, lengths: list[int]) -> None:
    rank, count = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    said_by_all = begin(framework, rank, count)
    work = {"torch": torch_work, "jax": jax_work}[framework]
    numbers = held(rank, count, pieces)
    # What is made once - threads, connections, code - is there before it is counted.
    work(numbers, 64, 64 * pieces, rank, count)
    apart, seconds, memory = 0.0, 0.0, {}
    for length in lengths:
        found, memory[length], seconds = work(numbers, length // pieces, length, rank, count)
        for name, x in found.items():
            parts = x.reshape(HEADS, len(numbers), -1, SIZE).swapaxes(0, 1)
            for number, mine in zip(numbers, parts, strict=True):
                file = Path(folder) / f"{framework}-{name}-{length}-{number}.npy"
                if count == 1:
                    np.save(file, mine)
                else:
                    want = np.load(file)
                    apart = max(apart, float(np.max(np.abs(mine - want)) / np.max(np.abs(want))))
        del found
    said = said_by_all({"apart": apart, "held": memory, "seconds": seconds})
    if rank == 0:
        Path(out).write_text(json.dumps(said), encoding="utf-8")
    if framework == "torch":
        import torch.distributed as dist

        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), [int(word) for word in sys.argv[5:]])
