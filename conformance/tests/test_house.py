"""The commands as someone meets them who has not installed everything, or wants to know what they do."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest

from conformance.__main__ import VERBS, main

ROOT = Path(__file__).parents[2]


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.mark.parametrize(("package", "framework", "extra"), [("torch", "torch", "torch"), ("jax", "flax", "jax")])
def test_a_backend_without_its_framework_is_one_line_that_names_the_extra(package, framework, extra, tmp_path):
    (tmp_path / f"{framework}.py").write_text("raise ImportError")
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    for more, lines in ((["-m", f"backend_{package}", "train"], 1), (["-c", f"import backend_{package}"], None)):
        done = subprocess.run(
            [sys.executable, *more], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
        )
        assert f"pip install 'attention-conformance[{extra}]'" in done.stderr.splitlines()[-1]
        assert done.returncode == (3 if lines else 1)
        assert lines is None or len(done.stderr.splitlines()) == lines


@pytest.mark.parametrize("verb", VERBS)
def test_a_missing_tool_is_said_before_any_work(verb, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "rich" else find(name))
    assert main([verb]) == 3
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"conformance {verb}: needs rich: pip install 'attention-conformance[tools]'\n"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_a_help_that_fits_a_screen_with_an_example(verb, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert len(text.splitlines()) <= 40
    assert re.search("example", text, re.IGNORECASE)
    assert "--debug" in text or verb == "vectors"  # whose two verbs have it


@pytest.mark.parametrize("verb", VERBS)
def test_a_word_that_no_verb_knows_is_a_line_and_status_2(verb, capsys):
    with pytest.raises(SystemExit) as ended:
        main([verb, "--no-such-option"])
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == "" and re.fullmatch(rf"conformance {verb}: .*; conformance {verb} --help says more\n", said.err)


# What is started by other processes of ours, with arguments of their own.
WORKERS = {
    "conformance.race.worker",
    "conformance.race.long_worker",
    "conformance.devices.aot_worker",
    "conformance.suites.parallel_worker",
}
# A script for a shell is for a program already.
NO_JSON = {"conformance completion"}


def measuring() -> list[str]:
    """Every module of `conformance` that is a command by itself, beside the verbs."""
    found = []
    for file in sorted((ROOT / "conformance").rglob("*.py")):
        if "tests" not in file.parts and '__name__ == "__main__"' in file.read_text(encoding="utf-8"):
            found.append(".".join(file.relative_to(ROOT).with_suffix("").parts))
    return [name for name in found if name not in WORKERS | {"conformance.__main__"}]


def leaves(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """The parser, or those of its verbs."""
    verbs = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [leaf for one in verbs for verb in one.values() for leaf in leaves(verb)] if verbs else [parser]


def every_parser() -> list[argparse.ArgumentParser]:
    from conformance.completion import caught, parser_of
    from conformance.race.command import compare_files
    from core_numpy.contract.cli import build_parser

    found = [caught(compare_files)]
    for parser in (
        *map(parser_of, VERBS),
        *(caught(importlib.import_module(name).main) for name in measuring()),
        *(build_parser(types.ModuleType(name)) for name in ("core_numpy", "backend_torch", "backend_jax")),
    ):
        found += leaves(parser)
    return found


def test_every_command_has_json_debug_and_an_example():
    parsers = {parser.prog: parser for parser in every_parser()}
    assert len(parsers) > 25 and {"conformance vectors write", "conformance race compare"} <= parsers.keys()
    assert {"python -m conformance.race.decode", "python -m conformance.plan"} <= parsers.keys()
    lacking = {}
    for prog, parser in parsers.items():
        options = parser._option_string_actions
        wanted = {"--debug", "--help"} | (set() if prog in NO_JSON else {"--json"})
        lacks = [*sorted(wanted - options.keys()), *([] if "xample" in (parser.epilog or "") else ["an example"])]
        if lacks:
            lacking[prog] = lacks
        # Lines as they come, of the three backends; elsewhere a document, to standard output where FILE is "-".
        streams = "conformance" not in prog
        if "--json" in options:
            assert options["--json"].nargs == (0 if streams else None), prog
    assert lacking == {}


MEASURING_REFUSED = {
    "race.products": ["--seconds", "-1"],
    "race.decode": ["--rounds", "0"],
    "race.loading": ["--megabytes", "0"],
    "race.attention_torch": ["--case", "nosuch"],
    "race.attention_jax": ["--case", "nosuch"],
    "plan": ["--rows", "0"],
}


def test_an_error_of_a_measuring_command_is_one_line_and_with_debug_a_traceback(capsys):
    assert measuring() == sorted(f"conformance.{name}" for name in MEASURING_REFUSED)
    for name, wrong in MEASURING_REFUSED.items():
        main = importlib.import_module(f"conformance.{name}").main
        assert main(wrong) == 2
        said = capsys.readouterr()
        assert said.out == "" and said.err.startswith(f"python -m conformance.{name}: ") and said.err.count("\n") == 1
        with pytest.raises(ValueError, match=r"nosuch|must be"):
            main([*wrong, "--debug"])


def test_the_plan_is_a_table_or_a_document(capsys):
    from conformance.plan import main

    assert main([]) == 0
    printed = capsys.readouterr().out
    assert main(["--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["computed"] is True and document["rows"][-1]["devices"] == 4096
    assert printed.count("\n| ") == len(document["rows"]) + 1 and "| 4,096 |" in printed


# What each verb refuses by itself, after argparse: a line that says why, and the traceback with --debug.
REFUSED = {
    "run": ["core_numpy", "--jobs", "0"],
    "zoo": ["--fault", "nosuch"],
    "diagnose": ["core_numpy", "--case", "nosuch"],
    "calibrate": ["nosuch"],
    "peers": ["nosuch"],
    "vectors": ["check", "nosuch", "core_numpy"],
    "race": ["--rounds", "0"],
    "lab": ["nosuch"],
    "maps": ["--model", "nosuch", "a text"],
    "curves": ["nosuch"],
    "demo": ["--steps", "0"],
}


@pytest.mark.parametrize("verb", REFUSED)
def test_an_error_is_one_line_and_with_debug_a_traceback(verb, capsys):
    status = main([verb, *REFUSED[verb]])
    said = capsys.readouterr()
    assert status == (3 if verb == "calibrate" else 2)
    assert said.err.startswith(f"conformance {verb}: ") and said.err.count("\n") == 1
    with pytest.raises((ValueError, OSError, ImportError)):
        main([verb, *REFUSED[verb], "--debug"])


def test_what_is_neither_a_verb_nor_a_module_is_told_the_verbs(capsys):
    assert main(["kernell"]) == 3
    said = capsys.readouterr().err
    assert "'kernell'" in said and said.endswith(f"; the verbs are {', '.join(VERBS)}\n") and said.count("\n") == 1
    assert main(["run", "kernell"]) == 3
    assert "the verbs are" not in capsys.readouterr().err


def test_a_mistyped_verb_is_said_before_what_follows_is_judged(capsys, tmp_path, monkeypatch):
    assert main(["runn", "core_numpy"]) == 2
    said = capsys.readouterr().err
    assert said == "conformance: there is no verb runn, and no target; did you mean run?\n"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runn.py").write_text("x = 1\n")  # a module of that name is a target, though a useless one
    assert main(["runn"]) == 3
    assert "target 'runn' has none of the public names" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["run", "diagnose"])
def test_a_mistyped_case_or_level_is_told_the_near_one(verb, capsys):
    assert main([verb, "core_numpy", "--case", "attention-maks"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"conformance {verb}: no case ") and "did you mean " in said and "attention-mask-2d" in said
    assert said.count("\n") == 1 and "'attention-maks'" in said
    with pytest.raises(SystemExit) as stopped:
        main([verb, "core_numpy", "--level", "quik"])
    assert stopped.value.code == 2 and "; did you mean quick?; " in capsys.readouterr().err
    assert main([verb, "core_numpy", "--case", "attention-pairs-118"]) == 2
    assert "of level quick has 'attention-pairs-118' in its id; level full has: --level full" in capsys.readouterr().err


def test_several_cases_are_all_run_and_one_that_selects_nothing_is_named(capsys):
    def listed(*texts: str) -> list[str]:
        assert main(["run", "--list", *(word for text in texts for word in ("--case", text))]) == 0
        return [line.split()[0] for line in capsys.readouterr().out.splitlines()]

    one, other = listed("rms_norm"), listed("gelu")
    assert one and other and sorted(listed("gelu", "rms_norm")) == sorted([*one, *other])
    assert listed("rms_norm", "rms_norm") == one
    for command in (["run", "core_numpy"], ["diagnose", "core_numpy"], ["vectors", "write", "never"]):
        assert main([*command, "--case", "rms_norm", "--case", "gleu"]) == 2
        said = capsys.readouterr().err
        assert "'gleu'" in said and "did you mean gelu" in said


@pytest.mark.parametrize("package", ["core_numpy", "backend_torch", "backend_jax"])
def test_each_package_says_its_version(package, capsys):
    pytest.importorskip({"backend_torch": "torch", "backend_jax": "jax"}.get(package, package))
    from core_numpy.contract import __version__
    from core_numpy.contract.cli import main as cli

    with pytest.raises(SystemExit) as ended:
        cli(importlib.import_module(package), ["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"python -m {package} {__version__}\n"


def test_the_version_is_one_number_everywhere():
    from core_numpy.contract import __version__

    assert f"version: {__version__}" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(rf"^## (Unreleased|{re.escape(__version__)})", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)


def test_what_is_installed_for_the_tests_is_inside_the_ranges_that_the_project_claims():
    pinned = dict(
        line.lower().split("==") for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines() if "==" in line
    )
    extras = project()["optional-dependencies"]
    wanted = ("tools", "torch", "jax", "peers", "dev")
    for line in [*project()["dependencies"], *(line for name in wanted for line in extras[name])]:
        found = re.match(r"([\w.-]+)(\[\w+\])?>=([\d.]+)", line)
        if found is None:
            continue
        name, _, least = found.groups()
        name = name.lower()
        version = pinned.get(name, pinned.get(name.replace("-", "_")))
        assert version is not None, f"constraints.txt has no version of {name}"
        assert tuple(map(int, re.findall(r"\d+", version)[:2])) >= tuple(map(int, re.findall(r"\d+", least)[:2]))
