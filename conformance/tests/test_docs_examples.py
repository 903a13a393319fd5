"""The documentation is true: its Python runs as written, its commands and links exist, its signatures are the code's.

A ```python block is executed in a fresh folder, with the names of the blocks before it on its page. One that begins
with `# name.py` is a file there, and has its own names. A ```text block right behind one is what it prints. `slow`
behind the language leaves a block to"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import io
import os
import re
import shlex
import subprocess
import sys
import types
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "docs").is_dir():
    pytest.skip("the documentation is in the repository, not in an installed package", allow_module_level=True)
PAGES = {
    page.relative_to(ROOT).as_posix(): page for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
}


class Fence(NamedTuple):
    """A fenced block: the line of its first line in the page, the words behind the fence, the text."""

    line: int
    info: list[str]
    text: str
    adjacent: bool  # only blank lines since the last block


def fences(page: str) -> list[Fence]:
    found, start, info, between = [], None, "", True
    lines = PAGES[page].read_text("utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        if start is None and line.startswith("```"):
            start, info = number, line[3:]
        elif line.strip() == "```":
            found.append(Fence(start + 1, info.split(), "\n".join(lines[start : number - 1]) + "\n", between))
            start, between = None, True
        elif start is None and line.strip():
            between = False
    assert start is None, f"{page}:{start} is never closed"
    return found


def imported(tree: ast.Module) -> set[str]:
    """The top-level packages that a block imports."""
    nodes = list(ast.walk(tree))
    whole = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {
        name.split(".")[0] for name in whole | {n.module for n in nodes if isinstance(n, ast.ImportFrom) and n.module}
    }


def run_page(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *, slow: bool) -> int:
    """Executes the page's Python, and with `slow` its console; gives the number of blocks that ran."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    names: dict[str, Any] = {"__name__": f"page_{Path(page).stem}"}
    blocks, chosen, ran = fences(page), runnable(page, slow=slow), 0
    with np.printoptions(**np.get_printoptions()):  # a page may set its own
        for block, behind in zip(blocks, [*blocks[1:], None], strict=True):
            if block in chosen and block.info == CONSOLE:
                run_console(page, block)
                ran += 1
            elif block in chosen:
                said = run_python(page, block, folder, names)
                if behind is not None and behind.info == ["text"] and behind.adjacent:
                    assert said == behind.text, f"{page}:{behind.line} says something else"
                ran += 1
    return ran


def run_python(page: str, block: Fence, folder: Path, names: dict[str, Any]) -> str:
    """What the block prints."""
    tree = ast.parse("\n" * (block.line - 1) + block.text, page)
    for name in imported(tree) & set(NEEDS):
        pytest.importorskip(NEEDS[name])
    file = re.match(r"# (\w+\.py)\b", block.text)
    if file:
        (folder / file[1]).write_text(block.text, "utf-8")
        importlib.invalidate_caches()
        names = {"__name__": file[1].removesuffix(".py")}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, page, "exec"), names)
    return printed.getvalue()


def run_console(page: str, block: Fence) -> None:
    """Runs each `$ command`; what is shown below must come in this order, `...` standing for anything."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    binaries = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "PATH": binaries, "NO_COLOR": "1"}
    for part in re.split(r"^\$ ", block.text, flags=re.M)[1:]:
        line, _, shown = part.partition("\n")
        words = shlex.split(line)
        plugin = ["-p", "no:cacheprovider"] if words[0] == "pytest" else []
        if words[0] == "pytest" and not any(e.name == "conformance" for e in metadata.entry_points(group="pytest11")):
            plugin += ["-p", "conformance.plugin"]
        assert words[0] in ("conformance", "pytest"), f"{page}:{block.line} runs {words[0]}"
        command = [sys.executable, "-m", words[0], *plugin, *words[1:]]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
        output, place = unwrapped(done.stdout + done.stderr), 0
        for chunk in re.split(r"^\.\.\.\n", shown, flags=re.M):
            found = output.find(unwrapped(chunk), place)
            assert found >= 0, f"{page}:{block.line}: {line} does not print\n{chunk}\nbut\n{done.stdout}{done.stderr}"
            place = found + len(unwrapped(chunk))


def unwrapped(text: str) -> str:
    """One line. Totals grow with the suite: how many passed, were not offered, skipped or written is not compared."""
    total = r"[\d.,]+ (?=passed|not offered|comparisons|skipped|vectors|MB)"
    return re.sub(total, "# ", " ".join(text.split()))


CONSOLE = ["console", "checked"]
NEEDS = {
    "torch": "torch",
    "jax": "jax",
    "flax": "flax",
    "keras": "keras",
    "backend_torch": "torch",
    "backend_jax": "flax",
}
ELSEWHERE = {"docs/training.md": "test_training_docs.py"}  # its blocks are scripts of their own, run by this file


def runnable(page: str, *, slow: bool) -> list[Fence]:
    """The blocks of a page that run here."""
    python = [block for block in fences(page) if block.info[:1] == ["python"] and "devices" not in block.info]
    if not slow:
        return [block for block in python if "slow" not in block.info]
    return python + [block for block in fences(page) if block.info == CONSOLE]


OWN = [page for page in PAGES if page not in ELSEWHERE]
WITH_PYTHON = [page for page in OWN if runnable(page, slow=False)]
WITH_SLOW = [page for page in OWN if len(runnable(page, slow=True)) > len(runnable(page, slow=False))]


def test_a_page_that_is_run_elsewhere_is_run_there():
    for page, file in ELSEWHERE.items():
        assert Path(page).name in (Path(__file__).parent / file).read_text("utf-8")


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_the_python_of_a_page_runs_as_written(page, tmp_path, monkeypatch):
    before = set(sys.modules)
    assert run_page(page, tmp_path, monkeypatch, slow=False) == len(runnable(page, slow=False))
    forget(before, tmp_path)


def forget(before: set[str], folder: Path) -> None:
    """The page's own modules, whose files are gone after it."""
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
            del sys.modules[name]


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_SLOW)
def test_all_of_a_page_runs_as_written_its_console_too(page, tmp_path, monkeypatch):
    before = set(sys.modules)
    assert run_page(page, tmp_path, monkeypatch, slow=True) == len(runnable(page, slow=True))
    forget(before, tmp_path)


# --- commands
OURS = r"(?:python -m )?conformance|python -m (?:core_numpy|backend_torch|backend_jax)|make|pytest"
COMMAND = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:\$ )?({OURS})(?: (.*))?$")


def commands(page: str) -> list[tuple[int, str, list[str]]]:
    """(line, program, words) of each command of ours on a page: in blocks, indented, and in `code`."""
    text = PAGES[page].read_text("utf-8")
    shown: list[tuple[int, str]] = []
    prose = text
    for block in fences(page):
        prose = prose.replace(block.text, "\n" * block.text.count("\n"), 1)
        if not block.info or block.info[0] in ("console", "bash", "sh"):
            joined = block.text.replace("\\\n", " ")
            shown += [(block.line + number, line) for number, line in enumerate(joined.splitlines())]
    for number, line in enumerate(prose.splitlines(), 1):
        if line.startswith("    ") and not line.strip().startswith(("-", "|")):
            shown.append((number, line.strip()))
        shown += [(number, code) for code in re.findall(r"`([^`]+)`", line)]
    found = []
    for number, line in shown:
        match = COMMAND.match(re.sub(r"\s+#.*", "", line).strip())
        if match and match[2]:
            found.append((number, match[1], match[2].split()))
    return found


@functools.cache
def options_of(program: str, verb: str, second: str) -> frozenset[str]:
    """What `--help` lists; the empty set where the command line knows no such verb."""
    from conformance.__main__ import VERBS, main

    words = [verb, *([second] if second else []), "--help"]
    help_text = io.StringIO()
    with contextlib.redirect_stdout(help_text), contextlib.redirect_stderr(io.StringIO()):
        try:
            if program.endswith("conformance"):
                status = main(words) if verb in VERBS else 2
            else:
                from core_numpy.contract.cli import build_parser

                build_parser(types.ModuleType("core_numpy")).parse_args(words)
        except SystemExit as stop:
            status = stop.code
    return frozenset(re.findall(r"--[a-z][\w-]*", help_text.getvalue())) if status == 0 else frozenset()


def wrong_command(program: str, words: list[str]) -> str | None:
    """What is wrong with a command of ours, or None."""
    from conformance.__main__ import VERBS

    asked = {word.strip("[]()").split("=")[0] for word in words if word.strip("[](").startswith("--")}
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M)
        unknown = [word for word in words if "=" not in word and not word.startswith("-") and word not in targets]
        return f"no target {unknown}" if unknown else None
    if program == "pytest":
        plugin = (ROOT / "conformance/plugin.py").read_text("utf-8")
        unknown = [o for o in asked - {"--pyargs", "--junitxml"} if f'"{o}"' not in plugin]
        return f"no options {unknown}" if unknown else None
    if words[0].isupper() or (asked <= {"--help", "--version"} and words[0].startswith("--")):
        return None
    own = program.endswith("conformance")
    verb = words[0] if not own or words[0] in VERBS else "run"
    second = words[1] if len(words) > 1 and re.fullmatch(r"[a-z]+", words[1]) else ""
    known = options_of(program, verb, second) or options_of(program, verb, "")
    if not known or (own and words[0] not in VERBS and not words[0].startswith("-")):
        return f"no verb {words[0]}"
    return f"no options {sorted(asked - known)}" if asked - known else None


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_can_be_parsed(page):
    for block in fences(page):
        if block.info[:1] == ["python"]:
            assert ast.parse(block.text, f"{page}:{block.line}").body


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_exist_with_their_options(page):
    wrong = [f"{page}:{line} {program} {' '.join(words)}: {said}" for line, program, words in commands(page)
             if (said := wrong_command(program, words))]  # fmt: skip
    assert not wrong, "\n".join(wrong)


def test_a_command_or_an_option_that_does_not_exist_is_noticed():
    assert wrong_command("conformance", ["run", "my_attention", "--json", "-"]) is None
    assert wrong_command("conformance", ["judge", "my_attention"]) == "no verb judge"
    assert wrong_command("python -m conformance", ["race", "--sice", "tiny"]) == "no options ['--sice']"
    assert wrong_command("python -m backend_torch", ["teach"]) == "no verb teach"
    assert wrong_command("python -m backend_jax", ["train", "--step", "3"]) == "no options ['--step']"
    assert wrong_command("make", ["everything"]) == "no target ['everything']"
    assert wrong_command("pytest", ["--pyargs", "conformance", "--targets", "x"]) == "no options ['--targets']"


# --- links
def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES)
def test_the_links_of_a_page_lead_somewhere(page):
    home, text = PAGES[page].parent, PAGES[page].read_text("utf-8")
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        target = home / path if path else PAGES[page]
        if not path.startswith(("http:", "https:")) and (
            not target.exists() or (anchor and anchor not in anchors(target))
        ):
            wrong.append(link)
    wrong += [name for name in re.findall(r"`(docs/[\w.-]+)`", text) if not (ROOT / name).exists()]
    listed = re.findall(
        r"^(?!```)([\w-]+)$", "\n".join(b.text for b in fences(page) if b.info[:1] == ["{toctree}"]), re.M
    )
    wrong += [name for name in listed if not (home / f"{name}.md").exists()]
    assert not wrong, f"{page} links to {wrong}"


def test_every_page_is_in_the_table_of_contents():
    listed = {line for block in fences("docs/index.md") for line in block.text.splitlines()}
    assert {Path(page).stem for page in PAGES} - listed == {"README", "index"}


# --- signatures
def entries(page: str) -> list[tuple[str, str]]:
    """(name, arguments) of each `name(arguments)` that begins a line of the page's ```text blocks."""
    text = "\n".join(block.text for block in fences(page) if block.info == ["text"])
    text = re.sub(r"#.*|->.*", "", text)
    return [
        (name, " ".join(given.split())) for name, given in re.findall(r"^(\w+)\(((?:[^()]|\([^()]*\))*)\)", text, re.M)
    ]


def test_the_signatures_of_the_specification_are_those_of_the_code():
    import core_numpy

    compared, wrong = 0, []
    for name, given in entries("docs/spec.md"):
        if name not in core_numpy.__all__ or "<the same>" in given or "..." in given:
            continue
        names: dict[str, Any] = {}
        exec(f"def said({given}): pass", names)
        said, code = (
            [(p.name, p.kind, p.default) for p in inspect.signature(each).parameters.values()]
            for each in (names["said"], getattr(core_numpy, name))
        )
        compared += 1
        wrong += [] if said == code else [f"{name}: the page has {said}, the code {code}"]
    assert not wrong, "\n".join(wrong)
    assert compared > 50


def test_every_public_name_is_in_the_specification():
    import core_numpy

    words = set(re.findall(r"\w+", (ROOT / "docs/spec.md").read_text("utf-8")))
    missing = [name for name in core_numpy.__all__ if not name.endswith("_vjp") and name not in words]
    assert missing == []


# --- the site
@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_lists_every_public_name(tmp_path):
    for name in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(name)
    import core_numpy

    # A process of its own: what the builder's own Python warns of is not about the pages.
    command = [sys.executable, "-m", "sphinx", "-E", "-W", "-q", "-d", str(tmp_path / "trees"), str(ROOT / "docs")]
    done = subprocess.run([*command, str(tmp_path / "html")], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and not done.stderr, done.stderr
    page = (tmp_path / "html/api.html").read_text("utf-8")
    missing = [name for name in core_numpy.__all__ if f'id="name-{name.replace("_", "-").lower()}"' not in page]
    assert missing == []
    resource = r'<(?:script|img|link)[^>]+(?:src|href)="(https?://[^"]+)'
    fetched = [url for file in (tmp_path / "html").rglob("*.html")
               for url in re.findall(resource, file.read_text("utf-8"))]  # fmt: skip
    assert fetched == []
