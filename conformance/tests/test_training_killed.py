"""Nothing is lost when the process dies: killed at any moment, a run goes on bit for bit as if it had not been."""

from __future__ import annotations

import builtins
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from three import FRAMEWORKS, PACKAGES, load

pytest.importorskip("resource")  # POSIX: SIGKILL and file size limits

import core_numpy
from conformance.tests import run_until_killed as child
from core_numpy.contract import checkpoints, tensor_file
from core_numpy.contract.checkpoints import read_checkpoint

ROOT = Path(__file__).resolve().parents[2]
# A process that imports a framework and compiles takes seconds: NumPy says it in every run, the others on request.
SLOW = pytest.mark.parametrize(
    "package", [pytest.param(p, marks=() if p == "core_numpy" else pytest.mark.slow) for p in PACKAGES]
)


def present(package):
    pytest.importorskip(FRAMEWORKS[package])


def start(package, folder, steps, *limit):
    command = [sys.executable, "-W", "ignore", "-m", "conformance.tests.run_until_killed", package, str(folder)]
    return subprocess.Popen(
        [*command, str(steps), *map(str, limit)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def losses_of(text, seen):
    """Adds the printed losses to `seen`; an update that was printed before must have the very same loss."""
    for line in text.splitlines():
        parts = line.split()
        if len(parts) != 2 or not line.isascii():
            continue  # cut off by the kill
        update, loss = int(parts[0]), parts[1]
        assert seen.setdefault(update, loss) == loss, f"update {update}"


def killed_run(package, folder, steps, kills, seed):
    """The losses of a run killed `kills` times, and how many of the kills left a half-written checkpoint."""
    chance, seen, torn = random.Random(seed), {}, 0
    for _ in range(kills):
        process = start(package, folder, steps)
        lines = [process.stdout.readline() for _ in range(chance.randint(1, 4))]
        time.sleep(chance.random() * 0.03)  # several updates and saves long
        process.kill()
        # Not communicate: what lies in the buffer behind the last line that was read would be lost.
        text = "".join(lines) + process.stdout.read()
        process.communicate()
        losses_of(text if text.endswith("\n") else text.rpartition("\n")[0], seen)
        torn += any(path.name.endswith(".tmp") for path in Path(folder).iterdir())
    process = start(package, folder, steps)
    out, err = process.communicate(timeout=250)
    assert process.returncode == 0, err
    losses_of(out, seen)
    return seen, torn


def check_same_as_straight(package, folder, steps, kills, seed):
    process = start(package, folder / "straight", steps)
    out, err = process.communicate(timeout=250)
    assert process.returncode == 0, err
    straight: dict[int, str] = {}
    losses_of(out, straight)
    assert list(straight) == list(range(1, steps + 1)) and len(set(straight.values())) == steps
    seen, torn = killed_run(package, folder / "killed", steps, kills, seed)
    assert seen == straight
    one, two = (read_checkpoint(folder / name) for name in ("straight", "killed"))
    assert one.step == two.step == steps
    for name, x in one.params.items():
        assert x.tobytes() == two.params[name].tobytes()
    return torn


def test_a_run_killed_at_random_moments_is_bit_for_bit_the_run_that_was_not(tmp_path):
    check_same_as_straight("core_numpy", tmp_path, 60, kills=4, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("package", PACKAGES)
def test_twenty_five_kills_some_of_them_in_the_middle_of_a_write_change_no_bit(package, tmp_path):
    present(package)
    torn = check_same_as_straight(package, tmp_path, 400, kills=25, seed=7)
    assert torn >= 1  # else no kill met a write, and the test says less than its name


class Death(BaseException):
    """The process ends here: no handler for errors may see it."""


def dying(monkeypatch, after):
    """From the call number `after` on, no call to the file system does anything but end the process."""
    calls = []

    def wrap(owner, name):
        plain = getattr(owner, name)

        def call(*arguments, **more):
            if name == "open" and "w" not in (arguments[1] if len(arguments) > 1 else more.get("mode", "r")):
                return plain(*arguments, **more)
            calls.append(name)
            if len(calls) > after:
                raise Death(name)
            return plain(*arguments, **more)

        monkeypatch.setattr(owner, name, call)

    for owner, name in ((os, "mkdir"), (os, "fsync"), (os, "rename"), (os, "replace"), (shutil, "rmtree"),
                        (builtins, "open")):  # fmt: skip
        wrap(owner, name)
    return calls


def trained(updates, B=core_numpy):
    trainer = B.Trainer(B.Transformer(child.MODEL, seed=1), child.TRAIN)
    data = child.batches(child.TEXT, batch=4, length=8, seed=3)
    trainer.fit(data, steps=updates, progress=False)
    return trainer


@pytest.mark.parametrize("again", [False, True], ids=["the next step", "the same step again"])
def test_death_before_any_single_call_of_a_save_leaves_a_whole_checkpoint(again, tmp_path, monkeypatch):
    steps, after = (2, 2 if again else 3), 0
    first, second = (trained(n) for n in steps)
    if again:  # the same number of updates, another state
        second.model.assign({name: x + 1 for name, x in second.model.parameters().items()})
    wanted = {step: trainer.model.parameters() for step, trainer in zip(("old", "new"), (first, second), strict=True)}
    outcomes = []
    while True:
        folder = tmp_path / str(after)
        first.save(folder)
        with monkeypatch.context() as patch:
            calls = dying(patch, after)
            try:
                second.save(folder)
            except Death:
                finished = False
            else:
                finished = True
        found = read_checkpoint(folder)
        states = [s for s, p in wanted.items() if all(p[n].tobytes() == x.tobytes() for n, x in found.params.items())]
        outcomes += states
        # Whoever comes next clears up, keeps what was whole, and goes on.
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints, "_alive", lambda pid: False)
            trained(4).save(folder)
        assert not [name for name in os.listdir(folder) if name.startswith(".")]
        assert read_checkpoint(folder / f"step-{found.step:08d}").step == found.step
        if finished:
            break
        after += 1
    assert len(calls) >= 11 and len(outcomes) == after + 1
    assert outcomes[0] == "old" and outcomes[-1] == "new" and outcomes == sorted(outcomes, reverse=True)


@SLOW
def test_a_full_disk_is_one_sentence_and_the_last_checkpoint_is_whole(package, tmp_path):
    present(package)
    process = start(package, tmp_path, 2)
    process.communicate(timeout=250)
    process = start(package, tmp_path, 9, 5000)
    out, err = process.communicate(timeout=250)
    assert process.returncode == 1 and "File too large; older checkpoints are untouched" in err
    assert "step-00000003" in err and len(out.splitlines()) == 1
    found = read_checkpoint(tmp_path)
    assert found.step == 2 and not [name for name in os.listdir(tmp_path) if name.startswith(".")]


@SLOW
def test_a_folder_that_may_only_be_read_is_one_sentence_and_stays_as_it_is(package, tmp_path, monkeypatch):
    B = load(package)
    trained(1, B).save(tmp_path)
    second = trained(2, B)
    monkeypatch.setattr(os, "mkdir", lambda *a, **k: (_ for _ in ()).throw(OSError(30, "Read-only file system")))
    with pytest.raises(OSError, match=r"cannot write the checkpoint .*step-00000002: Read-only file system; older"):
        second.save(tmp_path)
    assert read_checkpoint(tmp_path).step == 1 and os.listdir(tmp_path) == ["step-00000001"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("package", PACKAGES)
def test_ctrl_c_saves_says_where_and_the_resumed_run_is_the_one_that_was_not_stopped(package, tmp_path):
    """In a process of its own, by the signal that a terminal sends."""
    present(package)

    def run(*options):
        # With Python's own handler: a job in the background inherits that the signal is ignored.
        code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        code += f"import {package}; from core_numpy.contract.cli import main; sys.exit(main({package}))"
        return subprocess.Popen(
            [sys.executable, "-c", code, "train", *options, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )  # fmt: skip

    def losses(name):
        rows = map(json.loads, (tmp_path / name / "log.jsonl").read_text().splitlines())
        return [(row["step"], row["loss"]) for row in rows]

    small = ["--batch", "2", "--length", "16"]
    process = run(*small, "--steps", "1000000", "--out", "stopped")  # so many that the signal never comes too late
    lines = [process.stdout.readline() for _ in range(5)]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=250)
    assert process.returncode == 130, err
    said = json.loads(out.splitlines()[-1])
    assert said["interrupted"] and said["out"] == "stopped" and said["step"] >= 5 and len(lines) == 5
    assert "finishing this update" in err and read_checkpoint(tmp_path / "stopped").step == said["step"]
    steps = ["--steps", str(said["step"] + 10)]
    for process in (run("--resume", "stopped", *steps), run(*small, *steps, "--out", "straight")):
        _, err = process.communicate(timeout=250)
        assert process.returncode == 0, err
    assert losses("stopped") == losses("straight") and len(losses("straight")) == said["step"] + 10


def test_temporary_names_say_whose_they_are_and_never_repeat(tmp_path):
    names = {tensor_file.temporary_name(tmp_path / "x").name for _ in range(100)}
    assert len(names) == 100 and all(f".{os.getpid()}." in name for name in names)
    assert np.all([name.startswith(".") for name in names])  # no listing of checkpoints shows them
