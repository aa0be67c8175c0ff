# What a person runs. Needs make, Python 3.11 or later with venv and pip, and nothing else.
#
#   make demo    install into a fresh environment and do the main job on a real checkpoint
#   make test    install with what the tests need, and run them
#   make test-verify   the same for `ckptctl verify`, with torch and Transformers (TORCH=... for another torch)
#   make check   all that a pull request needs: style, types, tests
#   make bench   speed and memory beside `cp` (minutes, several GB of disk); PYTHON_TORCH=... adds torch's own tool

PYTHON ?= python3
VENV ?= .venv
DEMO_VENV ?= .venv-demo
TORCH ?= torch==2.13.0
# How many tests run at a time: auto, or a number.
JOBS ?= auto
PIP = -m pip --disable-pip-version-check
SOURCES := pyproject.toml $(shell find ckptctl -name '*.py' -o -name '*.toml')

.PHONY: demo test test-verify check bench clean

demo: $(DEMO_VENV)/installed
	$(DEMO_VENV)/bin/python fixtures/demo.py

test: $(VENV)/installed
	$(VENV)/bin/python -m pytest -n $(JOBS) --dist worksteal

test-verify: $(VENV)/verify
	$(VENV)/bin/python -m pytest -n $(JOBS) --dist worksteal tests/operations/verify

check: $(VENV)/installed
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m ruff format --check .
	$(VENV)/bin/python -m mypy
	$(VENV)/bin/python -m pytest -n $(JOBS) --dist worksteal

bench: $(VENV)/installed
	$(VENV)/bin/python benchmarks/run.py $(if $(PYTHON_TORCH),--python-torch $(PYTHON_TORCH))

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python $(PIP) install --quiet -e '.[dev]'
	touch $@

$(VENV)/verify: $(VENV)/installed
	$(VENV)/bin/python $(PIP) install --quiet '$(TORCH)'
	$(VENV)/bin/python $(PIP) install --quiet -e '.[dev,verify]'
	touch $@

$(DEMO_VENV)/installed: $(SOURCES)
	$(PYTHON) -m venv $(DEMO_VENV)
	$(DEMO_VENV)/bin/python $(PIP) install --quiet .
	touch $@

clean:
	rm -rf .venv .venv-demo demo-out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
