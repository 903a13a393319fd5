"""The same command gives the same document to the byte, times aside: in other processes, whatever the hashes of strings
and however many processes share the work."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WRONG = """
import core_numpy
from core_numpy import relu, rms_norm, silu
def gelu(x, *, approximate="none"):
    return core_numpy.gelu(x, approximate="tanh")
def softmax(x, *, axis=-1):
    return core_numpy.softmax(x)
"""
COMMANDS = {
    "run": ("run", "core_numpy", "wrong", "--case", "s", "--jobs", "{jobs}"),
    "zoo": ("zoo", "--fault", "softmax", "--all"),
    "diagnose": ("diagnose", "wrong", "--case", "s"),
    "peers": ("peers", "onnx-reference", "--jobs", "{jobs}"),
}


def written(folder, command, number):
    """What the command writes; `number` is that of processes, and the seed of Python's hashes."""
    (folder / "wrong.py").write_text(WRONG)
    file = folder / f"{number}.json"
    arguments = [part.format(jobs=number) for part in command]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "PYTHONHASHSEED": str(number)}
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(
        [sys.executable, "-m", "conformance", *arguments, "--json", str(file)],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    return file.read_text()


def timeless(value):
    if isinstance(value, dict):
        return {key: timeless(item) for key, item in value.items() if key != "seconds"}
    return [timeless(item) for item in value] if isinstance(value, list) else value


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("verb", COMMANDS)
def test_a_command_gives_the_same_document_each_time(verb, tmp_path):
    if verb == "peers":
        pytest.importorskip("onnx")
    one, two = (written(tmp_path, COMMANDS[verb], number) for number in (1, 2))
    first, second = (json.dumps(timeless(json.loads(text)), indent=1) for text in (one, two))
    assert first == second and len(first) > 500
    if verb in ("zoo", "diagnose"):  # no times in it at all
        assert one == two
