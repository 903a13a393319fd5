"""A target that is a program: it reads a call from files and writes its answer to one (docs/vectors.md, "Programs")."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from core_numpy.contract import tensor_file

from .. import exchange
from ..compare import Disagreement
from ..functions import FUNCTIONS
from .protocol import NotOffered, Target

# The exit status by which a program says that it does not serve this call; its first line of output says why.
NOT_OFFERED = 3


def ended(status: int) -> str:
    """How a program ended: with a status, or by a signal, which a shell in between gives as 128 and its number."""
    number = -status if status < 0 else status - 128
    known = number in {int(one) for one in signal.Signals}
    if status < 0 or (
        known and number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL, signal.SIGBUS, signal.SIGFPE)
    ):
        return f"was ended by {signal.Signals(number).name if known else f'signal {number}'}"
    return f"ended with {status}"


class CommandTarget(Target):
    """ "command:PROGRAM {inputs} {outputs}": `{inputs}` is a safetensors file with the request beside it as .json."""

    framework = "command"

    def __init__(self, name: str) -> None:
        super().__init__(None, name)
        self.words = shlex.split(name.removeprefix("command:"))
        for place in ("{inputs}", "{outputs}"):
            if not any(place in word for word in self.words[1:]):
                raise ImportError(
                    f"target {name!r} must have {place} among its arguments: command:PROGRAM {{inputs}} {{outputs}}"
                )
        if shutil.which(self.words[0]) is None and Path(self.words[0]).is_file():
            program = self.words[0]
            if os.path.dirname(program):
                raise ImportError(f"target {name!r} cannot be run: {program} is not executable (chmod +x {program})")
            raise ImportError(f"target {name!r} cannot be run: a program in the current folder is ./{program}")
        if shutil.which(self.words[0]) is None:
            raise ImportError(f"target {name!r} cannot be run: there is no program {self.words[0]}")

    def offers(self, function: str) -> bool:
        return function in FUNCTIONS

    def kernels(self) -> list[str]:
        return ["auto"]

    def dtypes(self) -> tuple[str, ...]:
        return tuple(exchange.DTYPES)

    def refuses(self) -> bool:
        return False

    def require(self, function: str, arguments: dict[str, Any]) -> None:
        """The program says so itself, when it is called."""

    def call(self, function: str, arguments: dict[str, Any], *, strided: str = "") -> dict[str, np.ndarray]:
        """strided: passed over, a file has no strides."""
        answer = self._answer(*exchange.request(function, arguments, [], {}))
        return {name: answer[name] for name in FUNCTIONS[function].results}

    def gradients(
        self, function: str, arguments: dict[str, Any], wrt: list[str], cotangents: dict[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        answer = self._answer(*exchange.request(function, arguments, wrt, cotangents))
        return {name: answer[f"gradient.{name}"] for name in wrt}

    def _answer(self, asked: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
            inputs, outputs = Path(folder, "inputs.safetensors"), Path(folder, "outputs.safetensors")
            inputs.write_bytes(tensor_file.encode_tensors("inputs", arrays))
            inputs.with_suffix(".json").write_bytes(exchange.encode_json(asked))
            words = [word.replace("{inputs}", str(inputs)).replace("{outputs}", str(outputs)) for word in self.words]
            done = subprocess.run(words, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
            said = (done.stderr.strip() or done.stdout.strip()).splitlines()
            if done.returncode == NOT_OFFERED:
                raise NotOffered(said[0] if said else "the program says that it does not serve this call")
            if done.returncode != 0:
                raise Disagreement(f"the program {ended(done.returncode)}: {said[-1] if said else 'it said nothing'}")
            if not outputs.exists():
                raise Disagreement("the program wrote no {outputs} file, and said that all went well")
            answer, _ = tensor_file.read_tensors(outputs)
        missing = [name for name in exchange.answer_names(asked) if name not in answer]
        if missing:
            if asked["gradients"] and all(name.startswith("gradient.") for name in missing):
                raise NotOffered("the program gives no gradients")
            raise Disagreement(f"the program's answer lacks {', '.join(missing)}")
        return answer

    def describe(self) -> dict[str, Any]:
        return {"framework": "command", "program": self.words[0]}
