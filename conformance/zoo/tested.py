"""What `conformance zoo --mutate N --tests` asks beside the rows: the tests of a changed file.

The rows ask for functions, models and training runs. Gradients by a rotation's tables, sampling, saving, an absent
context have tests of their own; a mutant that no row catches is put in a copy of the package and these tests are run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from .mutation import Mutant, mutated, root

# The tests that know a file's lines, in `conformance/tests`.
TESTED_BY: dict[str, tuple[str, ...]] = {
    "attention.py": ("test_attention_core", "test_attention_core_limits", "test_attention_properties"),
    "masks.py": ("test_masks",),
    "encodings.py": (
        "test_encodings_added",
        "test_encodings_gradients",
        "test_encodings_rotary",
        "test_encodings_refusals",
    ),
    "layers.py": ("test_layers_core",),
    "random.py": ("test_random",),
    "model.py": ("test_model_core", "test_cache_core", "test_cache_ring", "test_training_core"),
    "training.py": ("test_training_core", "test_training_saving", "test_optimiser", "test_training_refusals"),
}
_AS = {
    "pairs.py": "attention.py", "gradients/attention.py": "attention.py", "frequencies.py": "encodings.py",
    "rotary_pairs.py": "encodings.py", "gradients/encodings.py": "encodings.py", "special.py": "layers.py",
    "pieces.py": "layers.py",
    "gradients/layers.py": "layers.py", "rounding.py": "layers.py", "block.py": "model.py", "modules.py": "model.py",
    "gradients/block.py": "model.py", "gradients/model.py": "model.py", "optimizer.py": "training.py",
}  # fmt: skip
# Seconds for the tests of one mutant; what takes longer hangs, and counts as caught.
PATIENCE = 600.0
_FAILED = re.compile(r"^(?:FAILED|ERROR) \S*?(test_\w+\.py::\w+)", re.MULTILINE)


def modules_knowing(file: str) -> tuple[str, ...]:
    """Names of the test modules that know a file of the reference."""
    return TESTED_BY[_AS.get(file, file)]


def caught_by_tests(mutant: Mutant) -> str:
    """The first test that fails on the mutant, or "" where all pass."""
    folder = Path(__file__).resolve().parent.parent / "tests"
    files = [str(folder / f"{name}.py") for name in modules_knowing(mutant.file)]
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / "core_numpy"
        shutil.copytree(root(), copy, ignore=shutil.ignore_patterns("__pycache__"))
        (copy / mutant.file).write_text(mutated(mutant), encoding="utf-8")
        # The copy stands in front of the installed package; tests are found by their path, their helpers by the last.
        paths = os.pathsep.join([place, str(root().parent), os.environ.get("PYTHONPATH", ""), str(folder)])
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--import-mode=importlib",
                   "-o", "addopts=", "-m", "not slow", "-k", "not torch and not jax", *files]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            return "no end"
    if done.returncode == 0:
        return ""
    found = _FAILED.search(done.stdout)
    if done.returncode != 1 or found is None:
        said = done.stdout + done.stderr
        raise RuntimeError(f"the tests of {mutant.file} could not be run: {' '.join(said.split())[-300:]}")
    return found[1]
