"""`python -m backend_jax train|evaluate|generate`; see contract.cli."""

import os
import sys

import backend_jax
from backend_jax.processes import join
from core_numpy.contract.cli import main
from core_numpy.contract.memory import share_one_arena


def join_quietly() -> None:
    """`join`, and what Gloo prints on meeting goes to standard error: standard output may be lines of JSON."""
    if "RANK" in os.environ:
        sys.stdout.flush()
        sys.stdout = os.fdopen(os.dup(1), "w", buffering=1, encoding=sys.stdout.encoding, errors=sys.stdout.errors)
        os.dup2(2, 1)
    join()


if __name__ == "__main__":
    share_one_arena()  # before XLA has threads
    sys.exit(main(backend_jax, join=join_quietly))
