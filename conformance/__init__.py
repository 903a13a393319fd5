"""The conformance suite: cases as data, the float64 reference as oracle, tolerances derived from rounding analysis.

`python -m conformance` runs it; `conformance.runner.run` is the same from Python.
"""
