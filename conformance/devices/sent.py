"""What torch sends between processes, counted as it is sent: every collective and message of a step."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operation -> its kind, as in core_numpy.contract.communication.
KINDS = {
    "allreduce": "all-reduce", "all_reduce": "all-reduce", "allgather": "all-gather", "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter", "send": "send",
}  # fmt: skip


class Sent(TorchDispatchMode):
    """Notes (kind, bytes) of each; bytes of the sum, of the whole that is gathered or scattered, or of the message.

    to: of each message the number, in its group, of the process that it goes to.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []
        self.to: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        space, _, name = str(function).partition(".")
        if space in ("c10d", "_c10d_functional"):
            kind = next((kind for start, kind in KINDS.items() if name.lstrip("_").startswith(start)), None)
            if kind is not None:
                tensors = [x for x in tree_leaves((args, out)) if isinstance(x, torch.Tensor)]
                # The larger of what goes in and what comes out; an all-reduce in place names one tensor twice.
                self.found.append((kind, max(x.numel() * x.element_size() for x in tensors)))
            if kind == "send":
                self.to.append(next(x for x in args if isinstance(x, int)))
        return out

    def summed(self) -> dict[str, dict[str, int]]:
        """Kind -> how many, and their bytes. Scalars (losses, norms) are left out."""
        table: dict[str, dict[str, int]] = {}
        for kind, size in self.found:
            if size > 8:
                row = table.setdefault(kind, {"count": 0, "bytes": 0})
                row["count"], row["bytes"] = row["count"] + 1, row["bytes"] + size
        return table
