"""Where a contestant's time goes: by torch's profiler, by JAX's trace of XLA's operations, by cProfile in NumPy.

A profile names operations and what share of all of them each took; it is slower than the race and no measure of speed.
"""

from __future__ import annotations

import glob
import importlib
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

# First that matches, on the operation's name and its source's last part. What a compiler fused has its parts' names.
GROUPS: dict[str, tuple[tuple[str, str], ...]] = {
    "torch": (
        (r"scaled_dot_product|flash_attn|flash_attention|fmha", "attention kernel"),
        (r"::(mm|addmm|bmm|baddbmm|linear|matmul|mkldnn_linear)|gemm|cutlass|mkldnn::_linear", "matrix products"),
        (r"adamw|_foreach|clip|linalg_vector_norm", "optimiser"),
        (r"cpp_fused|triton_|Compiled", "compiled element-wise work"),
        (r"layer_norm|rms_norm", "norms"),
        (r"gelu|silu|sigmoid", "activations"),
        (r"softmax|nll_loss|cross_entropy", "softmax and loss"),
        (r"embedding|index", "embeddings"),
        (r"copy_|clone|contiguous|cat|::to|fill_|zero_|Memcpy|Memset", "copies"),
    ),
    "jax": (
        (r"^ynn_fusion.* reduce_sum$", "reductions"),  # the library of its products sums rows as well
        (r"^(dot|ynn_fusion|convolution)|gemm|dot_general|onednn|cublas", "matrix products"),
        (r"exponential|reduce_max", "softmax"),
        (r"erf|tanh", "activations"),
        (r"rsqrt", "norms"),
        (r"copy|concatenate|transpose|pad|slice|scatter|gather|broadcast", "copies and masks"),
    ),
    "numpy": (
        (r"ndtr|erf|expit|gelu|silu|share|slope|block.py:both", "activations"),
        (r"log_sum_exp|loss|layers.py:both", "softmax and loss"),
        (r"attention|scores|softmax|pairs.py|_add_block|capped", "attention"),
        (r"layers.py:(normal|backward|mean)", "norms"),
        (r"linear|modules.py:run", "linear layers"),
        (r"optimizer|_step|update|rounded", "optimiser"),
    ),
}
# Their events contain those of what they call.
CONTAINERS = ("while", "call", "conditional")


def group(framework: str, name: str, source: str = "") -> str:
    """The kind of work that an operation's name and source tell."""
    text = f"{name} {source.rsplit('/', 1)[-1]}" if framework == "jax" else name
    return next((kind for pattern, kind in GROUPS[framework] if re.search(pattern, text)), "other")


def profiled(work: Callable[[], None], framework: str, device: str, count: int, rows: int) -> list[dict[str, Any]]:
    """The `rows` longest operations of `work`, which makes `count` updates, and a last row for all the others.

    Each: {"op", "group", "ms" per update, "share" of all operations' time, "calls" per update, "source"}.
    """
    find = {"torch": _torch, "jax": _jax, "numpy": _numpy}[framework]
    times: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, seconds, calls, source in find(work, device):
        times[name, source][0] += seconds
        times[name, source][1] += calls
    total = sum(seconds for seconds, _ in times.values())
    if not total > 0.0:
        raise RuntimeError("the profiler saw no operation")
    made = [
        {
            "op": name, "group": group(framework, name, source), "ms": seconds / count * 1e3, "share": seconds / total,
            "calls": calls / count, "source": source,
        }
        for (name, source), (seconds, calls) in sorted(times.items(), key=lambda item: -item[1][0])
    ]  # fmt: skip
    return made[:rows] + [_rest(str(kind), made[rows:]) for kind in dict.fromkeys(row["group"] for row in made[rows:])]


def _rest(kind: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What was not listed of one kind."""
    own = [row for row in rows if row["group"] == kind]
    sums = {name: sum(row[name] for row in own) for name in ("ms", "share", "calls")}
    return {"op": f"({len(own)} more)", "group": kind, "source": "", **sums}


Found = Iterator[tuple[str, float, float, str]]


def _torch(work: Callable[[], None], device: str) -> Found:
    from torch.profiler import ProfilerActivity, profile

    cuda = device == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as profiler:
        work()
    for event in profiler.key_averages():
        seconds = (event.self_device_time_total if cuda else event.self_cpu_time_total) / 1e6
        if seconds > 0.0:
            yield event.key, seconds, event.count, ""


def _jax(work: Callable[[], None], device: str) -> Found:
    """XLA's operations, each with the path of its first line of JAX where the dump of the program tells it."""
    del device
    jax = importlib.import_module("jax")
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            work()
        (path,) = glob.glob(os.path.join(folder, "**", "*.xplane.pb"), recursive=True)
        found = jax.profiler.ProfileData.from_file(path)
    sources = hlo_sources(os.environ.get("RACE_HLO", ""))
    for plane in found.planes:
        for line in plane.lines:
            for event in line.events:
                op = dict(event.stats).get("hlo_op")
                # On the CPU an operation may have a second event, of its end.
                if op is None or event.name != op or str(op).startswith(CONTAINERS):
                    continue
                # XLA numbers its operations, and every layer has its own: those of one line of JAX are added.
                yield re.sub(r"\.\d+$", "", str(op)), event.duration_ns / 1e9, 1, sources.get(str(op), "")


def hlo_sources(folder: str) -> dict[str, str]:
    """Operation -> the JAX operation it came from, of the largest program that XLA dumped into this folder."""
    files = glob.glob(os.path.join(folder, "*after_optimizations.txt")) if folder else []
    if not files:
        return {}
    with open(max(files, key=os.path.getsize), encoding="utf-8") as file:
        text = file.read()
    found = re.findall(r'^\s*(?:ROOT )?%?([\w.\-]+) = .*?op_name="([^"]*)"', text, flags=re.MULTILINE)
    return {name: source.split("/", 1)[-1] for name, source in found}


def _numpy(work: Callable[[], None], device: str) -> Found:
    import cProfile
    import pstats

    del device
    profiler = cProfile.Profile()
    profiler.runcall(work)
    statistics: Any = pstats.Stats(profiler)
    for (file, line, function), (_, calls, seconds, _, _) in statistics.stats.items():
        yield f"{os.path.basename(file)}:{function}", seconds, calls, f"{os.path.basename(file)}:{line}"
