"""`conformance zoo --mutate N`: how many single changes of the reference the rows catch, or else our own tests."""

from __future__ import annotations

from ..progress import Bar
from ..summary import write_json
from .mutation import SEEN_BY, sample, score
from .tested import caught_by_tests


def command(number: int, seed: int, level: str, json: str | None, tests: bool = False) -> int:
    """Score so many mutants (0: all) and print what nothing caught; the exit status is 0: there is no right score.

    tests: what no row catches is left to the tests of its file (`tested`).
    """
    chosen = sample(number or None, seed)
    with Bar(len(chosen), quiet=json == "-") as seen:
        found = score(chosen, level, seen)
        by_rows = sum(bool(by) for _, by in found)
        if tests:
            found = [(mutant, by or caught_by_tests(mutant)) for mutant, by in found]
    files = {file: [by for mutant, by in found if mutant.file == file] for file in SEEN_BY}
    if json:
        document = {
            "schema": 1,
            "level": level,
            "seed": seed,
            "files": {file: {"mutants": len(by), "caught": sum(map(bool, by))} for file, by in files.items() if by},
            "mutants": [{"change": str(mutant), "caught by": by} for mutant, by in found],
        }
        write_json(json, document)
    if json != "-":
        for mutant, by in found:
            if not by:
                print(f"nothing catches {mutant}")
        for file, catches in files.items():
            if catches:
                print(f"{file:24} {sum(map(bool, catches)):4} of {len(catches):4}")
        caught, share = sum(bool(by) for _, by in found), 100.0 / max(len(found), 1)
        print(f"{caught} of {len(found)} changed lines of the reference caught, {share * caught:.1f} %", end="")
        print(f" ({by_rows} by the rows, {share * by_rows:.1f} %)" if tests else "")
    return 0
