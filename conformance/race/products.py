"""What of NumPy's forward and backward pass is matrix products: the pass, and its products alone, in turns.

    python -m conformance.race.products --size small     # threads: OMP_NUM_THREADS or OPENBLAS_NUM_THREADS

The products are those of the race's gpt in float64, as the reference computes: each once in the forward pass and twice
in the backward pass, attention's over all pairs of positions. The reference makes the scores a second time for the
backward pass, which counts as its own time and not as a product's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from core_numpy.contract.arguments import Parser, ended

from ..summary import write_json
from .alone import take_turns
from .machine import environment
from .task import SEED, SIZES, Task

# How often, how many at once, and (m, k) @ (k, n).
Product = tuple[int, int, tuple[int, int, int]]


def products(task: Task) -> list[Product]:
    """Those of one forward and backward pass."""
    model, rows, T = task.model, task.batch * task.length, task.length
    W, hidden, heads, D = model.width, model.hidden_size, task.batch * model.heads, model.key_size
    forward = [
        (4 * model.layers, 1, (rows, W, W)), (model.layers, 1, (rows, W, hidden)), (model.layers, 1, (rows, hidden, W)),
        (1, 1, (rows, W, model.vocab)), (model.layers, heads, (T, D, T)), (model.layers, heads, (T, T, D)),
    ]  # fmt: skip
    backward = [
        found for count, many, (m, k, n) in forward for found in ((count, many, (m, n, k)), (count, many, (k, m, n)))
    ]
    return [*forward, *backward]


def flops(task: Task) -> int:
    return sum(2 * count * many * m * k * n for count, many, (m, k, n) in products(task))


def multiplied(task: Task) -> Callable[[], None]:
    """A call that makes all of them, each into memory that it already has."""
    rng, made = np.random.default_rng(0), []
    for count, many, (m, k, n) in products(task):
        left, right = rng.standard_normal((many, m, k)), rng.standard_normal((many, k, n))
        made.append((count, left, right, np.empty((many, m, n))))

    def call() -> None:
        for count, left, right, out in made:
            for _ in range(count):
                np.matmul(left, right, out=out)

    return call


def measure(task: Task, seconds: float) -> dict[str, Any]:
    """Median seconds of the pass and of its products, and their ratio."""
    import core_numpy

    model = core_numpy.Transformer(task.model, seed=SEED)
    core_numpy.set_params(model, task.params())
    batch = next(task.batches())
    calls: dict[str, Callable[[], Any]] = {
        "pass": lambda: core_numpy.loss_and_gradients(model, batch),
        "products": multiplied(task),
    }
    medians, turns = take_turns(calls, seconds)
    return {"size": task.title, **medians, "ratio": medians["pass"] / medians["products"], "turns": turns}


def main(arguments: list[str] | None = None) -> int:
    """Print one line, or the document."""
    name = "python -m conformance.race.products"
    parser = Parser(prog=name, description=(__doc__ or "").split("\n")[0], epilog=f"example: {name} --size small")
    parser.add_argument("--size", choices=sorted(SIZES), default="tiny", help="of the race's (tiny)")
    parser.add_argument("--seconds", type=float, default=5.0, help="to measure for (5)")
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON; - for standard output")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    asked = parser.parse_args(arguments)
    return ended(lambda: _run(asked.size, asked.seconds, asked.json), name, debug=asked.debug)


def _run(size: str, seconds: float, file: str | None) -> int:
    if not seconds >= 0:
        raise ValueError(f"--seconds must be at least 0; got {seconds:g}")
    found = measure(Task(size), seconds)
    if file:
        write_json(file, {"schema": 1, "environment": environment(), **found})
    if file != "-":
        whole, alone = found["pass"] * 1e3, found["products"] * 1e3
        ratio = found["ratio"]
        print(f"{found['size']}: forward and backward {whole:.1f} ms, products alone {alone:.1f} ms: {ratio:.2f} times")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
