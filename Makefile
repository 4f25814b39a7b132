# Everything a user or a developer runs. `make install` is the step that all the others share.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
PYTEST := $(BIN)/python -m pytest -m "not soak and not gpu"
NO_GPU := $(BIN)/python -c 'import sys, torch; sys.exit(torch.cuda.is_available())'
SYSTEM_PACKAGES := PYTHON=$(PYTHON) tests/system-packages.sh

.PHONY: install install-test install-bench demo test quick lint types fmt soak sim bench test-gpu bench-gpu proto options clean

install: $(VENV)/.installed
$(VENV)/.installed: pyproject.toml constraints.txt $(wildcard ddp/_core/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "ddp-launch needs Python 3.11 or newer; try make PYTHON=python3.12 install"; exit 1; }
	@test -x $(BIN)/python || { $(SYSTEM_PACKAGES) venv && $(PYTHON) -m venv $(VENV); }
	@echo "installing into $(VENV) (torch and a few small packages) ..."
	@# torch comes first and pinned: an open range would take a build with gigabytes of CUDA packages.
	@$(PIP) install -c constraints.txt torch==2.13.0
	@$(PIP) install -c constraints.txt -e '.[torch]' numpy
	@# Compiled once here, so that not every start of a rank or a command has to.
	@$(BIN)/python -m compileall -q launcher rendezvous ddp
	@touch $@

install-test: $(VENV)/.installed-test
$(VENV)/.installed-test: $(VENV)/.installed tests/system-packages.sh
	@$(SYSTEM_PACKAGES) ip etcd 'cc?' 'sshd?' 'slurm?'
	@echo "installing what the tests need ..."
	@$(PIP) install -c constraints.txt -e '.[torch,test]'
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
	$(PYTEST) -q -n 2 tests/core tests/sim tests/quality

# Tests of real processes measure time: they come after the others, one at a time.
test: lint types quick
	$(PYTEST) tests --ignore=tests/core --ignore=tests/sim --ignore=tests/quality
	@$(BIN)/python examples/demo.py

# Longer than the suite allows; run before a larger change is called done.
soak: install-test
	$(MAKE) sim SEEDS=20000
	$(BIN)/python -m pytest tests -m soak

SEEDS ?= 2000
sim: install-test
	SEEDS=$(SEEDS) $(PYTEST) -q tests/sim

test-gpu: install-test
	@if $(NO_GPU); then echo "skipped: torch sees no GPU here"; else $(PYTEST) tests -m gpu; fi

bench-gpu: install-bench
	@if $(NO_GPU); then echo "skipped: torch sees no GPU here"; else $(BIN)/python bench/gpu.py; fi

bench: install-bench
	$(BIN)/python bench/launch.py
	$(BIN)/python bench/restart.py
	$(BIN)/python bench/recovery.py
	$(BIN)/python bench/agent.py
	$(BIN)/python bench/cluster.py
	$(BIN)/python bench/rendezvous.py
	$(BIN)/python bench/allreduce.py
	$(BIN)/python bench/hierarchical.py
	$(BIN)/python bench/ddp.py

# The generated code is committed; a test holds it in step with the schemas.
proto: install-test
	proto/generate.sh $(BIN)/python

# docs/options.md is made from the table of options; a test holds the two together.
options: install
	$(BIN)/python docs/options.py > docs/options.md

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache *.egg-info build dist
