"""Who works for one contestant: a process, or where an update is laid out over devices, as many as its framework wants.

torch has one process for each device, connected by gloo as `torchrun` does it; JAX has one process with as many devices
of the host. A device is `threads` processors of its own, while there are as many; after that they share.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from .machine import cores
from .process import Process, WorkerFailed
from .task import Task


class Team:
    """Several processes that do the same at the same time; asked as one."""

    def __init__(self, members: Sequence[Process]) -> None:
        self.members = list(members)

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """What all answer together: `merged`. One that fails ends the others, which would wait for it."""
        for member in self.members:
            member.send(command)
        answers = []
        for rank, member in enumerate(self.members):
            try:
                answers.append(member.answer(command["do"]))
            except WorkerFailed as error:
                self.close()
                raise WorkerFailed(f"process {rank} of {len(self.members)}: {error}") from None
        return merged(answers)

    def close(self) -> None:
        for member in self.members:
            member.close()


def merged(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The time of the slowest, the memory of all, and what the first says otherwise: a report is the same in each."""
    found = dict(answers[0])
    for name in ("seconds", "import", "build"):
        if name in found:
            found[name] = max(answer[name] for answer in answers)
    if "memory" in found:
        found["memory"] = {name: sum(answer["memory"].get(name, 0.0) for answer in answers) for name in found["memory"]}
    return found


def started(
    framework: str, task: Task, threads: int | None, timeout: float, variables: Mapping[str, str], copies: int = 1
) -> Process | Team:
    """The process or processes of a contestant on this task. copies: how many runs of one device, apart."""
    count = task.devices
    if copies > 1:
        return Team([
            Process(
                threads=threads or 1, timeout=timeout,
                variables={**variables, "RACE_FIRST": str(number * (threads or 1))},
            )
            for number in range(copies)
        ])  # fmt: skip
    if task.parallel is None or count == 1:
        return Process(threads=threads, timeout=timeout, variables=variables)
    each = threads or 1
    if framework == "jax":
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
        together = {**variables, "XLA_FLAGS": flags.strip()}
        return Process(threads=min(count * each, cores()), timeout=timeout, variables=together)
    with socket.socket() as s:
        s.bind(("localhost", 0))
        meet = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(s.getsockname()[1]), "WORLD_SIZE": str(count)}
    return Team([
        Process(
            threads=each, timeout=timeout,
            variables={**variables, **meet, "RANK": str(rank), "RACE_FIRST": str(rank * each)},
        )
        for rank in range(count)
    ])  # fmt: skip
