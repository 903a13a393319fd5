"""The walls of the house: who may import whom, which files mirror each other, which rule has a case."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WINGS = {"backend_torch": {"backend_jax", "jax", "flax"}, "backend_jax": {"backend_torch", "torch"}}
MIRRORED = ("attention", "masks", "encodings", "layers", "block", "model", "random", "cache", "training")


def imports(file: Path) -> list[tuple[str, int]]:
    """Every imported module of a file, functions' own imports included, with its line."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.append((node.module or "", node.lineno))
    return found


@pytest.mark.parametrize("wing", WINGS)
def test_a_wing_imports_neither_the_other_wing_nor_the_reference_s_arithmetic(wing):
    files = sorted((ROOT / wing).rglob("*.py"))
    assert len(files) > 10
    for file in files:
        for name, line in imports(file):
            top = name.split(".")[0]
            assert top not in WINGS[wing] | {"conformance"}, f"{file}:{line} imports {name}"
            if top == "core_numpy":
                assert name.startswith("core_numpy.contract"), f"{file}:{line} imports {name}"


def test_the_reference_imports_numpy_and_scipy_and_nothing_above_it():
    heavy = {"torch", "jax", "flax", "backend_torch", "backend_jax", "conformance"}
    for file in sorted((ROOT / "core_numpy").rglob("*.py")):
        for name, line in imports(file):
            assert name.split(".")[0] not in heavy, f"{file}:{line} imports {name}"


@pytest.mark.parametrize(
    ("package", "absent"),
    [("core_numpy", {"torch", "jax", "flax"}), ("backend_torch", {"jax"}), ("backend_jax", {"torch"})],
)
def test_importing_one_package_imports_no_other_framework(package, absent):
    needs = {"backend_torch": "torch", "backend_jax": "jax"}.get(package)
    if needs:
        pytest.importorskip(needs)
    code = f"import sys, {package}; print(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert package in run.stdout.split()
    assert not absent & set(run.stdout.split())


def in_a_process_of_its_own(code: str) -> list[str]:
    """The words that it prints."""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    return run.stdout.split()


def test_importing_the_reference_waits_for_nothing_that_few_calls_need():
    code = "import sys, core_numpy; {}; print(*sorted(sys.modules))"
    # SciPy's special functions alone take longer than all the rest.
    late = {"scipy.special", "ml_dtypes", "safetensors", "torch", "jax", "matplotlib", "rich"}
    # The rest of the package comes when the first of it is asked for.
    rest = {"core_numpy.public", "core_numpy.model", "core_numpy.gradients", "core_numpy.contract.config"}
    assert not (late | rest) & set(in_a_process_of_its_own(code.format("core_numpy.attention")))
    found = set(in_a_process_of_its_own(code.format("core_numpy.Trainer")))
    assert not late & found and rest < found


@pytest.mark.parametrize("wing", WINGS)
def test_importing_a_backend_imports_none_of_the_reference_and_of_the_contract_no_files(wing):
    pytest.importorskip({"backend_torch": "torch", "backend_jax": "jax"}[wing])
    found = set(in_a_process_of_its_own(f"import sys, {wing}; print(*sorted(sys.modules))"))
    of_core = {name for name in found if name.startswith("core_numpy.") and not name.startswith("core_numpy.contract")}
    # `attention` is a function and a module: the function must be there before anybody imports the module.
    assert of_core == {f"core_numpy.{name}" for name in ("attention", "pairs", "random", "rounding", "special")}
    assert "core_numpy.contract.config" in found
    late = {f"core_numpy.contract.{name}" for name in ("families", "checkpoints", "shards", "data", "cli", "plots")}
    own = {f"{wing}.{name}" for name in ("parallel", "processes", "ring")}
    assert not (late | own | {"safetensors", "matplotlib"}) & found


def test_what_the_reference_imports_on_demand_looks_as_if_it_were_there():
    import core_numpy
    from core_numpy import public

    assert sorted(public.__all__) == sorted(core_numpy.__all__) and set(core_numpy.__all__) <= set(dir(core_numpy))
    assert all(getattr(core_numpy, name) is getattr(public, name) for name in core_numpy.__all__)
    with pytest.raises(AttributeError, match="module 'core_numpy' has no attribute 'sofmax'"):
        core_numpy.sofmax  # noqa: B018


@pytest.mark.parametrize(
    "code",
    [
        "import core_numpy; import core_numpy.attention; core_numpy.softmax",
        "from core_numpy.attention import scores; import core_numpy; import core_numpy.gradients",
        "from core_numpy import Trainer; import core_numpy",
        "from core_numpy import *; import core_numpy; assert core_numpy.layers.softmax is softmax",
        "from core_numpy import layers; import core_numpy; assert layers.softmax is core_numpy.softmax",
    ],
)
def test_attention_is_the_function_whatever_is_imported_first(code):
    got = in_a_process_of_its_own(f"{code}; print(type(core_numpy.attention).__name__, core_numpy.attention.__name__)")
    assert got == ["function", "attention"]


def test_an_eager_model_of_torch_trains_without_its_compiler():
    pytest.importorskip("torch")
    code = """
import sys, numpy, backend_torch as B
model = B.Transformer(B.ModelConfig(vocab=4, width=4, heads=1, layers=1))
x = numpy.zeros((1, 2), int)
B.Trainer(model, B.TrainConfig(batch=1)).step({"tokens": x, "targets": x})
print(*sorted({"sympy", "torch._dynamo", "torch._inductor"} & set(sys.modules)))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    # 44 MB and a second more, at the first model.
    assert run.stdout.split() == []


def definitions(package: str, name: str) -> list[str]:
    """The public functions and classes of a file, in order."""
    tree = ast.parse((ROOT / package / f"{name}.py").read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.ClassDef)
    return [node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]


@pytest.mark.parametrize("name", MIRRORED)
@pytest.mark.parametrize("wing", WINGS)
def test_mirrored_files_have_the_reference_s_public_names_in_the_reference_s_order(wing, name):
    import core_numpy

    home = f"core_numpy.{name}"
    public = {n for n in core_numpy.__all__ if getattr(core_numpy, n).__module__ == home}
    promised = [n for n in definitions("core_numpy", name) if n in public]
    assert promised
    assert [n for n in definitions(wing, name) if n in public] == promised


@pytest.mark.parametrize("wing", WINGS)
def test_a_backend_offers_every_public_name_with_the_reference_s_signature(wing):
    pytest.importorskip({"backend_torch": "torch", "backend_jax": "jax"}[wing])
    from conformance.runner import PASSED
    from conformance.surface import public_names, run_surface
    from conformance.targets import load

    results = list(run_surface(load(wing)))
    assert len(results) > 50
    assert not [r.detail for r in results if r.status != PASSED]
    assert len(public_names()) >= len(results)


def test_a_signature_that_differs_is_seen():
    from conformance.surface import shape_of

    def right(x, *, eps): ...

    def other(x, eps): ...

    assert shape_of(right) != shape_of(other)
    assert [row[:2] for row in shape_of(right)] == [("x", "POSITIONAL_OR_KEYWORD"), ("eps", "KEYWORD_ONLY")]


RULE = re.compile(r"^\s*([a-z]+-\d+): ", re.MULTILINE)
# Rules that no row can state, because they are about state over several calls; each has its test.
TESTED = {
    "cache": "test_cache_core.py",
    "generate": "test_cache_core.py",
    "training-5": "test_training_core.py",
    "training-6": "test_training_core.py",
    "training-7": "test_training_core.py",
    "training-8": "test_training_core.py",
    "optimizer-6": "test_training_core.py",
    "model-9": "test_model_core.py",
    "model-11": "test_families.py",
    "model-12": "test_families.py",
    "model-13": "test_families_shards.py",
    "block-10": "test_model_core.py",
    "random-8": "test_random.py",
}


def rules() -> set[str]:
    found: set[str] = set()
    for file in (ROOT / "core_numpy").glob("*.py"):
        found |= set(RULE.findall(file.read_text(encoding="utf-8")))
    return found


def cited() -> set[str]:
    from conformance.models import load_model_cases
    from conformance.rows import load_cases

    return {rule for case in [*load_cases(), *load_model_cases()] for rule in case.rules}


def test_every_rule_of_the_reference_has_a_case_or_a_named_test():
    assert len(rules()) > 100
    here = Path(__file__).parent
    for rule in sorted(rules() - cited()):
        name = TESTED.get(rule) or TESTED.get(rule.rsplit("-", 1)[0])
        assert name is not None, f"{rule} has no case"
        assert (here / name).exists()


def test_every_case_cites_a_rule_that_stands_in_the_reference():
    assert not cited() - rules()


def test_every_function_that_a_case_may_name_has_its_row_in_the_tables_of_a_run():
    from conformance.functions import FUNCTIONS
    from conformance.summary import GROUPS

    shown = {name for _, functions in GROUPS for name in functions}
    assert set(FUNCTIONS) <= shown, f"not in conformance.summary.GROUPS: {sorted(set(FUNCTIONS) - shown)}"


@pytest.mark.parametrize("field", ["positions", "activation", "norm", "norm_place", "head", "pool", "kind"])
def test_every_choice_of_a_configuration_is_asked_of_a_model(field):
    from conformance.models import load_model_cases
    from core_numpy.contract import config

    choices = getattr(config, f"{field.upper().removesuffix('S')}S")
    default = config.ModelConfig.__dataclass_fields__[field].default
    asked = {
        case.config.get(field, default) for case in load_model_cases() if case.stream is None and case.train is None
    }
    assert set(choices) <= asked, f"no row of cases/models.toml has {field} = {sorted(set(choices) - asked)}"
