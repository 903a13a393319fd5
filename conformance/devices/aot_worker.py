"""Compiles for one platform: `python -m conformance.devices.aot_worker tpu|cuda DEVICES [SKIP]`.

A JSON line where a program begins, and one with its figures where it is compiled. SKIP: how many are left out.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import backend_jax as B
from backend_jax.kernels import KERNELS, lowering_for
from core_numpy.contract.config import ModelConfig, TrainConfig

from .collectives import collectives, summed
from .programs import batch, decode, forward, train_step

# Numbers of NVIDIA's H200 SXM data sheet, the H100 architecture paper (GH100: 132 of 144 multiprocessors) and the CUDA
# programming guide (compute capability 9.0). XLA chooses tiles and checks limits by them.
H200 = """
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  device_memory_size: 141000000000
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}
platform_name: "CUDA"
runtime_version { major: 12 minor: 8 patch: 0 }
dnn_version_info { major: 9 minor: 8 patch: 0 }
device_description_str: "NVIDIA H200"
"""
# Everything that a step has, and small enough to compile in seconds: twice as wide, with two layers and 2,048
# tokens, XLA:TPU takes some 200 s of one core for the float32 step of one chip, 13 s for this.
MODEL = ModelConfig(
    vocab=256, width=128, heads=2, kv_heads=1, layers=1, max_length=64, positions="rotary", norm="rms",
    activation="swiglu", attention_bias=False, ffn_bias=False,
)  # fmt: skip
ROWS, LENGTH = 8, 64


def devices(platform: str, count: int) -> list[Any]:
    """Descriptions of devices that are not here."""
    if platform == "tpu":
        return list(topologies.get_topology_desc("v5e:2x2", "tpu").devices)[:count]
    described = topologies.get_topology_desc(platform=platform, target_config=H200, topology=f"1x1x{count}")
    return list(described.devices)


def main(platform: str, count: int, skip: int = 0) -> None:
    # What the libraries print goes elsewhere than the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    mesh = Mesh(np.array(devices(platform, count)), ("data",))
    for name, make in list(programs())[skip:]:
        answers.write(json.dumps({"begins": name}) + "\n")
        answers.flush()
        began = time.perf_counter()
        try:
            with lowering_for(platform):
                function, arguments, spread = make()
                found = described(function, placed(arguments, mesh, spread))
        except Exception as error:  # one program's failure must not hide the others
            found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        answers.write(json.dumps({"program": name, **found, "seconds": round(time.perf_counter() - began, 2)}) + "\n")
        answers.flush()


def programs() -> Iterator[tuple[str, Any]]:
    """Name -> a maker of (function, arguments, which of them are spread over the devices by their first axis)."""

    def step(precision: str) -> Any:
        train = TrainConfig(batch=ROWS, precision=precision, matmul_precision="default")
        function, arguments = train_step(MODEL, train)
        return function, (*arguments[:2], batch(MODEL, ROWS, LENGTH), *arguments[3:]), {2}

    def kernel(name: str) -> Any:
        def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return jnp.sum(B.attention(q, k, v, causal=True, kernel=name).astype(jnp.float32) ** 2)

        shapes = [(ROWS, heads, LENGTH, 128) for heads in (2, 1, 1)]
        arrays = tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
        return jax.jit(jax.value_and_grad(loss, (0, 1, 2))), arrays, {0, 1, 2}

    def untrained(make: Any, length: int, spread: set[int]) -> Any:
        return *make(MODEL, rows=ROWS, length=length), spread

    for precision in ("float32", "bfloat16"):
        yield f"train step, {precision}", partial(step, precision)
    yield "forward, float32", partial(untrained, forward, LENGTH, {1, 2})
    yield "decode, float32", partial(untrained, decode, LENGTH // 2, {1})
    for name in KERNELS:
        if name != "cudnn":  # compiling it asks cuDNN, which is a library of machines with a GPU
            yield f"kernel {name}, bfloat16", partial(kernel, name)


def placed(arguments: tuple[Any, ...], mesh: Mesh, spread: set[int]) -> tuple[Any, ...]:
    """The shapes of the arguments, laid out over devices that hold no memory."""

    def describe(x: Any, axes: tuple[Any, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    return tuple(
        jax.tree.map(lambda x, i=i: describe(x, ("data",) if i in spread else ()), argument)
        for i, argument in enumerate(arguments)
    )


def described(function: Any, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Compile, and what the compiled program says of itself."""
    compiled = function.lower(*arguments).compile()
    memory = compiled.memory_analysis()
    parts = {part: int(getattr(memory, f"{part}_size_in_bytes")) for part in ("argument", "output", "alias", "temp")}
    flops = compiled_flops(compiled)
    text = compiled.as_text()
    return {
        # Donated arguments become outputs: they are counted once.
        "memory": parts["argument"] + parts["output"] - parts["alias"] + parts["temp"],
        "memory_parts": parts,
        "flops": flops,
        "collectives": summed(collectives(text)),
        "custom_calls": sorted(set(_custom_calls(text))),
    }


def compiled_flops(compiled: Any) -> int | None:
    """FLOPs of one device's program by XLA's own count. The GPU's executable gives none: its modules are counted."""
    flops = (compiled.cost_analysis() or {}).get("flops")
    if flops is None:
        from jax._src.lib import _jax  # the count has no public name

        client = jax.devices("cpu")[0].client
        modules = compiled.runtime_executable().hlo_modules()
        flops = sum(_jax.hlo_module_cost_analysis(client, module).get("flops", 0.0) for module in modules)
    return int(flops) if flops else None


def _custom_calls(text: str) -> Iterator[str]:
    for part in text.split('custom_call_target="')[1:]:
        yield part.split('"', 1)[0]


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
