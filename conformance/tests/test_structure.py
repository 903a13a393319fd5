"""The shape of the source: no circles, nothing too long to read at once, and what is public says what it does."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("core_numpy", "backend_torch", "backend_jax", "conformance")
LONGEST_FILE, LONGEST_FUNCTION = 450, 60
Function = ast.FunctionDef | ast.AsyncFunctionDef
# A trainer that is asked for a layout makes the one in `parallel`, which derives from it and is imported on that call.
LATE = {(f"backend_{name}.training", f"backend_{name}.parallel") for name in ("torch", "jax")}


def modules(root: Path) -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for file in sorted((root / package).rglob("*.py")):
            parts = file.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """All but those that only a type checker reads."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield from imports(node)


def imported(name: str, file: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules of ours that a module imports, those that its functions import included."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in imports(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        else:
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield from (each for each in ((inner if inner in known else base),) if each in known)


def circle(root: Path) -> list[str]:
    """Modules of which each imports the next and the last the first; none where there is no circle."""
    known = modules(root)
    graph = {
        name: {other for other in imported(name, file, known) if other != name and (name, other) not in LATE}
        for name, file in known.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_module_imports_itself_by_way_of_others():
    assert len(modules(ROOT)) > 250
    assert circle(ROOT) == []


@pytest.mark.parametrize("late", [False, True])
def test_a_circle_is_seen_in_functions_too(late, tmp_path):
    (tmp_path / "core_numpy").mkdir()
    (tmp_path / "core_numpy" / "__init__.py").write_text("from .a import x\n")
    (tmp_path / "core_numpy" / "a.py").write_text("from . import b\nfrom json import x\n")
    (tmp_path / "core_numpy" / "b.py").write_text("def f():\n    from core_numpy.a import x\n" if late else "")
    assert sorted(set(circle(tmp_path))) == (["core_numpy.a", "core_numpy.b"] if late else [])


def test_files_and_functions_can_be_read_at_once():
    for file in modules(ROOT).values():
        text = file.read_text(encoding="utf-8")
        assert text.count("\n") <= LONGEST_FILE, file
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, Function):
                assert (node.end_lineno or 0) - node.lineno + 1 <= LONGEST_FUNCTION, f"{file}: {node.name}"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_says_what_it_is(package):
    files = [file for name, file in modules(ROOT).items() if name.split(".")[0] == package]
    assert len(files) > 10
    for file in files:
        assert ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))), file


@pytest.mark.parametrize("package", PACKAGES[:3])
def test_everything_public_has_a_docstring(package):
    exported = next(
        ast.literal_eval(node.value)
        for node in ast.parse((ROOT / package / "__init__.py").read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    said = set()
    for name, file in modules(ROOT).items():
        if name.split(".")[0] == package or name.startswith("core_numpy.contract"):
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                if isinstance(node, Function | ast.ClassDef) and ast.get_docstring(node):
                    said.add(node.name)
    assert len(exported) > 50
    assert [name for name in exported if name not in said] == []
