"""`python -m backend_jax train|evaluate|generate`; see contract.cli."""

import sys

import backend_jax
from core_numpy.contract.cli import main

if __name__ == "__main__":
    sys.exit(main(backend_jax))
