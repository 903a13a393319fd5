"""JAX on several devices against JAX on one: the same losses, norms and parameters in every layout.

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

jax = pytest.importorskip("jax")

HERE = Path(__file__).parent
# float64: as for torch (test_parallel_torch). Measured over three steps: 4e-13 at most.
TOLERANCE = 1e-10
# Compiling is nearly all of the time here; what XLA leaves out changes sums in their last bits.
FAST = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}


def command(devices: int, jobs: list[dict], out: Path) -> list[str]:
    return [sys.executable, str(HERE / "parallel_jax.py"), str(out), str(devices), *map(json.dumps, jobs)]


def run(devices: int, jobs: list[dict], tmp_path: Path) -> list[dict]:
    """What the jobs gave on so many devices of one process."""
    environment = {**os.environ, **FAST, "PYTHONPATH": str(HERE.parents[1])}
    done = subprocess.run(
        command(devices, jobs, tmp_path / "out.json"), env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((tmp_path / "out.json").read_text())


def run_processes(count: int, devices: int, jobs: list[dict], tmp_path: Path) -> list[dict]:
    """The same in `count` processes with `devices` devices each, connected by jax.distributed."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = str(s.getsockname()[1])
    environment = {**os.environ, **FAST, "PYTHONPATH": str(HERE.parents[1]), "MASTER_PORT": port}
    started = [
        subprocess.Popen(
            command(devices, jobs, tmp_path / "out.json"),
            env={**environment, "RANK": str(rank), "WORLD_SIZE": str(count)}, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(count)
    ]  # fmt: skip
    words = [process.communicate(timeout=800)[1] for process in started]
    assert all(process.returncode == 0 for process in started), words[0][-2000:] + words[-1][-2000:]
    return json.loads((tmp_path / "out.json").read_text())


def expect_same(found: list[dict], count: int) -> None:
    assert len(found) == count
    for row in found:
        assert row["counts"], row
        assert row["reports"] <= TOLERANCE and row["params"] <= TOLERANCE, row


def test_two_devices_train_as_one_and_their_ring_gives_the_whole(tmp_path):
    small = {"model": "small", "steps": 2}
    cases = [{"least": 1, "more": True, "window": [3, 0]}, {"more": True, "causal": False}]
    *trained, resumed, ring = run(
        2,
        [
            {"parallel": {"fsdp": 2}, **small},
            {"parallel": {"context": 2}, **small},
            {"do": "resumed", "first": {"tensor": 2}, "then": {"data": 2}, "folder": str(tmp_path / "run")},
            {"do": "ring", "cases": cases, "length": 16},
        ],
        tmp_path,
    )
    expect_same(trained, 2)
    assert resumed["updates"] == 3 and resumed["params"] <= TOLERANCE
    assert [row["shares"] for row in ring] == [4, 1]
    assert max(row["apart"] for row in ring) <= 1e-13, ring


@pytest.mark.slow
def test_what_does_not_fit_two_devices_is_refused_before_the_first_update(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(HERE)
    from parallel_cases import REFUSED

    (said,) = run(2, [{"do": "refused"}], tmp_path)
    for (*_, words), found in zip(REFUSED, said, strict=True):
        assert words in found


@pytest.mark.slow
@pytest.mark.parametrize("model", ["plain", "other"])
def test_two_devices_train_as_one_for_twenty_steps(tmp_path, model):
    layouts = [{"data": 2}, {"fsdp": 2}, {"tensor": 2}, {"context": 2}]
    expect_same(run(2, [{"parallel": layout, "model": model} for layout in layouts], tmp_path), 4)


@pytest.mark.slow
def test_four_devices_train_as_one_for_twenty_steps(tmp_path):
    layouts = [
        {"data": 2, "fsdp": 2}, {"fsdp": 2, "tensor": 2}, {"context": 2, "tensor": 2}, {"fsdp": 2, "context": 2},
    ]  # fmt: skip
    expect_same(run(4, [{"parallel": layout} for layout in layouts], tmp_path), len(layouts))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_eight_devices_of_three_axes_train_as_one(tmp_path):
    layouts = [{"fsdp": 2, "context": 2, "tensor": 2}, {"data": 2, "context": 2, "tensor": 2}]
    expect_same(run(8, [{"parallel": layout, "steps": 3} for layout in layouts], tmp_path), 2)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rows_are_measured_as_on_one_device_whatever_their_number(tmp_path):
    layouts = [{"data": 2, "fsdp": 2}, {"fsdp": 2, "tensor": 2}, {"context": 4}]
    jobs = [{"do": "evaluated", "parallel": layout, "model": "small"} for layout in layouts]
    for row in run(4, jobs, tmp_path):
        assert row["apart"] <= TOLERANCE and row["counts"][0] == row["counts"][1] > 0, row


def counted(parallel: dict, **more) -> dict[str, int]:
    """Kind -> bytes of one update of the small model in float64, as the cost model counts them."""
    from parallel_cases import config_of

    from core_numpy.contract.communication import step_communication
    from core_numpy.contract.parallel import Layout

    table: dict[str, int] = {}
    for m in step_communication(config_of("small"), Layout(**parallel), 8, 16, itemsize=8, master=8, **more):
        table[m.kind] = table.get(m.kind, 0) + m.times * m.bytes
    return table


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_xla_sends_is_what_the_cost_model_counts(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(HERE)
    layouts = [{"data": 4}, {"fsdp": 4}, {"tensor": 2, "data": 2}, {"context": 4}]
    found = run(4, [{"do": "compiled", "parallel": layout} for layout in layouts], tmp_path)
    for layout, row in zip(layouts, found, strict=True):
        # Parameters stay where they were gathered; on a CPU a scattered sum is a sum, of which each keeps its part.
        want = counted(layout, gathers=1)
        want |= {"all-reduce": want.pop("reduce-scatter", 0) + want.get("all-reduce", 0)}
        if "send" in want:
            want["collective-permute"] = want.pop("send")
        got = {kind: said["bytes"] for kind, said in row["sent"].items()}
        assert got.keys() == want.keys(), (layout, got, want)
        for kind, size in want.items():
            # Beyond that loss, counts and norms, and the few parameters that fsdp does not divide.
            assert 0 <= got[kind] - size <= 0.05 * size, (layout, kind, got, want)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_with_a_window_up_to_a_piece_devices_send_to_their_neighbours_alone(tmp_path):
    jobs = [{"do": "compiled", "parallel": {"context": 4}, "window": w, "length": 32} for w in ([4, 0], None)]
    near, far = run(4, jobs, tmp_path)
    assert {tuple(pair) for pair in near["routes"]} == {(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)}
    # Without a window keys go from hand to hand, all the way round.
    assert {tuple(pair) for pair in far["routes"]} == {(0, 1), (1, 2), (2, 3), (3, 0)}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_however_keys_travel_all_devices_together_give_the_whole(tmp_path):
    # Pieces of 2 positions where causal and of 4 where not: where nobody needs a step's keys, nothing is sent.
    legs = {
        '{"window": null}': [[1, 7]],
        '{"window": [2, 0]}': [[1, 1], [-1, 1]],
        '{"window": [4, 0]}': [[1, 2], [-1, 2]],
        '{"causal": false, "window": [5, null]}': [[1, 7]],
        '{"causal": false, "window": [5, 0]}': [[1, 2]],
        '{"causal": false, "window": [0, 9]}': [[-1, 3]],
        '{"causal": false, "window": [5, 4]}': [[1, 2], [-1, 1]],
        '{"causal": false, "window": [0, 0]}': [],
        '{"window": null, "more": true}': [[1, 7]],
        '{"window": [4, 0], "more": true}': [[1, 2], [-1, 2]],
    }
    found = run(8, [{"do": "ring", "cases": [json.loads(case) for case in legs], "length": 32}], tmp_path)[0]
    assert [row["legs"] for row in found] == list(legs.values())
    assert max(row["apart"] for row in found) <= 1e-13, found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_keys_that_travel_in_shares_give_the_whole(tmp_path):
    # Pieces of 12 positions in 6 shares of 2 where causal, of 24 in 8 of 3 where not.
    cases = [
        {"least": 1},
        {"least": 1, "more": True, "window": [17, 0]},
        {"least": 1, "more": True, "causal": False, "window": [9, 30]},
        {"least": 5, "more": True},
    ]
    found = run(4, [{"do": "ring", "cases": cases, "length": 96}], tmp_path)[0]
    assert [row["shares"] for row in found] == [6, 6, 8, 2]
    assert max(row["apart"] for row in found) <= 1e-13, found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_of_two_devices_train_as_one(tmp_path):
    expect_same(run_processes(2, 2, [{"parallel": {"data": 2, "fsdp": 2}, "model": "small", "steps": 3}], tmp_path), 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_checkpoint_of_two_processes_resumes_in_another_layout_and_in_the_reference(tmp_path, monkeypatch):
    job = {"do": "resumed", "first": {"fsdp": 2}, "then": {"tensor": 2}, "folder": str(tmp_path / "run")}
    (row,) = run_processes(2, 1, [job], tmp_path)
    assert row["files"] == ["checkpoint.json", "shard-00000.safetensors", "shard-00001.safetensors"]
    assert row["updates"] == 3 and row["params"] <= TOLERANCE
    monkeypatch.syspath_prepend(HERE)
    import core_numpy as C

    assert C.Trainer.load(tmp_path / "run").updates == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_checkpoint_of_torch_on_four_processes_goes_on_on_two_devices_of_jax_and_then_in_the_reference(
    tmp_path, monkeypatch
):
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(HERE)
    from parallel_cases import apart, batches, config_of, train_of
    from test_parallel_torch import run as run_torch

    import core_numpy as C

    folder = str(tmp_path / "run")
    run_torch(4, [{"do": "saved", "parallel": {"fsdp": 2, "tensor": 2}, "folder": folder}], tmp_path)
    (row,) = run(2, [{"do": "continued", "parallel": {"context": 2}, "folder": folder}], tmp_path)
    assert row["updates"] == 3 and row["params"] <= TOLERANCE, row
    found = C.Trainer.load(folder)
    alone = C.Trainer(C.Transformer(config_of("small"), seed=3, dtype="float64"), train_of(None))
    for batch in batches(3):
        alone.step(batch)
    assert found.updates == 3 and apart(C.get_params(alone.model), C.get_params(found.model)) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_checkpoint_of_two_axes_at_once_resumes_in_two_others(tmp_path):
    layouts = {"first": {"fsdp": 2, "tensor": 2}, "then": {"data": 2, "context": 2}}
    (row,) = run(4, [{"do": "resumed", **layouts, "folder": str(tmp_path / "run")}], tmp_path)
    assert row["updates"] == 3 and row["params"] <= TOLERANCE, row


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_a_device_holds_of_65536_positions_falls_as_their_number_grows(tmp_path, monkeypatch):
    """Read off the programs: what XLA sets aside on each of 2, 4 and 8 devices, arguments and results included."""
    monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS", raising=False)
    monkeypatch.setitem(FAST, "JAX_DISABLE_MOST_OPTIMIZATIONS", "0")
    one, two, four, eight = run(8, [{"do": "room", "counts": [1, 2, 4, 8], "length": 65536}], tmp_path)[0]
    # Blocks of scores and the shares that travel are the same on any number; the rest is halved.
    assert 1.8 <= (two - four) / (four - eight) <= 2.2 and two / one <= 0.6, (one, two, four, eight)
