"""`python -m conformance VERB`, and the console script `conformance`.

Exit status: 0 where everything passed, 1 where something failed, 2 for a wrong command line, 3 where a package that is
needed is not installed, 130 where Ctrl-C ended it.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from core_numpy.contract.arguments import Parser, ended

from .progress import Bar
from .suites import SUITES

# What every verb reads or prints with: the tables, the cases' dtypes, the files.
TOOLS = ("rich", "ml_dtypes", "safetensors", "matplotlib", "jinja2", "psutil")
OURS = {"core_numpy": None, "backend_torch": "torch", "backend_jax": "jax"}
VERBS = {
    "run": "every case on every target (the default)",
    "zoo": "every known fault, planted: which cases catch it",
    "diagnose": "what is wrong with a target: its outputs against every known fault",
    "calibrate": "what share of its error budget a right implementation uses, over random attention cases",
    "peers": "what others wrote, judged feature by feature",
    "vectors": "cases as plain files, for implementations in any language: write, check",
    "race": "training speed of the frameworks, side by side",
    "devices": "what compiles and lowers for which device; on a machine that has one, the suite and the race on it",
    "lab": "the course's claims, each measured: table, picture, held or not",
    "maps": "attention maps of a model on a text, as pictures",
    "curves": "training runs side by side, against gzip and bz2",
    "demo": "conformance, training and a race in one HTML report",
    "completion": "a script that completes this command in bash, zsh or tcsh",
}


def installed() -> list[str]:
    """Our packages whose framework is installed; the others are named on standard error."""
    found = []
    for name, framework in OURS.items():
        if framework is None or importlib.util.find_spec(framework) is not None:
            found.append(name)
        else:
            print(
                f"{name} is left out: {framework} is not installed (pip install 'attention-conformance[{framework}]')",
                file=sys.stderr,
            )
    return found


TARGETS_HELP = (
    "what to judge: a module, module:object, an entry point of group conformance.targets, "
    "a peer (conformance peers --list), or 'command:PROGRAM {inputs} {outputs}'; default: our three packages"
)


def _run_parser() -> argparse.ArgumentParser:
    from .rows import CASE_HELP

    parser = Parser(
        prog="conformance run",
        description="Every case on every target.",
        epilog="example: conformance run my_package.my_attention --level full --json out.json",
    )
    parser.add_argument("targets", nargs="*", help=TARGETS_HELP)
    parser.add_argument("--level", default="quick", choices=("quick", "full", "exhaustive"))
    parser.add_argument("--suite", choices=tuple(SUITES), help="an outside suite's cases in the place of ours")
    parser.add_argument("--case", action="append", metavar="TEXT", help=CASE_HELP)
    parser.add_argument("--json", metavar="FILE", help="write the results as JSON; - for standard output")
    parser.add_argument("--junit", metavar="FILE", help="write the results as JUnit XML")
    parser.add_argument("--html", metavar="FILE", help="write the results as one HTML page")
    parser.add_argument(
        "--diagnose",
        action=argparse.BooleanOptionalAction,
        help="hold each failing target against every known fault, a minute each; default: with --html",
    )
    parser.add_argument("--device", metavar="DEVICE", help="for torch and JAX: cuda, cuda:1, cpu (torch's default)")
    parser.add_argument("--jobs", type=int, metavar="N", help="targets judged at a time; default: one per core")
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="end a target that is silent for longer in one call; default: 120, of the suite parallel 600",
    )
    parser.add_argument(
        "--fuzz",
        type=float,
        metavar="SECONDS",
        help="random attention cases on each target for so long; what fails is made small and printed as a new case",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random cases; default: 0")
    parser.add_argument("--list", action="store_true", help="list the cases and stop")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def run(argv: Sequence[str]) -> int:
    from .workers import on_device

    options = _run_parser().parse_args(argv)
    with on_device(options.device):
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    from . import deviations, summary
    from .runner import ABSENT, FAILED
    from .suites import suite_timeout
    from .workers import TIMEOUT, cores, judge_targets, no_case, selected

    timeout = suite_timeout(options.suite, TIMEOUT) if options.timeout is None else options.timeout
    if not timeout > 0:
        raise ValueError(f"--timeout must be a positive number of seconds; got {timeout:g}")
    if options.jobs is not None and options.jobs < 1:
        raise ValueError(f"--jobs must be at least 1; got {options.jobs}")
    if options.fuzz is not None:
        return _fuzz(options, timeout)
    for text in options.case or ():
        if not selected(options.level, text, options.suite):
            raise no_case(text, options.level, options.suite)
    cases = selected(options.level, options.case, options.suite)
    if options.list:
        for case in cases:
            print(f"{case.id:44} {case.function:22} {', '.join(case.rules)}")
        return 0
    # The slowest first, so that the others fill the second core meanwhile.
    names = list(dict.fromkeys(options.targets or installed()))
    order = sorted(names, key=lambda name: name not in ("backend_jax", "jax"))
    unusable: dict[str, Exception] = {}

    def left_out(name: str, error: Exception) -> None:
        unusable[name] = error
        if len(names) > 1:  # said at once: the others may take an hour
            print(f"conformance run: {error}; the other targets go on", file=sys.stderr)

    with Bar(len(names) * len(cases), quiet=options.json == "-") as advance:
        jobs = options.jobs or cores()
        judged = judge_targets(order, options.level, options.case, advance, jobs, timeout, options.suite, left_out)
    if not judged:
        raise next(unusable[name] for name in names if name in unusable)
    names = [name for name in names if name in judged]
    whole = not options.case and options.suite is None
    results = [r for name in names for r in deviations.apply(name, judged[name][0], whole=whole)]
    called = {name: judged[name][0][0].target if judged[name][0] else name for name in names}
    facts = {called[name]: judged[name][1] for name in names}
    if options.json != "-":
        reasons = {case.id: f"{', '.join(case.rules)}: {case.why}" for case in cases if getattr(case, "why", "")}
        summary.print_run(results, facts, reasons=reasons)
    said = {name: " ".join(str(error).split()) for name, error in unusable.items()}
    document = summary.document(results, facts, options.level, options.suite, said)
    if options.diagnose or (options.diagnose is None and options.html):
        _diagnosed(document, called, options, timeout)
    _write(document, results, said, options)
    idle = [name for name in names if all(result.status == ABSENT for result in judged[name][0])]
    for name in idle:
        print(f"conformance run: {name} offers nothing that these cases ask for: nothing was judged", file=sys.stderr)
    for name, about in facts.items():
        if about.get("notes"):
            print(f"conformance run: {name}: {'; '.join(about['notes'])}", file=sys.stderr)
    if said:
        print(f"conformance run: {', '.join(said)}: not judged", file=sys.stderr)
    return 3 if said else int(bool(idle) or any(result.status == FAILED for result in results))


def _write(document: dict[str, Any], results: Sequence[Any], said: dict[str, str], options: argparse.Namespace) -> None:
    """The files that were asked for."""
    from . import summary

    if options.json:
        summary.write_json(options.json, document)
    if options.junit:
        summary.write_junit(options.junit, results, said)
    if options.html:
        from .report.html import write_report

        write_report(options.html, conformance=document)


def _diagnosed(document: dict[str, Any], called: dict[str, str], options: argparse.Namespace, timeout: float) -> None:
    """Adds "diagnosis" to each target of the document that fails a case of ours."""
    from . import diagnose
    from .runner import FAILED

    for name, target in called.items():
        found = document["targets"][target]
        if found["counts"][FAILED] and options.suite is None:  # an outside suite's cases are not ours to diagnose
            found["diagnosis"] = diagnose.separately(name, options.level, options.case, timeout)
            if options.json != "-":
                diagnose.print_document(target, found["diagnosis"])


def _fuzz(options: argparse.Namespace, timeout: float) -> int:
    from .fuzz_run import run_fuzz

    if not options.fuzz > 0:
        raise ValueError(f"--fuzz must be a positive number of seconds; got {options.fuzz:g}")
    if options.seed < 0:
        raise ValueError(f"--seed must be 0 or more; got {options.seed}")
    others = [name for name in ("case", "suite", "junit", "html", "list") if getattr(options, name)]
    if others:
        raise ValueError(
            f"--fuzz draws its own cases: it does not go with --{others[0]}; give that to a run without --fuzz"
        )
    names = list(dict.fromkeys(options.targets or installed()))
    return run_fuzz(names, options.seed, options.fuzz, timeout, options.json)


def _verb(name: str) -> Callable[[Sequence[str]], int]:
    if name == "run":
        return run
    module = importlib.import_module(f".{name}", __package__)
    return module.main


def _mistyped(word: str) -> str | None:
    """The verb that a first word was meant to be which is near one and names nothing that could be judged."""
    import difflib
    from importlib import machinery, metadata

    near = difflib.get_close_matches(word, VERBS, 1, cutoff=0.75) if word.isidentifier() else []
    if not near or machinery.PathFinder.find_spec(word, [os.getcwd(), *sys.path]) is not None:
        return None
    return None if metadata.entry_points(group="conformance.targets", name=word) else near[0]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; errors are one line on standard error unless --debug."""
    from core_numpy.contract import __version__

    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] in (["-h"], ["--help"]):
        print("usage: conformance [VERB] [options]\n")
        print("\n".join(f"  {name:10} {text}" for name, text in VERBS.items()))
        print("\nconformance VERB --help says more; example: conformance run --level quick --json result.json")
        return 0
    if arguments[:1] == ["--version"]:
        print(f"conformance {__version__}")
        return 0
    named = bool(arguments) and arguments[0] in VERBS
    name = arguments.pop(0) if named else "run"
    meant = None if named or not arguments else _mistyped(arguments[0])
    if meant:  # before the words behind it are taken for targets and judged
        print(f"conformance: there is no verb {arguments[0]}, and no target; did you mean {meant}?", file=sys.stderr)
        return 2
    absent = [module for module in TOOLS if importlib.util.find_spec(module) is None]
    if absent:  # said before the work, not after it
        needs = f"conformance {name}: needs {', '.join(absent)}: pip install 'attention-conformance[tools]'"
        print(needs, file=sys.stderr)
        return 3

    def verbs(error: Exception) -> str:
        """The word in front was meant as a verb, perhaps."""
        return f"; the verbs are {', '.join(VERBS)}" if isinstance(error, ImportError) and not named else ""

    return ended(lambda: _verb(name)(arguments), f"conformance {name}", debug="--debug" in arguments, hint=verbs)


if __name__ == "__main__":
    sys.exit(main())
