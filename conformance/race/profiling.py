"""`conformance race --profile`: the contestants one after the other, each with its longest operations."""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from .contestants import all_contestants
from .lane import Lane
from .machine import environment
from .racing import SCHEMA
from .table import TEXT_WIDTH
from .task import Task

# Of each contestant: enough updates that one disturbance is little, enough operations to see the pattern.
UPDATES, ROWS = 5, 12


def profile(
    task: Task, names: Sequence[str], *, threads: int | None, timeout: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """{"schema", "environment", "task", "profiles": {name: {"status", "rows" or "reason"}}}."""
    found: dict[str, Any] = {}
    for name in names:
        say(f"{task.title}: {name}")
        with tempfile.TemporaryDirectory() as folder:
            lane = Lane(name, task_of(name, task), threads, timeout, variables(name, folder))
            try:
                said = lane.prepare(0.1)
                answer = lane.ask({"do": "profile", "count": UPDATES, "rows": ROWS})
            finally:
                lane.close()
        row = lane.row
        found[name] = {"status": row["status"], "reason": row.get("reason", said), "group": row["group"]}
        if answer is not None:
            found[name] = {"status": "profiled", "group": row["group"], "rows": answer["rows"]}
    return {"schema": SCHEMA, "environment": environment(threads), "task": task.to_dict(), "profiles": found}


def task_of(name: str, task: Task) -> Task:
    """On the contestant's own architecture, where it cannot build the task's."""
    architectures = all_contestants()[name].architectures
    return task if task.architecture in architectures else task.replace(architecture=architectures[0])


def variables(name: str, folder: str) -> dict[str, str]:
    """XLA writes its programs there, from which an operation's origin is read."""
    if all_contestants()[name].framework != "jax":
        return {}
    return {"XLA_FLAGS": f"--xla_dump_to={folder} --xla_dump_hlo_as_text", "RACE_HLO": folder}


def show_profile(document: dict[str, Any]) -> None:
    """On standard output: a table of each contestant, and the kinds of work with their shares."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else TEXT_WIDTH)
    for name, found in document["profiles"].items():
        if found["status"] != "profiled":
            console.print(f"{name}: {found['status']}: {found['reason']}", markup=False)
            continue
        table = Table(box=SIMPLE, show_edge=False, title=f"{name}, {document['task']['title']}", title_justify="left")
        for heading in ("operation", "kind", "ms/update", "share", "calls", "from"):
            table.add_column(heading, justify="right" if heading in ("ms/update", "share", "calls") else "left")
        for row in found["rows"]:
            cells = (row["op"][:48], row["group"], f"{row['ms']:.2f}", f"{row['share']:.1%}", f"{row['calls']:.0f}",
                     row["source"][-56:])  # fmt: skip
            table.add_row(*map(escape, cells))
        console.print(table)
        console.print(f"{name}: {kinds(found['rows'])}\n", markup=False)


def kinds(rows: Sequence[dict[str, Any]]) -> str:
    """The kinds of work by share, largest first."""
    shares: dict[str, float] = defaultdict(float)
    for row in rows:
        shares[row["group"]] += row["share"]
    return ", ".join(f"{kind} {share:.0%}" for kind, share in sorted(shares.items(), key=lambda item: -item[1]))
