"""`python -m backend_jax train|evaluate|generate`; see contract.cli."""

import sys

import backend_jax
from core_numpy.contract.cli import main
from core_numpy.contract.memory import share_one_arena

if __name__ == "__main__":
    share_one_arena()  # before XLA has threads
    sys.exit(main(backend_jax))
