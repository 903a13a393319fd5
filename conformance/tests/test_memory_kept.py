"""Memory that is freed: a step on a CPU finds what the one before freed, and the suite gives back what cases left."""

import os
import subprocess
import sys

import numpy as np
import pytest

FAULTS = """
import resource
import numpy as np
from core_numpy.contract.memory import keep_freed_memory
kept = keep_freed_memory()
def step():
    arrays = [np.ones(1 << 20) for _ in range(12)]  # 8 MiB each: 24,576 pages in all
    del arrays
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(int(kept), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def run(script, *arguments, **variables):
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], env=plain | variables, capture_output=True, text=True, check=True
    )
    return [int(x) for x in done.stdout.split()]


@pytest.fixture
def glibc():
    import platform

    if platform.libc_ver()[0] != "glibc":
        pytest.skip("the C library is not glibc, whose malloc this speaks to")


def test_freed_memory_is_taken_again_without_page_faults(glibc):
    kept, faults = run(FAULTS)
    assert kept and faults < 1000


def test_what_the_user_sets_stays(glibc):
    kept, faults = run(FAULTS, MALLOC_TRIM_THRESHOLD_="131072")
    assert not kept and faults > 1000


# 128 MiB, too large for any arena but the first; of huge pages where the system has them.
IN_A_THREAD = """
import resource, sys, threading
import numpy as np
from core_numpy.contract.memory import keep_freed_memory, share_one_arena
kept = (sys.argv[1:] == ["apart"] or share_one_arena()) and keep_freed_memory()
def step():
    work = threading.Thread(target=np.ones, args=(1 << 24,))
    work.start()
    work.join()
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(int(kept), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_threads_find_it_where_they_share_one_arena(glibc):
    kept, faults = run(IN_A_THREAD)
    assert kept and faults < 40
    kept, faults = run(IN_A_THREAD, "apart")
    assert kept and faults > 40


@pytest.mark.parametrize("package", ["core_numpy", "backend_torch", "backend_jax"])
def test_a_trainers_step_asks_for_it(package, monkeypatch):
    pytest.importorskip(package.replace("backend_", ""))
    import importlib

    from core_numpy.contract.config import ModelConfig, TrainConfig

    backend = importlib.import_module(package)
    training = importlib.import_module(f"{package}.training")
    asked = []
    monkeypatch.setattr(training, "keep_freed_memory", lambda: asked.append(1))
    model = backend.Transformer(ModelConfig(vocab=8, width=8, heads=1, layers=1, max_length=4))
    trainer = backend.Trainer(model, TrainConfig(steps=1))
    trainer.step({"tokens": np.ones((1, 4), np.int32), "targets": np.ones((1, 4), np.int32)})
    assert asked == [1]


def test_compiled_programs_are_let_go_after_some_cases():
    jax = pytest.importorskip("jax")
    from conformance.targets import load
    from conformance.targets.jax_target import CASES
    from conformance.workers import results_of, selected

    target = load("backend_jax")
    case = selected("quick", "softmax-axis")[0]
    compiled = jax.jit(lambda x: 2 * x)
    compiled(1.0)
    for _ in range(CASES - 1):
        target.tidy()
    assert compiled._cache_size() == 1
    assert [result.status for result in results_of(case, target, "quick")].count("failed") == 0
    assert compiled._cache_size() == 0
