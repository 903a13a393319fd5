"""The examples of docs/training.md, run as they stand there."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from three import load

PAGE = Path(__file__).resolve().parents[2] / "docs" / "training.md"
if not PAGE.exists():
    pytest.skip("the pages are not part of an installed package", allow_module_level=True)
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def example(words):
    (found,) = (text for text in EXAMPLES if words in text)
    return found


def run(text, **names):
    exec(compile(text, str(PAGE), "exec"), names)
    return names


def test_the_page_has_the_examples_that_are_tested_here():
    assert len(EXAMPLES) == 5


def test_the_trainer_saves_and_the_reference_goes_on(tmp_path, monkeypatch):
    load("backend_torch")
    monkeypatch.chdir(tmp_path)
    names = run(example("prefetch("))
    assert len(names["reports"]) == 4 and os.fspath(names["where"]) == "run/step-00000004"
    assert run(example("import core_numpy as C"))["again"].batches == 4


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own compiler, while it is imported
def test_a_block_trains_in_a_torch_users_own_loop(backend, monkeypatch):
    load("backend_torch")
    import torch

    torch._dynamo.reset()
    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda module: plain(module, backend=backend))
    names = run(example("torch.compile(block)"))
    assert names["losses"][-1] < 0.9 * names["losses"][0] and names["compiled"] is not names["block"]


def test_a_block_trains_in_a_flax_users_own_loop():
    load("backend_jax")
    pytest.importorskip("optax")
    assert run(example("@nnx.jit"))["losses"][-1] < 1.5


@pytest.mark.slow
def test_a_block_trains_as_a_linen_module():
    load("backend_jax")
    pytest.importorskip("optax")
    assert run(example("linen.compact"))["losses"][-1] < 1.5
