"""Our modules inside torch's own data parallelism: two processes on halves of a batch are one on the whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
CHILD = """
import os, sys, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
import backend_torch as B

def model(kind):
    if kind == "block":
        return B.Block(B.BlockConfig(width=16, heads=4), seed=1, dtype="float64")
    return B.Transformer(B.ModelConfig(vocab=11, width=16, heads=4, layers=2, max_length=9), seed=1, dtype="float64")

def loss_of(kind, module, rows):
    g = torch.Generator().manual_seed(0)
    if kind == "block":
        x = torch.randn(4, 5, 16, generator=g, dtype=torch.float64)[rows]
        return (module(x) - x.flip(1)).square().mean()
    tokens = torch.randint(0, 11, (4, 6), generator=g)[rows]
    return torch.nn.functional.cross_entropy(module(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())

def train(kind, wrap, rows):
    module = model(kind)
    wrapped = wrap(module)
    optimiser = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for _ in range(5):
        optimiser.zero_grad()
        loss_of(kind, wrapped, rows).backward()
        optimiser.step()
    return B.get_params(module)

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
for kind in ("block", "transformer"):
    mine = train(kind, DDP, slice(2 * rank, 2 * rank + 2))
    whole = train(kind, lambda m: m, slice(0, 4))
    apart = max(abs(mine[n] - whole[n]).max() for n in whole)
    half = train(kind, lambda m: m, slice(0, 2))
    assert apart < 1e-10 < max(abs(half[n] - whole[n]).max() for n in whole), (kind, apart)
    print("same", kind, flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_of_torchs_ddp_train_as_one(tmp_path):
    def start(rank):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return subprocess.Popen(
            [sys.executable, "-c", CHILD], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **place},
        )  # fmt: skip

    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = [start(rank) for rank in (0, 1)]
    for child in children:
        out, err = child.communicate(timeout=200)
        assert child.returncode == 0, err
        assert out.split("\n")[:2] == ["same block", "same transformer"]
