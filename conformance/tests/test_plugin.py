"""The pytest plugin: one test per call, ids that select, quiet where nobody asked for it. Each test is a pytest run."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNEL = """
import numpy as np
DTYPES = ("float64", "float32")
def silu(x):
    return x / (1 + np.exp(-x))
def relu(x):
    return np.abs(x)
"""
INSTALLED = bool(importlib.metadata.entry_points(group="pytest11", name="conformance"))


@pytest.fixture
def run(tmp_path):
    """A pytest of its own in a folder with `my_kernel.py`; (exit status, output)."""
    (tmp_path / "my_kernel.py").write_text(KERNEL)
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    loaded = [] if INSTALLED else ["-p", "conformance.plugin"]

    def go(*arguments):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", *loaded, *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=120)
        return done.returncode, done.stdout + done.stderr

    return go


def count(word, output):
    found = re.search(rf"(\d+) {word}", output.splitlines()[-1])
    return int(found[1]) if found else 0


def test_each_call_of_a_case_is_a_test_and_what_is_lacking_is_skipped(run):
    status, output = run("--pyargs", "conformance", "--target", "my_kernel", "-rfs")
    assert status == 1
    assert count("failed", output) == 2 and count("passed", output) == 2 and count("skipped", output) > 400
    assert "FAILED conformance.plugin::my_kernel::relu[float64-auto]" in output
    assert "relu, float64, kernel auto: out must be exactly 0.0 at (0,); got 1.5" in output
    assert "layers-8: the derivative at 0 is 0" in output
    assert "not offered: no bfloat16" in output and "not offered: no function attention" in output
    assert "test_plugin" not in output and "Traceback" not in output


def test_an_id_selects_one_test(run):
    one = "conformance.plugin::my_kernel::silu[float32-auto]"
    status, output = run("--pyargs", one, "--target", "my_kernel", "-v")
    assert status == 0 and count("passed", output) == 1 and "argument" not in output


def test_a_misspelt_argument_is_named_at_the_end(run, tmp_path):
    with (tmp_path / "my_kernel.py").open("a") as file:
        file.write("def softmax(x, *, axes=-1):\n    return x\n")
    one = "conformance.plugin::my_kernel::silu[float32-auto]"
    status, output = run("--pyargs", one, "--target", "my_kernel")
    said = "my_kernel: softmax takes axes, which is no argument of the contract; did you mean axis?"
    assert status == 0 and said in output.splitlines()


@pytest.mark.slow
def test_workers_of_xdist_collect_the_same(run):
    pytest.importorskip("xdist")
    status, output = run("--pyargs", "conformance", "--target", "my_kernel", "-n", "2", "-k", "silu or relu-")
    # By case and by function; relu would fail.
    assert status == 0 and count("passed", output) == 2 and "Different tests were collected" not in output


def test_a_target_that_cannot_be_loaded_ends_the_run_in_one_line(run):
    status, output = run("--pyargs", "conformance", "--target", "no_such_kernel")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert output.strip().splitlines()[-1].startswith("ERROR: target 'no_such_kernel' cannot be imported")


UNSTEADY = """
import os, time
import numpy as np
DTYPES = ("float64", "float32")
def silu(x):
    return x / (1 + np.exp(-x))
def relu(x):
    time.sleep(1000) if x.dtype == np.float64 else os._exit(7)
def softmax(x, *, axis=-1):
    raise KeyboardInterrupt
"""


def test_a_target_that_hangs_or_dies_loses_that_test_and_no_other(run, tmp_path):
    (tmp_path / "my_kernel.py").write_text(UNSTEADY)
    asked = ("--pyargs", "conformance", "--target", "my_kernel", "-k", "silu or relu or softmax-axis")
    status, output = run(*asked, "--conformance-timeout", "2")
    assert status == 1 and count("failed", output) == 4 and count("passed", output) == 2
    assert "relu, float64, kernel auto: its process gave no answer within 2 seconds and was ended" in output
    assert "relu, float32, kernel auto: its process died (exit code 7)" in output
    assert "softmax, float32, kernel auto: KeyboardInterrupt, raised by the target" in output


def test_a_target_is_judged_in_the_process_of_pytest_where_that_is_asked_for(run, tmp_path):
    (tmp_path / "my_kernel.py").write_text(
        KERNEL.replace("np.abs(x)", "print(f'judged by the child of {os.getppid()}.') or np.maximum(x, 0)")
        + "import os\n"
    )
    mine = f"judged by the child of {os.getpid()}."
    one = ("--pyargs", "conformance.plugin::my_kernel::relu[float32-auto]", "--target", "my_kernel")
    for options in (("--conformance-timeout", "0"), ("--pdb",)):
        status, output = run(*one, *options, "-s")
        assert status == 0 and "1 passed" in output and mine in output
    status, output = run(*one, "--conformance-timeout", "-1")
    assert status == pytest.ExitCode.USAGE_ERROR and "must be 0 or a number of seconds; got -1" in output


def test_a_target_that_dies_while_it_is_imported_ends_the_run_in_one_line(run, tmp_path):
    (tmp_path / "my_kernel.py").write_text("import os\nos._exit(7)\n")
    status, output = run("--pyargs", "conformance", "--target", "my_kernel")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert output.strip().splitlines()[-1] == "ERROR: target 'my_kernel': its process died (exit code 7)"


def test_it_leaves_other_tests_and_other_options_alone(run, tmp_path):
    (tmp_path / "conftest.py").write_text("def pytest_addoption(parser):\n    parser.addoption('--target')\n")
    (tmp_path / "test_mine.py").write_text(
        "import sys\ndef test_mine(pytestconfig):\n    assert pytestconfig.getoption('--target') == 'moon'\n"
        "    assert 'numpy' not in sys.modules or 'conformance.runner' not in sys.modules\n"
    )
    status, output = run("--target", "moon")
    assert status == 0 and count("passed", output) == 1
    status, output = run("--conformance-target", "my_kernel")
    assert status == pytest.ExitCode.USAGE_ERROR and "add `--pyargs conformance`" in output
