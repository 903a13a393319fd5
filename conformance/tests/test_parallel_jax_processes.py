"""JAX on several processes: who does not come is named, and what happens where one dies in the middle of a run."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

jax = pytest.importorskip("jax")
processes = pytest.importorskip("backend_jax.processes")

HERE = Path(__file__).parent


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


@pytest.fixture
def initialised(monkeypatch):
    """What jax.distributed was asked for; it is not asked here, where JAX runs already."""
    asked = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *words, **more: asked.append((words, more)))
    return asked


def meet(ranks: list[int], count: int, timeout: float, says: dict[int, int] | None = None) -> dict[int, str]:
    """What each of `ranks` ends with; a number in `says` is what it calls itself, or how many it believes in."""
    port, ended = free_port(), {}

    def come(rank: int) -> None:
        try:
            processes.connect(f"localhost:{port}", count, (says or {}).get(rank, rank), timeout=timeout)
            ended[rank] = "connected"
        except (TimeoutError, ValueError) as error:
            ended[rank] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=come, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return ended


def test_processes_that_have_all_come_are_connected_by_jax_itself(initialised):
    assert meet([2, 0, 1], 3, 20) == dict.fromkeys(range(3), "connected")
    assert sorted(words[2] for words, _ in initialised) == [0, 1, 2]
    assert all(more["heartbeat_timeout_seconds"] < 60 for _, more in initialised)


def test_a_process_that_does_not_come_is_named_to_all_that_have(initialised):
    said = "TimeoutError: process 1, 3 of 4 has not come within 3 s"
    assert meet([0, 2], 4, 3) == {0: said, 2: said} and not initialised


def test_without_process_0_the_others_name_it(initialised):
    assert meet([1], 2, 1) == {1: "TimeoutError: process 0 of 2 has not come within 1 s"}


def test_a_number_that_two_processes_have_is_refused_and_the_missing_one_is_named(initialised):
    ended = meet([0, 1, 2], 3, 2, says={2: 1})
    assert ended[0] == "TimeoutError: process 2 of 3 has not come within 2 s"
    assert sorted(ended[rank].split(":")[0] for rank in (1, 2)) == ["TimeoutError", "ValueError"]
    assert any("did not take rank 1" in said for said in ended.values())


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("localhost:1", 2, 2), ValueError, r"rank must be from 0 to processes - 1 \(1\); got 2"),
        (("localhost:1", 2, -1), ValueError, "rank must be"),
        (("localhost:1", 0, 0), ValueError, "processes must be"),
        (("localhost:1", 2, "0"), TypeError, "rank must be"),
        (("localhost", 2, 0), ValueError, "coordinator must be host:port"),
        ((":80", 2, 0), ValueError, "coordinator must be host:port"),
        (("host:port", 2, 0), ValueError, "coordinator must be host:port"),
    ],
)
def test_wrong_arguments_of_connect_are_refused(arguments, error, words, initialised):
    with pytest.raises(error, match=words):
        processes.connect(*arguments)
    assert not initialised


@pytest.fixture
def environment(monkeypatch):
    """Sets the variables by which a process is told who it is, and no others of them."""

    def put(**values):
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return put


def test_a_command_joins_the_processes_that_its_environment_speaks_of(environment, monkeypatch):
    asked = []
    monkeypatch.setattr(processes, "connect", lambda *words: asked.append(words))
    environment()
    processes.join()
    environment(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="80")
    processes.join()
    assert not asked
    environment(RANK="2", WORLD_SIZE="3", MASTER_ADDR="10.0.0.1", MASTER_PORT="1234")
    processes.join()
    assert asked == [("10.0.0.1:1234", 3, 2)]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"RANK": "0"}, "config.parallel needs WORLD_SIZE, MASTER_ADDR, MASTER_PORT in the environment"),
        (
            {"RANK": "3", "WORLD_SIZE": "3", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "RANK must be a number below WORLD_",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"},
            "torchrun must not start processes of JAX: it keeps MASTER_PORT for itself",
        ),
    ],
)
def test_an_environment_that_names_no_processes_is_refused(values, words, environment, initialised):
    environment(**values)
    with pytest.raises(ValueError, match=words):
        processes.join()
    assert not initialised


def test_who_does_not_come_is_one_line_of_the_command_and_exit_status_2(environment, monkeypatch, tmp_path, capsys):
    from functools import partial

    import backend_jax
    from core_numpy.contract.cli import main

    environment(RANK="0", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=str(free_port()))
    monkeypatch.setattr(processes, "connect", partial(processes.connect, timeout=1))
    words = ["train", "--steps", "1", "--parallel", "data=2", "--out", str(tmp_path / "run")]
    assert main(backend_jax, words, join=processes.join) == 2
    assert capsys.readouterr().err == "error: process 1 of 2 has not come within 1 s\n"
    assert not (tmp_path / "run").exists()


def test_a_port_that_somebody_has_is_said(initialised):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"port that is free on process 0's machine; {port} is taken"):
            processes.connect(f"localhost:{port}", 2, 0, timeout=1)
    assert not initialised


def test_a_broken_connection_is_said_whatever_jax_raises_and_a_wrong_argument_stays_one(monkeypatch):
    from backend_jax.parallel import ParallelTrainer

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    trainer = object.__new__(ParallelTrainer)
    trainer.updates = 3
    words = "UNKNOWN: Gloo AllGather failed: [pair.cc:538] Read error: Connection reset by peer"
    for error in (ValueError(words), jax.errors.JaxRuntimeError(words)):
        said = r"process 0 of 2 waited for another one that has gone.*update 4"
        with pytest.raises(ConnectionError, match=said), trainer._answered():
            raise error
    with pytest.raises(ValueError, match=r"^tokens must be"), trainer._answered():
        raise ValueError("tokens must be integers; got Gloo")


def start(count: int, job: dict, out: Path, port: int, rank: int, devices: int = 1) -> subprocess.Popen:
    environment = {
        **os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(HERE.parents[1]), "MASTER_PORT": str(port), "WORLD_SIZE": str(count), "RANK": str(rank),
    }  # fmt: skip
    command = [sys.executable, str(HERE / "parallel_jax.py"), str(out), str(devices), json.dumps(job)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", [0, 1])
def test_when_a_process_is_killed_the_others_end_inside_a_minute_and_the_checkpoint_resumes(tmp_path, victim):
    folder, port = tmp_path / "run", free_port()
    job = {"do": "killed", "parallel": {"fsdp": 2}, "folder": str(folder), "victim": victim}
    started = [start(2, job, tmp_path / "out.json", port, rank) for rank in range(2)]
    words = [process.communicate(timeout=800)[1] for process in started]
    ended = time.time()
    assert started[victim].returncode == -signal.SIGKILL, words[victim][-2000:]
    other = 1 - victim
    assert started[other].returncode not in (0, None)
    assert ended - float((folder / "killed.txt").read_text()) < 60
    assert f"ConnectionError: process {other} of 2 waited for another one that has gone" in words[other]
    assert "at update 3: start the run again from its last checkpoint" in words[other]
    import core_numpy as C

    again = C.Trainer.load(folder)
    assert again.updates == 2 and all(np.isfinite(x).all() for x in C.get_params(again.model).values())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(2))
def test_whenever_a_process_is_killed_the_others_say_so_and_what_was_saved_last_resumes(tmp_path, monkeypatch, seed):
    monkeypatch.syspath_prepend(HERE)
    from parallel_cases import batches, killed_at_random

    folder = tmp_path / "run"
    job = json.dumps({"do": "until", "parallel": {"fsdp": 2}, "folder": str(folder)})
    command = [sys.executable, str(HERE / "parallel_jax.py"), str(tmp_path / "out.json"), "1", job]
    more = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_PLATFORMS": "cpu"}
    said = killed_at_random(command, more, folder, seed)
    assert "of 2 waited for another one that has gone" in said and "at update" in said
    import core_numpy as C

    trainer = C.Trainer.load(folder)
    assert trainer.updates >= 1 and trainer.step(batches(1)[0])["loss"] > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_processes_with_other_configurations_or_versions_refuse_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(HERE)
    from parallel_cases import check_unlike

    command = [sys.executable, str(HERE / "parallel_jax.py"), str(tmp_path / "out.json"), "1"]
    check_unlike(command, {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_PLATFORMS": "cpu"})


def together(words: list[str], other: list[str], tmp_path: Path) -> list[tuple[int, str, str]]:
    """Exit status and both outputs of two processes of `python -m backend_jax train`, each with its words."""
    environment = {
        **os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(HERE.parents[1]), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    train = [sys.executable, "-m", "backend_jax", "train", "--steps", "3", "--plain", "--batch", "4"]
    started = [
        subprocess.Popen(
            [*train, "--out", str(tmp_path / "run"), *own], env=environment | {"RANK": str(rank)}, cwd=tmp_path,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank, own in enumerate((words, other))
    ]  # fmt: skip
    said = [process.communicate(timeout=280) for process in started]
    return [(process.returncode, *texts) for process, texts in zip(started, said, strict=True)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_command_line_trains_on_several_processes_and_one_of_them_speaks(tmp_path):
    first, second = together(["--parallel", "fsdp=2", "--json"], ["--parallel", "fsdp=2"], tmp_path)
    assert first[0] == second[0] == 0, first[2] + second[2]
    said = [json.loads(line) for line in first[1].splitlines()]  # and none of Gloo's words between them
    assert [row["step"] for row in said if "loss" in row] == [1, 2, 3] and not second[1]
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    import backend_jax
    from core_numpy.contract.cli import main

    words = ["train", "--steps", "3", "--plain", "--batch", "4", "--out", str(tmp_path / "alone")]
    assert main(backend_jax, words) == 0
    alone = [json.loads(line) for line in (tmp_path / "alone" / "log.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in alone], rel=1e-5)
    files = sorted(path.name for path in (tmp_path / "run" / "step-00000003").iterdir())
    assert files == ["checkpoint.json", "shard-00000.safetensors", "shard-00001.safetensors"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ctrl_c_of_one_process_ends_the_others_after_the_same_update_and_saves(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(HERE)
    from parallel_cases import check_interrupted_together

    check_interrupted_together("backend_jax", tmp_path / "run")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("other", "words"),
    [
        (["--lr", "0.5"], "the same TrainConfig: process 1 has {'lr': 0.5}, process 0 has {'lr': 0.003}"),
        (["--checkpoint-every", "2"], "the same settings: process 1 has {'checkpoint_every': 2}, process 0 has "),
    ],
)
def test_processes_of_the_command_line_that_are_not_alike_end_with_a_line_each(tmp_path, other, words):
    first, second = together(["--parallel", "data=2"], ["--parallel", "data=2", *other], tmp_path)
    assert first[0] == second[0] == 2
    assert [line for line in first[2].splitlines() if line.startswith("error: ") and words in line], first[2]
    assert "process 0 has" in second[2] and "Traceback" not in first[2] + second[2]
    assert not (tmp_path / "run").exists()
