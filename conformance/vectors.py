"""Test vectors: cases as plain files, for implementations in any language. `main` is `conformance vectors`.

docs/vectors.md describes the folder. Its bytes depend on the cases and the reference alone: no time, no machine.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from core_numpy.contract import tensor_file
from core_numpy.contract.arguments import Parser
from core_numpy.contract.json_file import read_object

from . import exchange
from .compare import Disagreement, Tally, check_exact, check_kind, check_within
from .functions import FUNCTIONS
from .models import select_models
from .rows import CASE_HELP, LEVELS, Pattern, matches, texts_of
from .runner import FAILED, Result, judged
from .space import select
from .targets.protocol import NotOffered, Target
from .vector_cases import Vector, model_vectors_of, vectors_of
from .workers import lost_call, no_case

SCHEMA = exchange.SCHEMA
MANIFEST = "vectors.json"
# Where a result that a broken vector has is wrong: not in the answer.
BROKEN = "the vector"


def write(folder: str | os.PathLike[str], level: str = "quick", pattern: Pattern = None) -> dict[str, Any]:
    """Write a new folder; the manifest comes last, so that a folder without one is an unfinished one."""
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not an empty folder; vectors are written to a new one")
    for text in texts_of(pattern):
        if not _vectors(level, text):
            raise no_case(text, level, what="no case that vectors can hold")
    vectors = _vectors(level, pattern)
    for part in ("inputs", "expected"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    listed = []
    for vector in vectors:
        files = {
            f"inputs/{vector.id}.json": exchange.encode_json(vector.request),
            f"inputs/{vector.id}.safetensors": tensor_file.encode_tensors(vector.id, vector.inputs),
            f"expected/{vector.id}.safetensors": tensor_file.encode_tensors(vector.id, vector.expected),
        }
        for name, data in files.items():
            (folder / name).write_bytes(data)
        digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
        listed.append({"id": vector.id, "rules": list(vector.rules), "function": vector.function, "files": digests})
    (folder / "schema.json").write_bytes(exchange.encode_json(json_schema()))
    manifest = {"schema": SCHEMA, "level": level, "vectors": listed}
    tensor_file.write_whole(folder / MANIFEST, exchange.encode_json(manifest))
    return manifest


def _vectors(level: str, pattern: Pattern) -> list[Vector]:
    found = [vector for case in select(level, pattern) for vector in vectors_of(case)]
    return found + [vector for model in select_models(level, pattern) for vector in model_vectors_of(model)]


def json_schema() -> dict[str, Any]:
    """JSON Schema of a request, as programs and vectors have it."""
    names = {"type": "array", "items": {"type": "string"}}
    fields: dict[str, Any] = {
        "schema": {"const": SCHEMA},
        "function": {"enum": [*FUNCTIONS, "Transformer"]},
        "dtype": {"enum": list(exchange.DTYPES)},
        "positional": names,
        "inputs": names,
        "arguments": {"type": "object"},
        "results": names,
        "gradients": names,
    }
    of_vectors: dict[str, Any] = {
        "id": {"type": "string"},
        "case": {"type": "string"},
        "rules": names,
        "why": {"type": "string"},
        "dtypes": {"type": "object", "additionalProperties": {"enum": list(exchange.DTYPES)}},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "One call: inputs/<id>.json",
        "type": "object",
        "required": list(fields),
        "properties": fields | of_vectors,
        "additionalProperties": False,
    }


# --- checking answers


def read_manifest(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest of a folder of vectors; ValueError, in one sentence, for what is none."""
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise ValueError(f"{folder} is no folder of vectors: it has no {MANIFEST} (an unfinished one has none either)")
    manifest = read_object(path)
    try:
        schema = manifest["schema"]
        if schema == SCHEMA:
            for entry in manifest["vectors"]:
                _ = entry["id"], entry["rules"], entry["function"], entry["files"].items()
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a manifest of vectors: {type(error).__name__}: {error}") from error
    if schema != SCHEMA:
        raise ValueError(f"{path} has schema {schema!r}; this version reads schema {SCHEMA}")
    return manifest


class BrokenError(ValueError):
    """A vector's own files are not what was written: no answer can be judged by them."""


def _sound(folder: Path, entry: Mapping[str, Any]) -> None:
    """Every file of a vector is there and has the bytes that were written."""
    for name, digest in entry["files"].items():
        path = folder / name
        if not path.is_file():
            raise BrokenError(f"{folder} is broken: {name} is missing; write the vectors again")
        if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            raise BrokenError(f"{folder} is broken: {name} is not what was written; write the vectors again")


@dataclass(frozen=True)
class _Entry:
    """What `judged` wants to know of a case."""

    id: str
    rules: tuple[str, ...]
    function: str


def check(
    folder: str | os.PathLike[str], answers: str | os.PathLike[str], pattern: Pattern = None
) -> tuple[list[Result], list[str]]:
    """One result per vector, and the names of answers that belong to no vector. A missing answer is not offered; a
    vector that is broken fails, with where = BROKEN."""
    folder, answers = Path(folder), Path(answers)
    manifest = read_manifest(folder)
    if not answers.is_dir():
        raise ValueError(f"{answers} is not a folder of answers")
    chosen = [e for e in manifest["vectors"] if matches(pattern, e["id"], e["function"])]
    if not manifest["vectors"]:
        raise ValueError(f"{folder} holds no vectors")
    for text in texts_of(pattern):
        if not any(matches(text, entry["id"], entry["function"]) for entry in chosen):
            names = dict.fromkeys(entry[key] for entry in manifest["vectors"] for key in ("id", "function"))
            near = difflib.get_close_matches(text, names, 3)
            meant = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ValueError(f"no vector of {folder} has {text!r} in its id, and no function has that name{meant}")
    known = {f"{entry['id']}.safetensors" for entry in manifest["vectors"]}
    # An answer under another suffix is none; what a program leaves beside its answers is nobody's business.
    found = {file.name for file in answers.iterdir() if file.suffix == ".safetensors" or _vector(file.name, known)}
    if not found & {f"{entry['id']}.safetensors" for entry in chosen}:
        misnamed = f"; {answer_no_vector(sorted(found - known), known)}" if found - known else ""
        raise ValueError(
            f"{answers} holds no answer: a file <id>.safetensors for each id of {folder / MANIFEST}{misnamed}"
        )
    target = Target(None, answers.name or "answers")
    results = []
    for entry in chosen:
        case = _Entry(entry["id"], tuple(entry["rules"]), entry["function"])
        try:
            _sound(folder, entry)
            asked = json.loads((folder / "inputs" / f"{entry['id']}.json").read_text(encoding="utf-8"))
        except BrokenError as error:
            results.append(replace(lost_call(case, target.name, str(error)), where=BROKEN))
            continue

        def work(tally: Tally, asked: dict[str, Any] = asked) -> None:
            _check_answer(folder, answers, asked, tally)

        results.append(judged(case, target, asked["dtype"], "auto", work))
    return results, sorted(found - known)


def _vector(name: str, known: Iterable[str]) -> bool:
    """Whether a file bears the name of a vector, whatever its suffix."""
    return f"{name}.safetensors" in known or f"{name.rpartition('.')[0]}.safetensors" in known


def answer_no_vector(strangers: Sequence[str], known: Iterable[str]) -> str:
    """The sentence for files that answer no vector: the first ones, each with the name that it is near to."""
    named = []
    for name in strangers[:3]:
        near = difflib.get_close_matches(name, known, 1, cutoff=0.8)
        named.append(f"{name} (did you mean {near[0]}?)" if near else name)
    more = f" and {len(strangers) - 3} more" if strangers[3:] else ""
    verb = "1 file answers" if len(strangers) == 1 else f"{len(strangers)} files answer"
    return f"{verb} no vector: {', '.join(named)}{more}"


def _check_answer(folder: Path, answers: Path, asked: dict[str, Any], tally: Tally) -> None:
    path = answers / f"{asked['id']}.safetensors"
    if not path.exists():
        raise NotOffered("no answer")
    got, _ = tensor_file.read_tensors(path)
    expected, _ = tensor_file.read_tensors(folder / "expected" / path.name)
    lacking = []
    for name in exchange.answer_names(asked):
        if name not in got:
            if not name.startswith("gradient."):
                raise Disagreement(f"the answer lacks {name}")
            lacking.append(name)
            continue
        check_kind(name, got[name], expected[name].shape, asked["dtypes"].get(name))
        if f"bound.{name}" in expected:
            check_within(tally, name, got[name], expected[name], expected[f"bound.{name}"])
        else:
            check_exact(tally, name, got[name], expected[name])
    if lacking:
        tally.lacking = f"not offered: {', '.join(lacking)}"


# --- the command line


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="conformance vectors",
        description="Cases as plain files, for implementations in any language; docs/vectors.md describes them.",
        epilog="example: conformance vectors write vectors; mkdir answers; for f in vectors/inputs/*.safetensors; do "
        "./my_kernel $f answers/$(basename $f); done; conformance vectors check vectors answers",
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    writing = verbs.add_parser(
        "write", help="write a folder of vectors", epilog="example: conformance vectors write vectors --level quick"
    )
    writing.add_argument("folder", metavar="DIR", help="a new folder")
    writing.add_argument("--level", default="quick", choices=LEVELS)
    writing.add_argument("--json", metavar="FILE", help="write what was written as JSON; - for standard output")
    checking = verbs.add_parser(
        "check", help="judge a folder of answers", epilog="example: conformance vectors check vectors answers"
    )
    checking.add_argument("folder", metavar="DIR", help="what `write` wrote")
    checking.add_argument("answers", metavar="ANSWERS", help="a folder with <id>.safetensors for each vector")
    checking.add_argument("--json", metavar="FILE", help="write the results as JSON; - for standard output")
    for one in (writing, checking):
        one.add_argument("--case", action="append", metavar="TEXT", help=CASE_HELP.replace("cases", "vectors"))
        one.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def main(argv: Sequence[str]) -> int:
    from . import summary

    options = _parser().parse_args(argv)
    if options.verb == "write":
        manifest = write(options.folder, options.level, options.case)
        size = sum(file.stat().st_size for file in Path(options.folder).rglob("*") if file.is_file())
        count = len(manifest["vectors"])
        if options.json:
            found = {"schema": SCHEMA, "level": options.level, "folder": options.folder, "vectors": count}
            summary.write_json(options.json, found | {"bytes": size})
        if options.json != "-":
            print(f"{count} vectors, {size / 1e6:.1f} MB, in {options.folder}")
        return 0
    results, strangers = check(options.folder, options.answers, options.case)
    facts = {results[0].target: {"vectors": len(results)}}
    if options.json != "-":
        summary.print_run(results, facts)
    manifest = read_manifest(options.folder)
    if options.json:
        summary.write_json(options.json, summary.document(results, facts, manifest["level"]))
    if strangers:  # last, where it is seen
        known = [f"{entry['id']}.safetensors" for entry in manifest["vectors"]]
        print(f"conformance vectors: {answer_no_vector(strangers, known)}", file=sys.stderr)
    broken = [result for result in results if result.where == BROKEN]
    if broken:
        rest = f" ({len(broken)} broken; the others were judged)"
        print(f"conformance vectors: {broken[0].detail}{rest}", file=sys.stderr)
        return 2
    return int(bool(strangers) or any(result.status == FAILED for result in results))
