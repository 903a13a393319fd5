# Both commands need Python 3.11 or newer and nothing else: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
EXTRAS ?= all,dev

.PHONY: install test slow coverage demo docs lint oldest audit release clean

# The stamp is written last, so that an install that was interrupted starts again.
$(VENV)/installed-%: pyproject.toml constraints.txt
	@echo "installing the packages of [$*] into $(VENV): once, some minutes without a word"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e ".[$*]"
	touch "$@"

install: $(VENV)/installed-$(EXTRAS)

# One process per core, a file at a time; one thread in each, since every case is small.
test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile

slow: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow

# Lines and branches: the reference's all, the backends' nearly all; what only an accelerator reaches is the rest. With the
# peers, whose modules and folders what reads them is tested with.
coverage: $(VENV)/installed-peers,dev
	$(BIN)/python -m coverage erase
	OMP_NUM_THREADS=1 $(BIN)/python -m coverage run -m pytest
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report --include='core_numpy/*' --fail-under=100
	$(BIN)/python -m coverage report --include='backend_*/*' --fail-under=95

demo: install
	$(BIN)/python -m conformance demo

# The site needs neither torch nor JAX: the sources are parsed, not imported.
docs: $(VENV)/installed-docs
	$(BIN)/python -m sphinx -E -W --keep-going -q docs docs/_build/html

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The tests on the oldest versions that pyproject.toml allows; on every Python there is: `nox`.
oldest:
	$(PYTHON) -m venv $(VENV)-nox
	$(VENV)-nox/bin/python -m pip install --disable-pip-version-check --quiet nox
	$(VENV)-nox/bin/nox -s oldest

# Known faults of the pinned versions; needs the network. A package that the index cannot judge fails, it is not passed.
audit:
	$(PYTHON) -m venv $(VENV)-audit
	$(VENV)-audit/bin/python -m pip install --disable-pip-version-check --quiet pip-audit
	$(VENV)-audit/bin/pip-audit --strict --disable-pip --no-deps -r constraints.txt

# Wheel and sdist, the same bytes from the same commit, checked as the index will check them.
release:
	$(PYTHON) -m venv $(VENV)-release
	$(VENV)-release/bin/python -m pip install --disable-pip-version-check --quiet -c constraints.txt build twine
	rm -rf dist
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(VENV)-release/bin/python -m build
	$(VENV)-release/bin/twine check --strict dist/*
	cd dist && sha256sum *

clean:
	rm -rf $(VENV) $(VENV)-nox $(VENV)-audit $(VENV)-release .coverage* .hypothesis .pytest_cache .mypy_cache .ruff_cache demo build dist docs/_build
