"""GPT-2 and Llama of `transformers` with sdpa; the weights go over as a folder that its `from_pretrained` reads."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

from ..task import SEED, Task
from .base import Contestant, Running


def _build(family: str, compiled: bool) -> Callable[[Task], Running]:
    def build(task: Task) -> Running:
        import torch
        import transformers

        import core_numpy

        from ._torch import running

        transformers.logging.set_verbosity_error()
        with tempfile.TemporaryDirectory() as folder:
            core_numpy.Transformer(task.model, seed=SEED).save_pretrained(folder, family=family)
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                folder, attn_implementation="sdpa", dtype=torch.float32
            )
        if task.remat:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.generation_config.pad_token_id = 0

        def decode(prompts: np.ndarray, new: int) -> torch.Tensor:
            tokens = torch.from_numpy(prompts).to(task.device, torch.int64)
            model.eval()
            out = model.generate(
                tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new, min_new_tokens=new, do_sample=False
            )
            model.train()
            return out

        return running(
            model,
            lambda tokens: model(tokens, use_cache=False).logits,
            task,
            compiled=compiled,
            decode=decode,
        )

    return build


def _contestants(name: str, family: str, title: str, architecture: str) -> list[Contestant]:
    offers, needs = frozenset({"bfloat16", "remat", "decode"}), ("torch", "transformers")
    made = []
    for compiled in (False, True):
        note = f"transformers {title}, sdpa, {'torch.compile' if compiled else 'eager'}"
        full = f"{name}-compiled" if compiled else name
        build = _build(family, compiled)
        made.append(Contestant(full, build, needs, note, "torch", compiled, False, (architecture,), offers))
    return made


CONTESTANTS = [*_contestants("hf-gpt2", "gpt2", "GPT-2", "gpt"), *_contestants("hf-llama", "llama", "Llama", "llama")]
