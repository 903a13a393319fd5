"""torch on several processes against torch on one: the same losses, norms and parameters in every layout.

Dropout, accumulation, clipping, z-loss, smoothing, an average, a schedule and ragged rows are on (parallel_cases).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

HERE = Path(__file__).parent
# float64: a sum over processes is taken in another order, and a key bias, whose gradient is 0 but for rounding, is
# divided by its own size in AdamW. Measured 3e-13 at most over 20 steps.
TOLERANCE = 1e-10


def run(processes: int, jobs: list[dict], tmp_path: Path) -> list[dict]:
    """What the jobs gave on so many processes; torchrun starts them."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = subprocess.run(
        [*command, str(HERE / "parallel_torch.py"), str(tmp_path / "out.json"), *map(json.dumps, jobs)],
        env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((tmp_path / "out.json").read_text())


def judge(found: list[dict], count: int, tolerance: float = TOLERANCE) -> None:
    assert len(found) == count
    for row in found:
        assert row["counts"], row
        assert row["reports"] <= tolerance and row["params"] <= tolerance, row


def test_two_processes_train_as_one(tmp_path):
    layouts = [{"data": 2}, {"fsdp": 2}, {"tensor": 2}]
    judge(run(2, [{"parallel": layout, "steps": 3} for layout in layouts], tmp_path), 3)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["plain", "other"])
def test_two_processes_train_as_one_for_twenty_steps(tmp_path, model):
    layouts = [{"data": 2}, {"fsdp": 2}, {"tensor": 2}]
    judge(run(2, [{"parallel": layout, "model": model} for layout in layouts], tmp_path), 3)


@pytest.mark.slow
def test_four_processes_train_as_one_for_twenty_steps(tmp_path):
    layouts = [{"data": 4}, {"data": 2, "fsdp": 2}, {"fsdp": 2, "tensor": 2}]
    judge(run(4, [{"parallel": layout} for layout in layouts], tmp_path), 3)


@pytest.mark.slow
def test_bfloat16_and_other_optimisers_are_spread_too(tmp_path):
    half = run(
        2, [{"parallel": p, "precision": "bfloat16", "steps": 3} for p in ({"fsdp": 2}, {"tensor": 2})], tmp_path
    )
    judge(half, 2, tolerance=3e-2)
    jobs = [{"parallel": {"fsdp": 2}, "optimizer": "sgd"}, {"parallel": {"tensor": 2}, "optimizer": "sgd"}]
    judge(run(2, jobs, tmp_path), 2)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def test_a_process_that_does_not_come_is_named(monkeypatch):
    from backend_torch.parallel import connect

    for name, value in {"RANK": 0, "WORLD_SIZE": 3, "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(TimeoutError, match=r"process 1, 2 of 3 has not come within 1 s"):
        connect({}, torch.device("cpu"), timeout=1)
