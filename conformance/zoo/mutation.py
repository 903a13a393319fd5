"""`conformance zoo --mutate N`: single changes of the reference's own lines, as a mutation tester makes them.

The zoo's faults are those that people made; these are all that a slip of the hand can make: another comparison, another
sign, a constant that is one off, a condition turned round. Each changed module is imported beside the reference (as
package `core_mutant`, with the same contract) and judged as any target. A mutant that no case tells from the reference
is either another way to write the same, or something that the rows do not look at.
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import numpy as np

from .. import models, space
from ..memory import remembering
from ..runner import FAILED, run_case
from ..summary import GROUPS
from ..surface import public_names, shape_of
from ..targets.protocol import Target

PACKAGE = "core_mutant"
# Seconds after which a mutant that does not come to its end counts as caught; a whole run takes some ten.
PATIENCE = 120.0
_BY_NAME = dict(GROUPS)
# The cases that can see a file's lines. Not here: the cache and generation, which no row asks for, and the contract.
SEEN_BY: dict[str, tuple[str, ...]] = {
    "attention.py": _BY_NAME["attention"],
    "pairs.py": _BY_NAME["attention"],
    "gradients/attention.py": _BY_NAME["attention"],
    "masks.py": _BY_NAME["masks"],
    "encodings.py": _BY_NAME["encodings"],
    "frequencies.py": _BY_NAME["encodings"],
    "rotary_pairs.py": _BY_NAME["encodings"],
    "gradients/encodings.py": _BY_NAME["encodings"],
    "layers.py": _BY_NAME["layers"],
    "special.py": _BY_NAME["layers"],
    "pieces.py": _BY_NAME["layers"],
    "gradients/layers.py": _BY_NAME["layers"],
    "rounding.py": (*_BY_NAME["layers"], *_BY_NAME["attention"]),
    "random.py": (*_BY_NAME["random"], "dropout"),
    "block.py": _BY_NAME["models"],
    "model.py": _BY_NAME["models"],
    "modules.py": _BY_NAME["models"],
    "gradients/block.py": _BY_NAME["models"],
    "gradients/model.py": _BY_NAME["models"],
    "optimizer.py": _BY_NAME["training"],
    "training.py": (*_BY_NAME["training"], *_BY_NAME["models"]),
}
_COMPARED: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_COMPUTED: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Div,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitAnd,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """The change number `index` of a file, and what it is."""

    file: str
    index: int
    line: int
    text: str

    def __str__(self) -> str:
        return f"core_numpy/{self.file}:{self.line}: {self.text}"


class _Changer(ast.NodeTransformer):
    """Walks a module and makes change number `index`; counts and names them all. Annotations, docstrings and the
    sentences of errors stay."""

    def __init__(self, index: int | None = None) -> None:
        self.index = index
        self.found: list[tuple[int, str]] = []

    def _made(self, node: Any, text: str) -> bool:
        self.found.append((node.lineno, text))
        return len(self.found) - 1 == self.index

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        node.body = [self.visit(statement) for statement in node.body]
        node.args.defaults = [self.visit(default) for default in node.args.defaults]
        node.args.kw_defaults = [default and self.visit(default) for default in node.args.kw_defaults]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        node.value = node.value and self.visit(node.value)
        return node

    def visit_Raise(self, node: ast.Raise) -> Any:
        return node

    def visit_Compare(self, node: ast.Compare) -> Any:
        self.generic_visit(node)
        for i, op in enumerate(node.ops):
            if self._made(node, f"{ast.unparse(node)}, with {_COMPARED[type(op)].__name__} for {type(op).__name__}"):
                node.ops[i] = _COMPARED[type(op)]()
        return node

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        self.generic_visit(node)
        other = _COMPUTED.get(type(node.op))
        if other and self._made(node, f"{ast.unparse(node)}, with {other.__name__} for {type(node.op).__name__}"):
            node.op = other()
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        self.generic_visit(node)
        other = _COMPUTED.get(type(node.op))
        if other and self._made(node, f"{ast.unparse(node)}, with {other.__name__} for {type(node.op).__name__}"):
            node.op = other()
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        self.generic_visit(node)
        other: type = ast.Or if isinstance(node.op, ast.And) else ast.And
        if self._made(node, f"{ast.unparse(node)}, with {other.__name__}"):
            node.op = other()
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        self.generic_visit(node)
        return node.operand if self._made(node, f"{ast.unparse(node)} without its sign") else node

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        self.generic_visit(node)
        if self._made(node, f"{ast.unparse(node)}, the branches exchanged"):
            node.body, node.orelse = node.orelse, node.body
        return node

    def visit_Constant(self, node: ast.Constant) -> Any:
        value = node.value
        if isinstance(value, bool):
            other: Any = not value
        elif isinstance(value, int | float):
            other = value + 1
        else:
            return node
        if not self._made(node, f"{value} made {other}"):
            return node
        return ast.copy_location(ast.Constant(other), node)


def root() -> Path:
    import core_numpy

    return Path(core_numpy.__file__).parent


def mutants(file: str) -> list[Mutant]:
    """All changes of a file, in the order of its lines."""
    changer = _Changer()
    changer.visit(ast.parse((root() / file).read_text(encoding="utf-8")))
    return [Mutant(file, index, line, " ".join(text.split())) for index, (line, text) in enumerate(changer.found)]


def sample(number: int | None, seed: int) -> list[Mutant]:
    """So many of all files' mutants, drawn without repetition; None for all."""
    found = [mutant for file in SEEN_BY for mutant in mutants(file)]
    if number is None or number >= len(found):
        return found
    draw = np.random.Generator(np.random.Philox(seed))
    return [found[i] for i in sorted(draw.choice(len(found), number, replace=False))]


def compiled(mutant: Mutant) -> CodeType:
    return compile(_changed(mutant), str(root() / mutant.file), "exec")


def mutated(mutant: Mutant) -> str:
    """The file's text with the change, as Python writes it out; its comments are gone."""
    return ast.unparse(_changed(mutant))


def _changed(mutant: Mutant) -> ast.Module:
    tree = ast.parse((root() / mutant.file).read_text(encoding="utf-8"))
    return ast.fix_missing_locations(_Changer(mutant.index).visit(tree))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of the mutant package in the reference's own files, one of them changed."""

    def __init__(self, file: str, code: CodeType | None) -> None:
        self.file, self.code = file, code

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.split(".")[0] != PACKAGE:
            return None
        place = root().joinpath(*fullname.split(".")[1:])
        package = place.is_dir()
        file = place / "__init__.py" if package else place.with_suffix(".py")
        loader = _Loader(fullname, str(file))
        loader.changed = self.code if file == root() / self.file else None
        return importlib.util.spec_from_file_location(
            fullname, file, loader=loader, submodule_search_locations=[str(place)] if package else None
        )


class _Loader(importlib.machinery.SourceFileLoader):
    changed: CodeType | None = None

    def get_code(self, fullname: str) -> CodeType | None:
        return self.changed or super().get_code(fullname)


@contextmanager
def imported(mutant: Mutant | None) -> Iterator[ModuleType]:
    """The reference with the change, as a package of its own that shares the contract; None for no change."""
    importlib.import_module("core_numpy.public")
    finder = _Finder(mutant.file if mutant else "", compiled(mutant) if mutant else None)
    shared = {
        name.replace("core_numpy", PACKAGE, 1): module
        for name, module in sys.modules.items()
        if name.startswith("core_numpy.contract")
    }
    sys.modules.update(shared)
    sys.meta_path.insert(0, finder)
    try:
        yield importlib.import_module(PACKAGE)
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE]:
            del sys.modules[name]


class _Mutated(Target):
    """One kernel, its own: nothing to multiply the rows by."""

    def kernels(self) -> list[str]:
        return ["auto"]

    def optimise(self, config: Any, params: Any, stream: Any) -> Any:
        return self._optimised(config, params, stream)


@contextmanager
def _patience() -> Iterator[None]:
    def over(number: int, frame: Any) -> None:
        raise TimeoutError(f"no end within {PATIENCE:g} seconds")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _other_signature(module: ModuleType) -> str:
    """The first public name whose parameters and defaults are not the reference's, as `run` asks of our packages."""
    import core_numpy

    for name in public_names():
        if callable(getattr(core_numpy, name)) and shape_of(getattr(core_numpy, name)) != shape_of(
            getattr(module, name)
        ):
            return name
    return ""


def caught_by(mutant: Mutant | None, level: str = "quick", file: str | None = None) -> str:
    """The first case that fails on the mutant, "import" where it cannot be imported, or "" where nothing does."""
    functions = SEEN_BY[mutant.file if mutant else file or "attention.py"]
    cases: list[Any] = [case for case in space.select(level) if case.function in functions and case.verb != "refuses"]
    cases += [case for case in models.select_models(level) if case.function in functions]
    at = "import"
    try:
        with _patience(), imported(mutant) as module, np.errstate(all="ignore"):
            if name := _other_signature(module):
                return f"signature-{name}"
            target = _Mutated(module, PACKAGE)
            for case in cases:
                at = case.id
                run: Any = models.run_model_case if isinstance(case, models.ModelCase) else run_case
                if any(result.status == FAILED for result in run(case, target)):
                    return at
    except Exception:
        return at
    return ""


def score(
    chosen: Sequence[Mutant], level: str, seen: Callable[[str], None] = lambda text: None
) -> list[tuple[Mutant, str]]:
    """Each mutant with what caught it."""
    found = []
    with remembering():
        for mutant in chosen:
            seen(str(mutant))
            found.append((mutant, caught_by(mutant, level)))
    return found
