"""torch on several processes against torch on one: the same losses, norms and parameters in every layout.

Dropout, accumulation, clipping, z-loss, smoothing, an average, a schedule and ragged rows are on (parallel_cases).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

HERE = Path(__file__).parent
# float64: a sum over processes is taken in another order, and a key bias, whose gradient is 0 but for rounding, is
# divided by its own size in AdamW. Measured on two and four processes over 20 steps: 1.8e-11 at most.
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


def expect_same(found: list[dict], count: int, tolerance: float = TOLERANCE) -> None:
    assert len(found) == count
    for row in found:
        assert row["counts"], row
        assert row["reports"] <= tolerance and row["params"] <= tolerance, row


def test_two_processes_train_as_one(tmp_path):
    layouts = [{"data": 2}, {"fsdp": 2}, {"tensor": 2}, {"context": 2}]
    expect_same(run(2, [{"parallel": layout, "steps": 2} for layout in layouts], tmp_path), 4)


@pytest.mark.slow
def test_what_does_not_fit_two_processes_is_refused_before_the_first_update(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(HERE)
    from parallel_cases import REFUSED

    (said,) = run(2, [{"do": "refused"}], tmp_path)
    for (*_, words), found in zip(REFUSED, said, strict=True):
        assert words in found


@pytest.mark.slow
@pytest.mark.parametrize("model", ["plain", "other"])
def test_two_processes_train_as_one_for_twenty_steps(tmp_path, model):
    layouts = [{"data": 2}, {"fsdp": 2}, {"tensor": 2}, {"context": 2}]
    expect_same(run(2, [{"parallel": layout, "model": model} for layout in layouts], tmp_path), 4)


@pytest.mark.slow
def test_four_processes_train_as_one_for_twenty_steps(tmp_path):
    layouts = [
        {"data": 2, "fsdp": 2}, {"fsdp": 2, "tensor": 2}, {"context": 4}, {"context": 2, "tensor": 2},
        {"fsdp": 2, "context": 2},
    ]  # fmt: skip
    expect_same(run(4, [{"parallel": layout} for layout in layouts], tmp_path), len(layouts))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_eight_processes_of_three_axes_train_as_one_and_their_checkpoint_resumes(tmp_path):
    three = {"fsdp": 2, "context": 2, "tensor": 2}
    other = {"data": 2, "fsdp": 2, "tensor": 2}
    jobs = [
        {"parallel": three, "steps": 3},
        {"parallel": {"data": 2, "context": 2, "tensor": 2}, "model": "other", "steps": 3},
        {"do": "resumed", "first": three, "then": other, "folder": str(tmp_path / "run")},
    ]
    *found, resumed = run(8, jobs, tmp_path)
    expect_same(found, 2)
    assert resumed["updates"] == 8 and resumed["params"] <= TOLERANCE


@pytest.mark.slow
def test_rows_are_measured_as_on_one_device_whatever_their_number(tmp_path):
    layouts = [{"data": 2, "fsdp": 2}, {"fsdp": 2, "tensor": 2}, {"context": 4}]
    for row in run(4, [{"do": "evaluated", "parallel": layout} for layout in layouts], tmp_path):
        assert row["apart"] <= TOLERANCE and row["counts"][0] == row["counts"][1] > 0, row


@pytest.mark.slow
def test_bfloat16_and_other_optimisers_are_spread_too(tmp_path):
    half = run(
        2, [{"parallel": p, "precision": "bfloat16", "steps": 3} for p in ({"fsdp": 2}, {"tensor": 2})], tmp_path
    )
    expect_same(half, 2, tolerance=3e-2)
    expect_same(run(2, [{"parallel": {"fsdp": 2}, "precision": "float32", "steps": 3}], tmp_path), 1, tolerance=3e-3)
    jobs = [{"parallel": {"fsdp": 2}, "optimizer": "sgd"}, {"parallel": {"tensor": 2}, "optimizer": "sgd"}]
    expect_same(run(2, jobs, tmp_path), 2)


@pytest.mark.slow
def test_keys_that_travel_in_shares_give_what_one_process_gives(tmp_path):
    models = [
        {},
        {"window": [5, 0], "positions": "relative", "sinks": True},
        {"kind": "encoder", "positions": "alibi", "window": [7, 4]},
    ]
    # Pieces of 13 and of 26 positions in eight shares of unlike size, with dropout, ragged rows and grouped heads.
    jobs = [{"do": "shared", "parallel": {"context": 2}, "model": model, "length": 52} for model in models]
    found = run(2, jobs, tmp_path)
    assert [len(row["shares"]) for row in found] == [8, 8, 8]
    assert {end - first for first, end in found[0]["shares"]} == {1, 2}
    assert max(row["apart"] for row in found) <= TOLERANCE, found


def expected(parallel: dict) -> dict[str, int]:
    """Kind -> bytes of one update of the small model, as the cost model counts them."""
    from parallel_cases import config_of

    from core_numpy.contract.communication import step_communication
    from core_numpy.contract.parallel import Layout

    table: dict[str, int] = {}
    for m in step_communication(config_of("small"), Layout(**parallel), 8, 8, itemsize=8, master=8, accumulate=2):
        table[m.kind] = table.get(m.kind, 0) + m.times * m.bytes
    return table


@pytest.mark.slow
def test_what_torch_sends_is_what_the_cost_model_counts(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(HERE)
    layouts = [{"data": 2}, {"fsdp": 2}, {"tensor": 2}, {"context": 2}]
    for row in run(2, [{"do": "sent", "parallel": layout} for layout in layouts], tmp_path):
        want, got = expected(row["parallel"]), {kind: found["bytes"] for kind, found in row["sent"].items()}
        assert want.keys() == got.keys(), row
        for kind, size in want.items():
            # Buffers are filled up to whole vectors and equal shards: some hundred bytes of a model this small.
            assert 0 <= got[kind] - size <= 0.03 * size, (row, kind, size)


@pytest.mark.slow
def test_with_a_window_up_to_a_piece_processes_send_to_their_neighbours_alone(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(HERE)
    from parallel_cases import config_of

    from core_numpy.contract.communication import ring_steps

    jobs = [{"do": "partners", "window": window, "length": 32} for window in ([4, 0], None)]
    near, far = run(4, jobs, tmp_path)
    # Pieces of 4 positions: process c has pieces c and 7 - c. The neighbours of 0 and of 3 are 1 and 2 alone.
    assert [sorted(set(to)) for to in near["to"]] == [[1], [0, 2], [1, 3], [2]]
    assert [sorted(set(to)) for to in far["to"]] == [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]]
    # Keys and values forward, once more backward, and their gradients back: two arrays each, in two micro-batches.
    each = [6 * 2 * n for n in (ring_steps(config_of("small").replace(window=(4, 0)), 4, 32, causal=True), 3)]
    assert max(map(len, near["to"])) == each[0] and [len(to) for to in far["to"]] == [each[1]] * 4


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def test_a_process_that_does_not_come_is_named(monkeypatch):
    from backend_torch.processes import connect

    for name, value in {"RANK": 0, "WORLD_SIZE": 3, "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(TimeoutError, match=r"process 1, 2 of 3 has not come within 1 s"):
        connect({}, torch.device("cpu"), timeout=1)


def test_without_process_0_the_others_name_it(monkeypatch):
    from backend_torch.processes import connect

    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(TimeoutError, match=r"process 0 of 2 has not come within 1 s"):
        connect({}, torch.device("cpu"), timeout=1)


def test_who_does_not_come_is_one_line_of_the_command_and_exit_status_2(monkeypatch, tmp_path, capsys):
    import backend_torch as B
    from backend_torch import processes
    from core_numpy.contract.cli import main

    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(processes, "connect", partial(processes.connect, timeout=1))
    assert main(B, ["train", "--steps", "1", "--parallel", "data=2", "--out", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err == "error: process 1 of 2 has not come within 1 s\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "needs the processes that torchrun starts"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": ""}, "needs MASTER_ADDR, MASTER_PORT in the environment"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, "RANK must be a number b"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "x"}, "'MASTER_PORT': 'x'"),
    ],
)
def test_what_torchrun_would_set_is_asked_for_by_name(environment, words, monkeypatch):
    from backend_torch.processes import connect

    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words):
        connect({}, torch.device("cpu"), timeout=1)


@pytest.mark.slow
def test_processes_with_other_configurations_or_versions_refuse_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(HERE)
    from parallel_cases import check_unlike

    check_unlike([sys.executable, str(HERE / "parallel_torch.py"), str(tmp_path / "out")], {"MASTER_ADDR": "localhost"})


@pytest.mark.slow
def test_a_checkpoint_resumes_in_another_layout_and_in_the_other_packages(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    jobs = [
        {"do": "resumed", "first": {"fsdp": 2}, "then": {"tensor": 2}, "folder": str(folder)},
        {"do": "resumed", "first": {"tensor": 2}, "then": {"fsdp": 2}, "folder": str(tmp_path / "other")},
        {"do": "resumed", "first": {"data": 2}, "then": None, "folder": str(tmp_path / "one")},
    ]
    for row in run(2, jobs, tmp_path):
        assert row["updates"] == 8 and row["params"] <= TOLERANCE
    monkeypatch.syspath_prepend(HERE)
    from parallel_cases import apart, batches

    import core_numpy as C

    reference = C.Trainer.load(folder)
    assert reference.updates == 5 and reference.config.parallel is None
    for batch in batches(8)[5:]:
        reference.step(batch)
    import backend_torch as B

    alone = B.Trainer.load(folder)
    for batch in batches(8)[5:]:
        alone.step(batch)
    assert apart(C.get_params(reference.model), B.get_params(alone.model)) <= TOLERANCE


@pytest.mark.slow
def test_a_checkpoint_of_two_axes_at_once_resumes_in_two_others(tmp_path):
    layouts = [
        ({"fsdp": 2, "tensor": 2}, {"fsdp": 2, "context": 2}),
        ({"data": 2, "fsdp": 2}, {"fsdp": 2, "tensor": 2}),
        ({"context": 2, "tensor": 2}, {"fsdp": 4}),
    ]
    jobs = [
        {"do": "resumed", "first": first, "then": then, "folder": str(tmp_path / str(n))}
        for n, (first, then) in enumerate(layouts)
    ]
    found = run(4, jobs, tmp_path)
    assert [row["updates"] for row in found] == [8, 8, 8]
    assert max(row["params"] for row in found) <= TOLERANCE, found


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"data": 2}, {"fsdp": 2}, {"context": 2}])
def test_when_a_process_is_killed_the_others_say_so_inside_a_minute_and_the_checkpoint_resumes(tmp_path, parallel):
    folder = tmp_path / "run"
    job = json.dumps({"do": "killed", "parallel": parallel, "folder": str(folder)})
    port = str(free_port())
    started = [
        subprocess.Popen(
            [sys.executable, str(HERE / "parallel_torch.py"), str(tmp_path / "out.json"), job],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1]), "RANK": str(rank),
                 "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port},
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    words = [process.communicate(timeout=280)[1] for process in started]
    assert started[1].returncode == -9, words[1][-2000:]
    said = json.loads((folder / "said-0.json").read_text())
    assert said["seconds"] < 60
    assert "process 0 of 2 waited for another one that has gone" in said["said"] and "at update 4" in said["said"]
    import backend_torch as B

    assert B.Trainer.load(folder).updates == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(3))
def test_whenever_a_process_is_killed_the_others_say_so_and_what_was_saved_last_resumes(tmp_path, monkeypatch, seed):
    monkeypatch.syspath_prepend(HERE)
    from parallel_cases import batches, killed_at_random

    folder = tmp_path / "run"
    job = json.dumps({"do": "until", "parallel": {"fsdp": 2}, "folder": str(folder)})
    command = [sys.executable, str(HERE / "parallel_torch.py"), str(tmp_path / "out.json"), job]
    said = killed_at_random(command, {"MASTER_ADDR": "localhost"}, folder, seed)
    assert "of 2 waited for another one that has gone" in said and "at update" in said
    import backend_torch as B

    trainer = B.Trainer.load(folder)
    assert trainer.updates >= 1 and trainer.step(batches(1)[0])["loss"] > 0


@pytest.mark.slow
def test_the_command_line_trains_on_several_processes_and_prints_what_one_prints(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
    train = ["-m", "backend_torch", "train", "--steps", "4", "--plain", "--batch", "4"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    runs = {"one": [sys.executable], "two": launch}
    losses = {}
    for name, start in runs.items():
        spread = ["--parallel", "fsdp=2"] if name == "two" else []
        done = subprocess.run(
            [*start, *train, *spread, "--out", str(tmp_path / name)], env=environment, cwd=tmp_path,
            capture_output=True, text=True, timeout=280,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        rows = [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        losses[name] = [row["loss"] for row in rows]
        assert (tmp_path / name / "step-00000004" / "checkpoint.json").is_file()
        assert done.stdout.count("validation: loss") == 1
    assert len(losses["two"]) == 4
    assert losses["two"] == pytest.approx(losses["one"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ctrl_c_of_one_process_ends_the_others_after_the_same_update_and_saves(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(HERE)
    from parallel_cases import check_interrupted_together

    check_interrupted_together("backend_torch", tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("package", ["backend_torch", "backend_jax"])
def test_the_program_of_the_page_on_scaling_runs_on_four_devices_of_either_framework(tmp_path, package):
    pytest.importorskip(package.replace("backend_", ""))
    page = (HERE.parents[1] / "docs" / "scaling.md").read_text(encoding="utf-8")
    program = page.split("```python devices\n")[1].split("```")[0].replace("backend_torch as", f"{package} as")
    (tmp_path / "train.py").write_text(program)
    start = [sys.executable]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
    if package == "backend_torch":
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    else:
        environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = subprocess.run(
        [*start, "train.py"], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("'loss'") == 10 and (tmp_path / "runs" / "mine" / "step-00000010").is_dir()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ctrl_c_ends_all_processes_after_the_same_update_and_saves(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    train = ["-m", "backend_torch", "train", "--steps", "100000", "--plain", "--batch", "4", "--parallel", "data=2"]
    process = subprocess.Popen(
        [*launch, *train, "--out", str(tmp_path / "run")], env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if line.startswith("step"):
            break
    # As a terminal does: to the launcher and to whatever it started, and the launcher passes it on.
    os.killpg(process.pid, signal.SIGINT)
    said += process.communicate(timeout=280)[0]
    (folder,) = (tmp_path / "run").glob("step-*")
    assert f"interrupted: saved {tmp_path / 'run'} after update {int(folder.name[5:])}" in said, said[-3000:]
    assert "forcefully exiting" not in said and "waited for another one" not in said, said[-3000:]
    import backend_torch as B

    assert B.Trainer.load(tmp_path / "run").updates == int(folder.name[5:]) > 0
