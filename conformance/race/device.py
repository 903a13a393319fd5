"""The device under a contestant: whether it is there, its clock, its memory, its fastest matrix product."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from typing import Any

MIB = 2**20
# Square products: large enough that launching them is nothing beside them, small enough for a second in all.
PEAK_SIZE = {"cpu": 1024, "cuda": 8192, "tpu": 8192}
PEAK_REPEATS = 8
# Larger than the caches of one processor.
COPIED = 64 * MIB


def variables(framework: str, device: str) -> dict[str, str]:
    """What the environment of a process must say so that this framework runs there; before its import."""
    return {"JAX_PLATFORMS": device} if framework == "jax" else {}


def probe(framework: str, device: str) -> dict[str, Any]:
    """{"device": name, "products": what a float32 product is computed in}; RuntimeError where there is none."""
    if framework == "numpy":
        if device != "cpu":
            raise RuntimeError(f"NumPy has no device {device!r}: it computes on the CPU")
        return {"device": "cpu", "products": "float32"}
    if framework == "torch":
        if device == "tpu":
            raise RuntimeError("the torch contestants have no device 'tpu'; use cpu or cuda")
        torch = importlib.import_module("torch")
        if device == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("torch sees no CUDA device on this machine")
        reduced = device == "cuda" and torch.get_float32_matmul_precision() != "highest"
        name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        return {"device": name, "products": "TF32" if reduced else "float32"}
    jax = importlib.import_module("jax")
    try:
        found = jax.devices()[0]
    except RuntimeError as error:
        said = str(error).strip().splitlines()[0] if str(error).strip() else "no such platform"
        raise RuntimeError(f"JAX has no device {device!r} on this machine: {said}") from None
    return {"device": str(found.device_kind), "products": "float32 (precision highest)"}


def stopwatch(
    work: Callable[[], list[Any]], finish: Callable[[], Any], framework: str, device: str
) -> tuple[float, list[Any]]:
    """Seconds from an idle device to an idle device around `work`, and what it gave.

    CUDA in torch: events in its stream; elsewhere the host's clock after `finish`, which waits for every parameter.
    """
    finish()
    if framework == "torch" and device == "cuda":
        torch = importlib.import_module("torch")
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        results = work()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3, results
    if framework == "jax":
        jax = importlib.import_module("jax")
        start = time.perf_counter()
        results = jax.block_until_ready(work())
        finish()
        return time.perf_counter() - start, results
    start = time.perf_counter()
    results = work()
    finish()
    return time.perf_counter() - start, results


def memory(framework: str, device: str) -> dict[str, float]:
    """MiB in use now and at the peak so far: of the device's allocator, on the CPU of the whole process.

    What the platform cannot say is left out.
    """
    if device != "cpu":
        return _device_memory(framework)
    found = {}
    try:
        import psutil

        found["now"] = psutil.Process().memory_info().rss / MIB
    except ImportError:
        pass
    try:
        import resource
    except ImportError:  # Windows
        return found
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found["peak"] = peak / MIB if sys.platform == "darwin" else peak / 2**10
    return found


def _device_memory(framework: str) -> dict[str, float]:
    if framework == "torch":
        torch = importlib.import_module("torch")
        return {"now": torch.cuda.memory_allocated() / MIB, "peak": torch.cuda.max_memory_allocated() / MIB}
    statistics = importlib.import_module("jax").devices()[0].memory_stats() or {}
    names = {"now": "bytes_in_use", "peak": "peak_bytes_in_use"}
    return {short: statistics[long] / MIB for short, long in names.items() if long in statistics}


def peaks(framework: str = "numpy", device: str = "cpu", precision: str = "float32") -> dict[str, Any]:
    """{"flops_per_second", "bytes_per_second"} of the framework's own square product and copy, the best of some."""
    n = PEAK_SIZE[device]
    multiply, copy, moved = _products(framework, device, precision, n)
    return {"flops_per_second": 2.0 * n**3 / _best(multiply), "bytes_per_second": moved / _best(copy)}


def _best(call: Callable[[], Any]) -> float:
    call()  # whatever is compiled, is
    best = float("inf")
    for _ in range(PEAK_REPEATS):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def _products(
    framework: str, device: str, precision: str, n: int
) -> tuple[Callable[[], Any], Callable[[], Any], float]:
    """(multiply and wait, copy and wait, bytes that the copy reads and writes)."""
    import numpy as np

    ones, flat = np.ones((n, n), np.float32), np.ones(COPIED // 4, np.float32)
    if framework == "numpy":
        target = np.empty_like(flat)
        return lambda: ones @ ones, lambda: np.copyto(target, flat), 2.0 * COPIED
    if framework == "torch":
        torch = importlib.import_module("torch")
        x, y = torch.from_numpy(ones).to(device, getattr(torch, precision)), torch.from_numpy(flat).to(device)
        into = torch.empty_like(y)
        wait = torch.cuda.synchronize if device == "cuda" else lambda: None
        return lambda: (x @ x, wait()), lambda: (into.copy_(y), wait()), 2.0 * COPIED
    jax = importlib.import_module("jax")
    a, b = jax.numpy.asarray(ones, precision), jax.numpy.asarray(flat)
    product = jax.jit(lambda a: jax.numpy.matmul(a, a, precision="highest"))
    copy = jax.jit(lambda b: b + 1)
    return lambda: product(a).block_until_ready(), lambda: copy(b).block_until_ready(), 2.0 * COPIED
