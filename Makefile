# Everything a user or a developer runs. `make install` is the step that all the others share.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
PYTEST := $(BIN)/python -m pytest

.PHONY: install install-test install-bench demo test quick lint types fmt soak bench clean

install: $(VENV)/.installed
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "ddp-launch needs Python 3.11 or newer; try make PYTHON=python3.12 install"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "python3 -m venv failed; on Debian: apt-get install python3-venv"; exit 1; }
	@echo "installing into $(VENV) (torch and a few small packages) ..."
	@# torch comes first and pinned: an open range would take a build with gigabytes of CUDA packages.
	@$(PIP) install -c constraints.txt torch==2.13.0
	@$(PIP) install -c constraints.txt -e '.[torch]' numpy
	@touch $@

install-test: $(VENV)/.installed-test
$(VENV)/.installed-test: $(VENV)/.installed
	@echo "installing what the tests need ..."
	@$(PIP) install -c constraints.txt -e '.[torch,etcd,test]'
	@touch $@

install-bench: $(VENV)/.installed-bench
$(VENV)/.installed-bench: $(VENV)/.installed
	@$(PIP) install -c constraints.txt -e '.[torch,bench]'
	@touch $@

demo: install
	@$(BIN)/python examples/demo.py

lint: install-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install-test
	$(BIN)/mypy

fmt: install-test
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

quick: install-test
	$(PYTEST) tests/core tests/sim tests/quality -q

test: lint types
	$(PYTEST) tests -m "not soak and not gpu"

soak: install-test
	$(PYTEST) tests -m soak

bench: install-bench
	$(BIN)/python bench/launch.py
	$(BIN)/python bench/restart.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache *.egg-info build dist
