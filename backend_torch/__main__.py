"""`python -m backend_torch train|evaluate|generate`; see core_numpy.contract.cli."""

import sys

import backend_torch
from core_numpy.contract.cli import main

if __name__ == "__main__":
    sys.exit(main(backend_torch))
