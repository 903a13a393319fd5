"""`python -m core_numpy train|evaluate|generate`; see contract.cli."""

import sys

import core_numpy
from core_numpy.contract.cli import main

if __name__ == "__main__":
    sys.exit(main(core_numpy))
