"""Lowering by `jax.export` for devices that need not be here, and what of it a CPU can check.

Each program is lowered for each platform, written down and read back. Once more it is lowered for all platforms at
once and run on the CPU from what was read back. Two controls must fail: an operation that a TPU lacks, and a
program for a TPU alone that is called on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .programs import SMALL, Item, items, lowering_for
from .rows import Row

PLATFORMS = ("tpu", "cuda", "rocm")
# The same program from another lowering: sums may be taken in another order. bfloat16 has 8 bits, and a gradient
# that rounds the other way moves its moments by as much.
# A first AdamW update divides a gradient by its own size, so that the rounding of a small one is a part of the update.
TOLERANCE = {"train step, bfloat16": 1e-2, "train step, float32": 1e-3}
OTHERS = 1e-5


def rows() -> Iterator[Row]:
    """One row for each program and platform, then the controls."""
    for item in items():
        for platform in PLATFORMS:
            yield lowered(item, platform)
    for item in items(SMALL):
        yield called(item)
    yield refused("linalg.eig for a TPU", _eig_for_tpu, NotImplementedError)
    yield refused("a program for a TPU, called on a CPU", _tpu_on_cpu, ValueError)


def lowered(item: Item, platform: str) -> Row:
    """Lower for one platform, with the kernels that it would choose, and read back what was written."""
    try:
        with lowering_for(platform):
            function, arguments = item.make()
            exported = jax.export.export(function, platforms=[platform])(*arguments)
        data = exported.serialize()
        again = jax.export.deserialize(data)
    except Exception as error:  # a row of the report: one program's failure must not hide the next one's success
        return unavailable(item.name, platform, error)
    if tuple(again.platforms) != (platform,):
        return Row(item.name, platform, "lowered", "failed", f"read back as a program for {again.platforms}")
    return Row(item.name, platform, "lowered", "ok", f"{len(data):,} bytes")


def unavailable(name: str, platform: str, error: Exception) -> Row:
    """What a library that is not here decides is not judged; everything else has failed."""
    text = " ".join(str(error).split())[:200]
    if "cuDNN" in text or "needs an NVIDIA GPU" in text or ("cudnn" in name and "cannot serve" in text):
        return Row(name, platform, "lowered", "absent", text)
    return Row(name, platform, "lowered", "failed", f"{type(error).__name__}: {text}")


def called(item: Item) -> Row:
    """Lower for everything at once, read back, run on the CPU, compare with the program itself."""
    if item.name == "kernel cudnn":
        return Row(item.name, "cpu", "ran", "absent", "it needs an NVIDIA GPU")
    try:
        function, arguments = item.make()
        exported = jax.export.export(function, platforms=["cpu", *PLATFORMS])(*arguments)
        again = jax.export.deserialize(exported.serialize())
        got = jax.device_get(jax.jit(again.call)(*arguments))
        want = jax.device_get(function(*jax.tree.map(jnp.array, arguments)))
        apart = distance(want, got)
    except Exception as error:
        return Row(item.name, "cpu", "ran", "failed", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    status = "ok" if apart <= TOLERANCE.get(item.name, OTHERS) else "failed"
    return Row(item.name, "cpu", "ran", status, f"written, read back and run: {apart:.1e} apart")


def distance(want: Any, got: Any) -> float:
    """The largest difference of two results' leaves, relative to the largest entry of its leaf."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
        if x.shape != y.shape or not np.isfinite(y).all():
            return float("inf")
        if x.size:
            worst = max(worst, float(np.max(np.abs(x - y)) / max(np.max(np.abs(x)), 1e-30)))
    return worst


def refused(name: str, work: Any, expected: type[Exception]) -> Row:
    """A control: the check has teeth only where this fails, and in the right way."""
    try:
        work()
    except expected as error:
        return Row(name, "control", "refused", "ok", f"{expected.__name__}: {' '.join(str(error).split())[:80]}")
    except Exception as error:
        return Row(name, "control", "refused", "failed", f"{type(error).__name__} where {expected.__name__} was due")
    return Row(name, "control", "refused", "failed", "it passed, so a pass says nothing")


def _eig_for_tpu() -> None:
    jax.export.export(jax.jit(jnp.linalg.eig), platforms=["tpu"])(jnp.eye(3))


def _tpu_on_cpu() -> None:
    x = jnp.ones(3)
    exported = jax.export.export(jax.jit(jnp.sin), platforms=["tpu"])(x)
    jax.export.deserialize(exported.serialize()).call(x)
