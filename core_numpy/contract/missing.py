"""What to say where a package that is not installed is asked for."""

from __future__ import annotations

import sys


def missing(sentence: str, extra: str) -> ImportError:
    """An ImportError that names the extra to install; `python -m PACKAGE` ends with the line alone and status 3.

    A package is imported before its `__main__` is, so that nothing else could keep the traceback from a user there.
    """
    error = ImportError(f"{sentence}: pip install 'attention-conformance[{extra}]'")
    if sys.argv[:1] == ["-m"] and "--debug" not in sys.orig_argv:  # what runpy puts there until it has found the module
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(3)
    return error
