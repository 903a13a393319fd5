"""A Sphinx directive that lists the public names of the three packages side by side.

    ```{side-by-side} attention
    ```

gives every name that `core_numpy/public.py` takes from `attention`: its signature and docstring in core, which are
the definition, and beside them what is native in torch and in JAX. The source is parsed and never imported, so that
the pages build where no framework is installed.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from docutils import nodes
from docutils.parsers.rst import Directive

ROOT = Path(__file__).resolve().parent.parent
CORE = "core_numpy"
BACKENDS = ("backend_torch", "backend_jax")
RULE = re.compile(r"[a-z]+-\d+: ")
Defined = ast.FunctionDef | ast.ClassDef


class Name(NamedTuple):
    """A public name: the file that defines it, and its definition."""

    file: str
    tree: Defined


@functools.cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text("utf-8"))


def imports(file: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of every `from .module import name`; the contract's own are core's for all three packages."""
    for node in parsed(file).body:
        if isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("__"):
            for alias in node.names:
                yield node.module.removeprefix(f"{CORE}."), alias.name


@functools.cache
def public(package: str) -> dict[str, tuple[str, Name]]:
    """Public name -> the module that the package takes it from, and its definition there."""
    listed = next(
        ast.literal_eval(node.value)
        for node in parsed(ROOT / package / "__init__.py").body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    origin = {name: module for module, name in imports(names_file(package))}
    return {name: (origin[name], definition(package, origin[name], name)) for name in listed}


def names_file(package: str) -> Path:
    """Where a package says what its public names are: core imports them on demand, from a module of their own."""
    return ROOT / package / ("public.py" if package == CORE else "__init__.py")


def module_file(package: str, module: str) -> Path:
    file = ROOT / (CORE if module.startswith("contract") else package) / Path(*module.split("."))
    return file / "__init__.py" if file.is_dir() else file.with_suffix(".py")


def definition(package: str, module: str, name: str) -> Name:
    """Where the name is defined: in the module, or where the module itself imports it from."""
    file = module_file(package, module)
    for node in parsed(file).body:
        if isinstance(node, Defined) and node.name == name:
            return Name(file.relative_to(ROOT).as_posix(), node)
    inner = {each: source for source, each in imports(file)}
    if name not in inner:
        raise ValueError(f"{file} neither defines nor imports {name}")
    prefix = f"{module}." if file.name == "__init__.py" else module.rpartition(".")[0] + "." if "." in module else ""
    return definition(package, prefix + inner[name], name)


def signature(tree: Defined) -> str:
    """As one would write it, without the types: these stand in the docstring's words."""
    if isinstance(tree, ast.ClassDef):
        fields = [node for node in tree.body if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node)]
        made = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
        if made:
            return f"{tree.name}({arguments(made[0].args)})"
        return f"{tree.name}(*, {', '.join(ast.unparse(node) for node in fields)})" if fields else tree.name
    return f"{tree.name}({arguments(tree.args)})"


def arguments(given: ast.arguments) -> str:
    """Names and defaults, in order, without the types and without self."""
    placed = [*given.posonlyargs, *given.args]
    defaults: list[ast.expr | None] = [None] * (len(placed) - len(given.defaults)) + list(given.defaults)
    shown = [_argument(*pair) for pair in zip(placed, defaults, strict=True) if pair[0].arg not in ("self", "cls")]
    if given.vararg:
        shown.append(f"*{given.vararg.arg}")
    elif given.kwonlyargs:
        shown.append("*")
    shown += [_argument(*pair) for pair in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return ", ".join(shown + ([f"**{given.kwarg.arg}"] if given.kwarg else []))


def _argument(given: ast.arg, default: ast.expr | None) -> str:
    return given.arg if default is None else f"{given.arg}={ast.unparse(default)}"


def paragraphs(text: str) -> Iterator[nodes.Element]:
    """A docstring as nodes: an indented paragraph is a formula, numbered rules are a list, the rest is prose."""
    for part in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        lines = part.splitlines()
        if all(line.startswith("    ") for line in lines):
            formula = "\n".join(line[4:] for line in lines)
            yield nodes.literal_block(formula, formula, language="text")
        elif RULE.match(lines[0]):
            rules: list[str] = []
            for line in lines:
                rules += [line] if RULE.match(line) else [f"{rules.pop()} {line.strip()}"]
            items = [nodes.list_item("", prose(rule)) for rule in rules]
            yield nodes.bullet_list("", *items, classes=["rules"])
        else:
            yield prose(" ".join(line.strip() for line in lines))


def prose(text: str) -> nodes.paragraph:
    pieces = re.split(r"`+([^`]+)`+", text)
    inline = [nodes.literal(s, s) if i % 2 else nodes.Text(s) for i, s in enumerate(pieces) if s]
    return nodes.paragraph("", "", *inline)


def methods(tree: Defined) -> dict[str, ast.FunctionDef]:
    """The public ones that say what they do, and the call, which torch names `forward`."""
    listed = [node for node in tree.body if isinstance(node, ast.FunctionDef)] if isinstance(tree, ast.ClassDef) else []
    named = {"__call__" if node.name == "forward" else node.name: node for node in listed if ast.get_docstring(node)}
    return {name: node for name, node in named.items() if name == "__call__" or not name.startswith("_")}


def described(tree: Defined, kept: set[str]) -> Iterator[nodes.Element]:
    """The docstring, and below it those of the methods that are kept."""
    yield from paragraphs(ast.get_docstring(tree) or "")
    for method in (node for name, node in methods(tree).items() if name in kept):
        asked = any(ast.unparse(each) == "property" for each in method.decorator_list)
        head = method.name if asked else f"{method.name}({arguments(method.args)})"
        yield nodes.paragraph("", "", nodes.literal(head, head), classes=["method"])
        yield from paragraphs(ast.get_docstring(method) or "")


def box(title: str, found: Name, kept: set[str]) -> nodes.container:
    head = nodes.paragraph("", "", nodes.strong(title, title), nodes.Text(f" {found.file}"), classes=["where"])
    return nodes.container("", head, *described(found.tree, kept), classes=["native"])


def section(name: str, defined: Name) -> nodes.section:
    """One name: what core says, and in two columns what is native in the others, where they do not share it."""
    shown = nodes.section("", nodes.title(name, name), ids=[f"name-{name.replace('_', '-').lower()}"], names=[name])
    head = signature(defined.tree)
    shown += nodes.literal_block(head, head, language="python", classes=["signature"])
    others = [(package, public(package)[name][1]) for package in BACKENDS if name in public(package)]
    shared = bool(others) and all(other == defined for _, other in others)
    shown += nodes.paragraph("", "", nodes.strong(CORE, CORE), nodes.Text(f" {defined.file}"), classes=["where"])
    if shared:
        shown += prose("Shared: the two others offer this very one.")
        others = []
    # What one package has for itself is its own business; the methods that all of them have are the public ones.
    kept = set(methods(defined.tree)).intersection(*(methods(other.tree) for _, other in others))
    shown += list(described(defined.tree, kept))
    if others:
        shown += nodes.container("", *(box(*other, kept) for other in others), classes=["natives"])
    return shown


def between(module: str) -> Iterator[nodes.section]:
    """The names that the backends offer and core has no need of."""
    for name, (origin, _) in public(BACKENDS[0]).items():
        if origin == module and name not in public(CORE):
            pair = (box(package, public(package)[name][1], set()) for package in BACKENDS)
            ids = [f"name-{name.replace('_', '-')}"]
            yield nodes.section(
                "", nodes.title(name, name), nodes.container("", *pair, classes=["natives"]), ids=ids, names=[name]
            )


class SideBySide(Directive):
    """The names of one mirrored module, in the order of `core_numpy/public.py`, below what the module says."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        wanted = self.arguments[0]
        order = [name for module, name in imports(names_file(CORE)) if module == wanted]
        if order:
            said = ast.get_docstring(parsed(module_file(CORE, wanted))) or ""
            return [*paragraphs(said), *(section(name, public(CORE)[name][1]) for name in order)]
        shown = list(between(wanted))
        if not shown:
            raise self.error(f"no package takes a public name from {wanted}")
        return [*shown]


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("side-by-side", SideBySide)
    return {"parallel_read_safe": True}
