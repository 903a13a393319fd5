"""Sphinx: `make docs` writes docs/_build/html. Nothing is fetched, neither to build it nor to read it."""

import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # side_by_side, the extension that lists the three packages

project = "attention-conformance"
author = "The attention-conformance authors"
copyright = author
found = re.search(r'__version__ = "(.+)"', (HERE.parent / "core_numpy/contract/__init__.py").read_text("utf-8"))
if found is None:
    raise RuntimeError("core_numpy/contract/__init__.py says no __version__")
version = release = found[1]

extensions = ["myst_parser", "side_by_side"]
exclude_patterns = ["_build"]
nitpicky = True
smartquotes = False
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"attention-conformance {release}"
html_static_path = ["_static"]
html_css_files = ["side_by_side.css"]
html_copy_source = False
html_show_sphinx = False
