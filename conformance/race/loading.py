"""`from_pretrained` against `safetensors.torch.load_file` on the same file.

Run as `python -m conformance.race.loading [--megabytes 200] [--rounds 5] [--family llama] [--json FILE]`. A GPT-2
(whose weights are stored transposed and fused) and a Llama of that size are written in float32; the file is in the page
cache. Each load is the first of a process of its own, after its imports and a small model's load, as a model is loaded
in life; later ones, which may get memory that the process already has, are "again", three in the same process.
Contestants take turns. `load_file` maps the file and reads nothing. "read" is what it costs to read each number once
besides; "module" is followed by what gives a model its weights: the module of `transformers` made without initial
values, and `load_state_dict`; "turned" by what gives the blocks' matrices the other order, `x.t().contiguous()`: an
`nn.Linear` wants a GPT-2's so, and JAX (in, out) a Llama's. Ours checks the header, every shape and every number for
NaN, and gives a model. Figures are medians of the processor's time, in one thread; what the first touch of memory costs
varies, on a virtual machine whose host has yet to give it many times over, so the least is there too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from core_numpy.contract.arguments import Parser, ended
from core_numpy.contract.checks.common import require_int

from ..progress import Bar
from ..summary import write_json
from .decode import Call
from .machine import environment
from .process import package_environment

LAYERS = 4
READ, MODULE, TURNED = "load_file, read", "load_file, module", "load_file, turned"
CONTESTANTS = (READ, MODULE, TURNED, "torch", "jax", "numpy")
# Tensors of a block, and the head.
MATRICES = re.compile(r"\.\d+\.|lm_head")
FAMILIES = ("gpt2", "llama")
# Before a framework is imported: one thread.
ONE_THREAD = {
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
}  # fmt: skip


def write_home(family: str, megabytes: int, folder: str) -> Any:
    """A model of about that size, in `folder`; gives its configuration."""
    import torch
    import transformers

    width = max(64, int((megabytes * 1e6 / 4 / (LAYERS * 12)) ** 0.5) // 64 * 64)
    if family == "gpt2":
        config: Any = transformers.GPT2Config(
            vocab_size=1000, n_embd=width, n_layer=LAYERS, n_head=width // 64, n_positions=512
        )
    else:
        config = transformers.LlamaConfig(
            vocab_size=1000, hidden_size=width, intermediate_size=8 * width // 3, num_hidden_layers=LAYERS,
            num_attention_heads=width // 64, max_position_embeddings=512,
        )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return config


def loader(name: str, folder: str) -> Call:
    """What the contestant does, its imports done."""
    if name == "jax":
        import jax
        from flax import nnx

        import backend_jax

        return lambda: jax.block_until_ready(nnx.state(backend_jax.Transformer.from_pretrained(folder)))
    if name == "numpy":
        import core_numpy

        return lambda: core_numpy.Transformer.from_pretrained(folder)
    import torch

    torch.set_num_threads(1)
    if name == "torch":
        import backend_torch

        return lambda: backend_torch.Transformer.from_pretrained(folder)
    import safetensors.torch

    file = os.path.join(folder, "model.safetensors")

    def read() -> Any:
        tensors = safetensors.torch.load_file(file)
        # The quickest that reads every number, and what tells of a NaN.
        return tensors, [float(x.max()) for x in tensors.values()]

    def turned() -> Any:
        tensors = safetensors.torch.load_file(file)
        return {
            name: x.t().contiguous() if x.dim() == 2 and MATRICES.search(name) else x for name, x in tensors.items()
        }

    if name in (READ, TURNED):
        return read if name == READ else turned
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)

    def home() -> Any:
        # Empty memory in place of initial values, as a loader makes it.
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        model = model.to_empty(device="cpu")
        model.load_state_dict(safetensors.torch.load_file(file), strict=False)
        return model

    return home


def load_once(name: str, small: str, folder: str) -> dict[str, Any]:
    """Seconds of this process's first load of `folder`, and of three more."""
    loader(name, small)()
    call, seconds = loader(name, folder), []
    for _ in range(4):
        start = time.process_time()
        model = call()
        seconds.append(time.process_time() - start)
        del model
    return {"first": seconds[0], "again": seconds[1:]}


def in_a_process(name: str, small: str, folder: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "conformance.race.loading", "--child", name, small, folder]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**package_environment(), **ONE_THREAD}
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def measure(families: tuple[str, ...], megabytes: int, rounds: int, quiet: bool = False) -> list[dict[str, Any]]:
    """One row per family, load and contestant; quiet: without a bar."""
    rows = []
    for family in families:
        with tempfile.TemporaryDirectory() as small, tempfile.TemporaryDirectory() as folder:
            write_home(family, 1, small)
            write_home(family, megabytes, folder)
            size = os.path.getsize(os.path.join(folder, "model.safetensors"))
            found = []
            with Bar(rounds * len(CONTESTANTS), quiet=quiet) as advance:
                for name in CONTESTANTS * rounds:
                    found.append((name, in_a_process(name, small, folder)))
                    advance(f"{family}: {name}")
        for kind in ("first", "again"):
            times = {
                name: [statistics.median(one[kind]) if kind == "again" else one[kind] for each, one in found
                       if each == name]
                for name in CONTESTANTS
            }  # fmt: skip
            middle = {name: statistics.median(seconds) for name, seconds in times.items()}
            for name, seconds in times.items():
                rows.append({
                    "family": family, "megabytes": size / 1e6, "load": kind, "contestant": name,
                    "ms": middle[name] * 1e3, "least_ms": min(seconds) * 1e3, "of_read": middle[name] / middle[READ],
                    "of_module": middle[name] / middle[MODULE], "of_turned": middle[name] / middle[TURNED],
                    "rounds": seconds,
                })  # fmt: skip
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Print the table, or write the document."""
    name = "python -m conformance.race.loading"
    parser = Parser(
        prog=name, description=(__doc__ or "").split("\n")[0], epilog=f"example: {name} --family gpt2 --rounds 3"
    )
    parser.add_argument("--megabytes", type=int, default=200, help="size of the file (200)")
    parser.add_argument("--family", choices=FAMILIES, help="one of the two files (both)")
    parser.add_argument("--rounds", type=int, default=5, help="processes of each contestant (5)")
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON; - for standard output")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.child is not None:
        print(json.dumps(load_once(*asked.child)))
        return 0
    return ended(lambda: _run(asked), name, debug=asked.debug)


def _run(asked: argparse.Namespace) -> int:
    for option in ("megabytes", "rounds"):
        require_int(f"--{option}", getattr(asked, option), 1)
    families = FAMILIES if asked.family is None else (asked.family,)
    rows = measure(families, asked.megabytes, asked.rounds, quiet=asked.json == "-")
    if asked.json:
        write_json(asked.json, {"schema": 1, "environment": environment(1), "rows": rows})
    if asked.json != "-":
        _show(rows)
    return 0


def _show(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="loading a float32 file from the page cache, one thread")
    left = ("family", "load", "contestant")
    for heading in ("family", "MB", "load", "contestant", "ms", "least", "of read", "of module", "of turned"):
        table.add_column(heading, justify="left" if heading in left else "right")
    for row in rows:
        table.add_row(
            row["family"], f"{row['megabytes']:.0f}", row["load"], row["contestant"], f"{row['ms']:.0f}",
            f"{row['least_ms']:.0f}", *(f"{row[of]:.2f}" for of in ("of_read", "of_module", "of_turned")),
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    raise SystemExit(main())
