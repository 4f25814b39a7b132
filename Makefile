# Everything a user or a developer runs. `make install` is the step that all the others share.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
PYTEST := $(BIN)/python -m pytest -m "not soak and not gpu"
NO_GPU := $(BIN)/python -c 'import sys, torch; sys.exit(torch.cuda.is_available())'
SYSTEM_PACKAGES := PYTHON=$(PYTHON) tests/system-packages.sh

.PHONY: install install-test install-bench demo test quick lint types fmt soak sim bench faults test-gpu bench-gpu proto options images requirements clean

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

# What compares numbers runs two at a time. Tests of real processes measure time: they come last, one by one.
NUMBERS := tests/contract/ddp_like_torch tests/ddp tests/ddp_hooks tests/ddp_sharding tests/deploy
test: lint types quick
	$(PYTEST) -q -n 2 --dist loadfile $(NUMBERS)
	$(PYTEST) tests $(addprefix --ignore=,tests/core tests/sim tests/quality $(NUMBERS))
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
	$(BIN)/python bench/overhead.py

# Every fault of tests/faults, and the table of docs/faults.md made of what came of it.
faults: install-test
	$(BIN)/python tests/faults/suite.py --write-docs

# The generated code is committed; a test holds it in step with the schemas.
proto: install-test
	proto/generate.sh $(BIN)/python

# The images of deploy/docker, by podman or docker. Bases are named by digest, so that a build can be repeated.
ENGINE ?= $(shell command -v podman || command -v docker)
BASE ?=
TRAINING_BASE ?=
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
images:
	@test -n "$(ENGINE)" || { echo "neither podman nor docker is here; ENGINE=... names another"; exit 1; }
	@test -n "$(BASE)$(TRAINING_BASE)" || { echo "name a base by digest: make images BASE=python:3.13-slim-bookworm@sha256:... (and TRAINING_BASE=... for the training image)"; exit 1; }
	@for base in $(BASE) $(TRAINING_BASE); do case $$base in *@sha256:*|localhost/*) ;; *) echo "$$base has no digest; write NAME@sha256:..."; exit 1;; esac; done
	$(if $(BASE),$(ENGINE) build --build-arg BASE=$(BASE) -f deploy/docker/service.Dockerfile -t ddp-rendezvous:$(VERSION) .)
	$(if $(TRAINING_BASE),$(ENGINE) build --build-arg TRAINING_BASE=$(TRAINING_BASE) -f deploy/docker/training.Dockerfile -t ddp-train:$(VERSION) .)

# What images install, with the hashes of all files that may be: from the versions in constraints.txt.
requirements:
	@command -v uv >/dev/null || { echo "uv is not on PATH; pip install uv"; exit 1; }
	@{ echo "# What the service needs, with the hashes of every file that may be installed. Made by \`make requirements\`."; \
	   printf 'grpcio\nprotobuf\nsetuptools\n' | uv pip compile -q --generate-hashes --no-header --no-annotate -c constraints.txt --python-version 3.11 --universal -; } \
	   > deploy/docker/service.requirements.txt

# docs/options.md is made from the table of options; a test holds the two together.
options: install
	$(BIN)/python docs/options.py > docs/options.md

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache *.egg-info build dist
