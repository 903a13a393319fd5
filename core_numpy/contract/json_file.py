"""A file that holds one JSON object, as configurations and manifests do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_object(path: Path) -> dict[str, Any]:
    """What the file holds; ValueError, in one sentence, where that is no JSON or no object."""
    return parse_object(path, path.read_bytes())


def parse_object(path: Path, data: bytes) -> dict[str, Any]:
    """The object that `data`, read from `path`, is."""
    try:
        found = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise ValueError(f"{path} is damaged: it is no JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: expected a JSON object; got {type(found).__name__}")
    return found
