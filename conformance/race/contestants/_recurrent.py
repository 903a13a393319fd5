"""What the recurrent contestants start from: the task's embedding and head, and layers of their own.

The gates' matrices stand beside each other in the order that torch and flax share: input, forget, cell, output in the
LSTM; reset, update, new in the GRU. A layer has flax's one bias: the state's in the LSTM, the input's in the GRU.
"""

from __future__ import annotations

import math

import numpy as np

from ..task import RECURRENT, SEED, Task


def weights(task: Task) -> dict[str, np.ndarray]:
    """embedding.weight, head.weight, and {i}.input (C, gates C), {i}.state (C, gates C), {i}.bias (gates C)."""
    given, C, gates = task.params(), task.model.width, RECURRENT[task.architecture]
    # Nothing normalises what goes into the first layer: rows of a size near 1, as torch's and flax's own are.
    own = {"embedding.weight": 50.0 * given["embedding.weight"], "head.weight": given["head.weight"]}
    rng, bound = np.random.default_rng(SEED), 1.0 / math.sqrt(C)  # torch's own bound
    for i in range(task.model.layers):
        for name in ("input", "state"):
            own[f"{i}.{name}"] = rng.uniform(-bound, bound, (C, gates * C)).astype(np.float32)
        own[f"{i}.bias"] = np.zeros(gates * C, np.float32)
    return own
