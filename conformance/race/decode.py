"""Prefill and decode against `transformers`: the same weights, read from one folder, in the same process.

Run as `python -m conformance.race.decode [--size small] [--batch 1] [--prompt 128] [--new 64] [--json FILE]`.
Contestants take turns in every round, after a warm-up in which texts and logits are shown to agree; a figure is the
ratio of medians of the processor's time. One thread for all. Greedy; prefill gives the logits of every position,
generate the prompt and the new tokens.
`transformers` has two ways to decode, its `generate` and a bare loop over its forward; ratios are to its faster one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from core_numpy.contract.arguments import Parser, ended
from core_numpy.contract.checks.common import require_int

from ..summary import write_json
from .machine import environment

# width, layers, heads, key/value heads, vocabulary of a Llama.
SIZES = {"tiny": (64, 2, 4, 2, 256), "small": (256, 4, 8, 4, 1000), "medium": (512, 8, 8, 4, 4000)}
Call = Callable[[], Any]


def home_model(size: str) -> Any:
    """A Llama of `transformers` with random weights."""
    import torch
    import transformers

    width, layers, heads, groups, vocab = SIZES[size]
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocab, hidden_size=width, intermediate_size=8 * width // 3, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=groups, max_position_embeddings=4096,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def transformers_calls(model: Any, ids: np.ndarray, new: int) -> dict[str, dict[str, Call]]:
    import torch
    import transformers

    tokens = torch.from_numpy(ids)

    @torch.inference_mode()
    def prefill() -> np.ndarray:
        return model(tokens, use_cache=False).logits.numpy()

    @torch.inference_mode()
    def generate() -> np.ndarray:
        out = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new, min_new_tokens=new, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
        return out.numpy()

    @torch.inference_mode()
    def loop() -> np.ndarray:
        cache = transformers.DynamicCache(config=model.config)
        row, out = tokens, [tokens]
        for _ in range(new):
            row = model(row, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)
            out.append(row)
        return torch.cat(out, 1).numpy()

    return {"prefill": {"transformers": prefill}, "generate": {"transformers": generate, "transformers loop": loop}}


def torch_calls(folder: str, ids: np.ndarray, new: int) -> dict[str, Call]:
    import torch

    import backend_torch as B

    model, tokens = B.Transformer.from_pretrained(folder), torch.from_numpy(ids)

    @torch.inference_mode()
    def prefill() -> np.ndarray:
        return model(tokens).numpy()

    return {"prefill": prefill, "generate": lambda: B.generate(model, tokens, max_new=new).numpy()}


def jax_calls(folder: str, ids: np.ndarray, new: int) -> dict[str, Call]:
    import jax
    import jax.numpy as jnp
    from flax import nnx

    import backend_jax as B

    model, tokens = B.Transformer.from_pretrained(folder), jnp.asarray(ids, jnp.int32)
    graphdef, state = nnx.split(model)
    compiled = jax.jit(lambda state, tokens: nnx.merge(graphdef, state)(tokens))
    return {
        "prefill": lambda: np.asarray(compiled(state, tokens)),
        "generate": lambda: np.asarray(B.generate(model, tokens, max_new=new)),
    }


def take_turns(calls: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    """Seconds of each round of each call, one after the other in every round.

    Of the processor: with one thread it is what the wall clock shows on an idle machine, and others do not stretch it.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.process_time()
            call()
            times[name].append(time.process_time() - start)
    return times


def measure(size: str, batch: int, prompt: int, new: int, rounds: int) -> list[dict[str, Any]]:
    """One row per contestant and task; a contestant that does not agree is an error."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    home = home_model(size)
    ids = np.random.default_rng(0).integers(0, SIZES[size][4], (batch, prompt))
    tasks: dict[str, dict[str, Call]] = transformers_calls(home, ids, new)
    with tempfile.TemporaryDirectory() as folder:
        home.save_pretrained(folder)
        for name, make in (("torch", torch_calls), ("jax", jax_calls)):
            for task, call in make(folder, ids, new).items():
                tasks[task][name] = call
    rows = []
    for task, calls in tasks.items():
        want = calls["transformers"]()
        for name, call in calls.items():
            apart = np.abs(np.asarray(call(), np.float64) - want).max()
            if apart > (1e-3 if task == "prefill" else 0):
                raise RuntimeError(f"{name} does not agree with transformers in {task}: {apart:.2e} apart")
        times = take_turns(calls, rounds)
        medians = {name: statistics.median(seconds) for name, seconds in times.items()}
        best = min(median for name, median in medians.items() if name.startswith("transformers"))
        for name, median in medians.items():
            tokens = batch * (prompt if task == "prefill" else new)
            rows.append({
                "size": size, "batch": batch, "task": task, "contestant": name, "ms": median * 1e3,
                "tokens_per_second": tokens / median, "ratio": median / best, "rounds": times[name],
            })  # fmt: skip
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Print the table, or write the document."""
    name = "python -m conformance.race.decode"
    parser = Parser(
        prog=name, description=(__doc__ or "").split("\n")[0], epilog=f"example: {name} --size small --batch 4"
    )
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--batch", type=int, default=1, help="texts at once (1)")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt (128)")
    parser.add_argument("--new", type=int, default=64, help="tokens to write (64)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contestant (7)")
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON; - for standard output")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    asked = parser.parse_args(arguments)
    return ended(lambda: _run(asked), name, debug=asked.debug)


def _run(asked: argparse.Namespace) -> int:
    for option in ("batch", "prompt", "new", "rounds"):
        require_int(f"--{option}", getattr(asked, option), 1)
    # Before JAX and torch are imported: one thread each.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    import torch

    torch.set_num_threads(1)
    rows = measure(asked.size, asked.batch, asked.prompt, asked.new, asked.rounds)
    if asked.json:
        write_json(asked.json, {"schema": 1, "environment": environment(1), "rows": rows})
    if asked.json != "-":
        _show(rows, f"{asked.size}: {asked.batch} of prompt {asked.prompt}, {asked.new} new tokens, one thread")
    return 0


def _show(rows: list[dict[str, Any]], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for heading in ("task", "contestant", "ms", "tokens/s", "of transformers"):
        table.add_column(heading, justify="left" if heading in ("task", "contestant") else "right")
    for row in rows:
        table.add_row(
            row["task"],
            row["contestant"],
            f"{row['ms']:.1f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['ratio']:.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    raise SystemExit(main())
