"""How a name on the command line becomes a target.

In this order: "command:PROGRAM {inputs} {outputs}", a peer's name (`peers.PEERS`), "numpy", "torch" or "jax" for ours,
an entry point of group `conformance.targets`, a module, and an object inside a module ("module:object" or
"module.object"). An object is a `Target`, a class that makes one without arguments, anything with the public names as
attributes, or one function, taken as `attention` unless it bears another public name.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import types
from importlib import metadata
from typing import Any

from ..functions import FUNCTIONS
from ..rows import ALL
from .peers import PEERS
from .protocol import OURS, Target

GROUP = "conformance.targets"
# The environment variable behind `--device`: the processes of targets inherit it.
DEVICE = "CONFORMANCE_DEVICE"
# Whole-model names: a target that has these alone can be judged too.
MODELS = ("Transformer", "Trainer")


def load(name: str) -> Target:
    """The target of this name. ImportError, in one sentence, where there is none."""
    _no_path(name)
    if name.startswith("command:"):
        from .command_target import CommandTarget

        return CommandTarget(name)
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # the console script does not put it there, as `python -m` does
    if name in PEERS:
        return wrap(_imported(f"{__package__}.peers.{PEERS[name]}", name), name)
    if name in OURS or name in OURS.values():
        module_name = OURS.get(name, name)
        return wrap(_imported(module_name, name), module_name)
    entries = list(metadata.entry_points(group=GROUP, name=name))
    if len(entries) > 1:
        raise ImportError(f"target {name!r} is an entry point of {len(entries)} packages")
    return wrap(_guarded(entries[0].load, name) if entries else _found(name), name)


def wrap(found: Any, name: str) -> Target:
    """The adapter for what was found under the name."""
    if isinstance(found, type):
        found = _guarded(found, name)
    if isinstance(found, Target):
        found.name = name
        return found
    if not isinstance(found, types.ModuleType) and not _offers(found) and callable(found):
        found = _of_function(found)
    if not _offers(found):
        raise ImportError(f"target {name!r} has none of the public names, such as attention or rms_norm")
    _check_dtypes(getattr(found, "DTYPES", ALL), name)
    framework = getattr(found, "FRAMEWORK", None) or {v: k for k, v in OURS.items()}.get(name, "numpy")
    if framework == "numpy":
        return Target(found, name)
    if framework == "torch":
        from .torch_target import TorchTarget

        return TorchTarget(found, name, os.environ.get(DEVICE, "cpu"))
    if framework == "jax":
        from .jax_target import JaxTarget

        return JaxTarget(found, name, os.environ.get(DEVICE))
    raise ImportError(f"FRAMEWORK of target {name!r} must be 'numpy', 'torch' or 'jax'; got {framework!r}")


def _check_dtypes(given: Any, name: str) -> None:
    """A name that is misspelt would be a dtype that nobody judges."""
    if not isinstance(given, tuple | list | set | frozenset) or not given or any(one not in ALL for one in given):
        raise ImportError(f"DTYPES of target {name!r} must be a tuple of some of {', '.join(ALL)}; got {given!r}")


def _offers(found: Any) -> bool:
    return any(callable(getattr(found, name, None)) for name in (*FUNCTIONS, *MODELS))


def _of_function(function: Any) -> types.SimpleNamespace:
    """A lone function; the module that defines it says of which framework it is."""
    home = sys.modules.get(getattr(function, "__module__", ""))
    own = getattr(function, "__name__", "")
    said = {key: getattr(home, key) for key in ("FRAMEWORK", "DTYPES", "REFUSALS") if hasattr(home, key)}
    return types.SimpleNamespace(**{own if own in FUNCTIONS else "attention": function}, **said)


def _guarded(make: Any, name: str) -> Any:
    """What `make` gives; whatever a target does while it is imported becomes one sentence."""
    try:
        return make()
    except (Exception, SystemExit) as error:
        said = f"{type(error).__name__}: {error}" if not isinstance(error, ImportError) else str(error)
        raise ImportError(f"target {name!r} cannot be imported: {said}") from error


def _imported(module_name: str, name: str) -> Any:
    try:
        return _guarded(functools.partial(importlib.import_module, module_name), name)
    except ImportError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and f"{module_name}.".startswith(f"{cause.name}."):
            raise ImportError(f"{error}{LOOKED}") from cause
        raise


# No package there: a project with a src folder, perhaps, or a command given in another folder.
LOOKED = "; looked in the current folder too: for a module elsewhere, set PYTHONPATH to its folder"


def _no_path(name: str) -> None:
    """A file is no module: what its name is as one."""
    file, colon, rest = name.partition(":")
    if not (file.endswith(".py") or file.startswith(".") or any(sep in file for sep in ("/", "\\"))):
        return
    place, stem = os.path.split(file.replace("\\", "/").removesuffix(".py").rstrip("/"))
    place = os.path.normpath(place) if place else "."
    where = "" if place == "." else f", in {place} (cd there, or set PYTHONPATH to it)"
    meant = f"give the module's name, {stem}{colon}{rest}{where}" if stem.isidentifier() else "give a module's name"
    raise ImportError(f"target {name!r} is a file's name: {meant}")


def _found(name: str) -> Any:
    """A module, or an object in one."""
    if ":" in name:
        module_name, _, path = name.partition(":")
        if not module_name or not path:
            raise ImportError(f"target {name!r} must be module:object")
        return _attribute(_imported(module_name, name), path, name)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        outer, _, inner = name.rpartition(".")
        # "package.function": the package is there, and no module of it has that name.
        if error.name != name or not outer:
            own = error.name is not None and f"{name}.".startswith(f"{error.name}.")
            raise ImportError(f"target {name!r} cannot be imported: {error}{LOOKED if own else ''}") from error
        return _attribute(_imported(outer, name), inner, name)
    except (Exception, SystemExit) as error:
        raise ImportError(f"target {name!r} cannot be imported: {type(error).__name__}: {error}") from error


def _attribute(module: Any, path: str, name: str) -> Any:
    found = module
    for part in path.split("."):
        if not hasattr(found, part):
            raise ImportError(f"target {name!r} cannot be imported: {module.__name__} has no {path}")
        found = getattr(found, part)
    return found
