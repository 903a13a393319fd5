"""`from_pretrained` against `safetensors.torch.load_file` on the same file.

Run as `python -m conformance.race.loading [--megabytes 200] [--rounds 7] [--json FILE]`. A GPT-2 (whose weights are
stored transposed and fused) and a Llama of that size are written in float32; contestants take turns, the file is in the
page cache. `load_file` maps the file and reads nothing, so it is followed by what gives a model its weights: the module
of `transformers` made without initial values, and `load_state_dict`. Ours checks the header, every shape and every
number for NaN besides. A figure is the ratio of medians to that.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from .decode import Call, take_turns
from .machine import environment

LAYERS = 4


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


def contestants(config: Any, folder: str) -> dict[str, Call]:
    import safetensors.torch
    import torch
    import transformers

    import backend_jax
    import backend_torch
    import core_numpy

    file = os.path.join(folder, "model.safetensors")

    def home() -> Any:
        # Empty memory in place of initial values, as a loader makes it.
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        model = model.to_empty(device="cpu")
        model.load_state_dict(safetensors.torch.load_file(file), strict=False)
        return model

    def jax() -> Any:
        import jax as framework
        from flax import nnx

        model = backend_jax.Transformer.from_pretrained(folder)
        return framework.block_until_ready(nnx.state(model))

    return {
        "load_file, module": home,
        "torch": lambda: backend_torch.Transformer.from_pretrained(folder),
        "jax": jax,
        "numpy": lambda: core_numpy.Transformer.from_pretrained(folder),
    }


def measure(megabytes: int, rounds: int) -> list[dict[str, Any]]:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    rows = []
    for family in ("gpt2", "llama"):
        with tempfile.TemporaryDirectory() as folder:
            calls = contestants(write_home(family, megabytes, folder), folder)
            size = os.path.getsize(os.path.join(folder, "model.safetensors"))
            for call in calls.values():
                call()
            times = take_turns(calls, rounds)
        medians = {name: statistics.median(seconds) for name, seconds in times.items()}
        for name, median in medians.items():
            rows.append({
                "family": family, "megabytes": size / 1e6, "contestant": name, "ms": median * 1e3,
                "ratio": median / medians["load_file, module"], "rounds": times[name],
            })  # fmt: skip
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m conformance.race.loading", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--megabytes", type=int, default=200, help="size of the file (200)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contestant (7)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures too")
    asked = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    rows = measure(asked.megabytes, asked.rounds)
    from rich.console import Console
    from rich.table import Table

    table = Table(title="loading a float32 file from the page cache, one thread")
    for heading in ("family", "MB", "contestant", "ms", "of load_file, module"):
        table.add_column(heading, justify="left" if heading in ("family", "contestant") else "right")
    for row in rows:
        table.add_row(
            row["family"], f"{row['megabytes']:.0f}", row["contestant"], f"{row['ms']:.0f}", f"{row['ratio']:.2f}"
        )
    Console().print(table)
    if asked.json is not None:
        found = {"environment": environment(1), "rows": rows}
        asked.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
