# Everything a user or a developer runs. `make install` is the step that all the others share.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
PYTEST := $(BIN)/python -m pytest -m "not nightly and not gpu"
SYSTEM_PACKAGES := PYTHON=$(PYTHON) tests/system-packages.sh

.PHONY: install install-test install-bench demo test test-steps processes quick nightly record lint lint-deploy types fmt test-containers sim bench faults matrix gpu gpu-docs gpu-bundle proto generator options layout errors images lock audit wheel dist sbom tools fuzz clean site site-version

# Every file that is installed has a hash in requirements/ (made by `make lock`); nothing is built but ddp-launch itself.
LOCKED := $(PIP) install --require-hashes --only-binary :all: --no-deps
install: $(VENV)/.installed
$(VENV)/.installed: pyproject.toml setup.py $(wildcard requirements/torch*.txt) requirements/install.txt requirements/cuda.txt $(wildcard ddp/*/_core/* ddp_launch_wings/*/_core/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "ddp-launch needs Python 3.11 or newer; try make PYTHON=python3.12 install"; exit 1; }
	@test -x $(BIN)/python || { $(SYSTEM_PACKAGES) venv && $(PYTHON) -m venv $(VENV); }
	@echo "installing into $(VENV) (torch and a few small packages) ..."
	@# A build without CUDA where one is offered: the others bring a few gigabytes along.
	@$(LOCKED) -r requirements/torch-cpu.txt 2>/dev/null || $(LOCKED) -r requirements/torch.txt
	@$(LOCKED) -r requirements/install.txt
	@$(BIN)/python -c 'import importlib.metadata as m, sys; sys.exit("nvidia-" not in str(m.requires("torch")))' || exit 0; $(LOCKED) -r requirements/cuda.txt
	@$(PIP) install --no-deps --no-build-isolation -e .
	@$(BIN)/python -m pip check >$(VENV)/check || { cat $(VENV)/check; echo "requirements/ does not fit pyproject.toml; make lock"; exit 1; }
	@# Compiled once here, so that not every start of a rank or a command has to.
	@$(BIN)/python -m compileall -q launcher rendezvous ddp ddp_launch_wings _ddp_launch_entry.py
	@touch $@

install-test: $(VENV)/.installed-test
$(VENV)/.installed-test: $(VENV)/.installed requirements/test.txt tests/system-packages.sh tests/accelerator/emu_build.py $(wildcard tests/accelerator/emu/csrc/*)
	@$(SYSTEM_PACKAGES) ip etcd 'cc?' 'c++?' 'promtool?' 'sshd?' 'slurm?' 'chromium?'
	@echo "installing what the tests need ..."
	@$(LOCKED) -r requirements/test.txt
	@$(BIN)/python tests/accelerator/emu_build.py
	@touch $@

install-bench: $(VENV)/.installed-bench
$(VENV)/.installed-bench: $(VENV)/.installed requirements/bench.txt
	@$(LOCKED) -r requirements/bench.txt
	@touch $@

demo: install
	@$(BIN)/python examples/demo.py

lint: install-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# checkov brings a hundred packages, some of them older than ours: it lives apart.
lint-deploy: install-test .venv-lint/.installed
	$(BIN)/python tests/deploy/linting.py

types: install-test
	$(BIN)/mypy

fmt: install-test
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

quick: install-test
	$(PYTEST) -q -n 2 tests/core tests/sim tests/quality

# All of it, with the CPU time that it took; docs/nightly.md says what is left to `make nightly`.
test: install-test
	@$(BIN)/python tests/cost.py $(MAKE) --no-print-directory test-steps

test-steps: lint types quick site processes
	@$(BIN)/python examples/demo.py

# Two files at a time, in the order of their names: those that take longest do not come last.
processes: install-test
	$(PYTEST) -q -n 2 --dist loadfile --no-loadscope-reorder --durations=10 tests $(addprefix --ignore=,tests/core tests/sim tests/quality)

# The images built and the manifests run by podman: minutes for the first build, two for each run after that.
test-containers: install-test
	@$(SYSTEM_PACKAGES) podman
	$(BIN)/python -m pytest tests/deploy/test_containers.py -m nightly

# What `make test` leaves out. Each mark says what `make test` keeps in its place (docs/nightly.md).
nightly: install-test .venv-unchanged/.installed
	$(MAKE) sim SEEDS=20000
	$(MAKE) lint-deploy
	$(MAKE) matrix VERSIONS="--no-docs oldest newest"
	$(PYTEST) -q tests/core --hypothesis-profile=afresh
	$(BIN)/python -m pytest -q --durations=20 -m "nightly and not gpu" tests

# Asks torchrun for what tests compare with, and writes it down for this version of torch.
record: install-test
	$(BIN)/python tests/contract/recordings.py
	$(BIN)/python tests/unchanged/replay.py --record

SEEDS ?= 2000
sim: install-test
	SEEDS=$(SEEDS) $(PYTEST) -q tests/sim

# On a machine with a GPU (docs/gpu.md): tests, faults, benchmarks, with the torch of PYTHON= or else of .venv. Nothing is
# downloaded. PARTS names some of them, BUDGET the seconds of this run, RESULTS the folder from which the next run goes on.
PARTS ?=
BUDGET ?= 1500
RESULTS ?= gpu-results
LIBNCCL ?=
GPU_PYTHON := $(if $(filter file undefined,$(origin PYTHON)),$(firstword $(wildcard $(BIN)/python) $(PYTHON)),$(PYTHON))
gpu:
	@$(GPU_PYTHON) bench/gpu/gpu_command.py $(PARTS) --budget "$(or $(BUDGET),1500)" --results "$(or $(RESULTS),gpu-results)" \
		$(if $(LIBNCCL),--libnccl $(LIBNCCL)) $(if $(AGAIN),--again) $(if $(REHEARSE),--rehearse $(REHEARSE:1=cpu)) $(if $(INSTALLED),--installed)

# What it measured, into docs/performance.md and docs/faults.md.
gpu-docs:
	@$(GPU_PYTHON) bench/gpu/gpu_docs.py "$(or $(RESULTS),gpu-results)/gpu.json"

# Wheels for a machine without a network, for this release of Python.
FOR_PYTHON ?= 3.12
NCCL ?=
gpu-bundle: install-test
	@$(BIN)/python bench/gpu/gpu_bundle.py --python $(FOR_PYTHON) $(if $(NCCL),--nccl $(NCCL))

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

# Every fault of bench/faults, and the table of docs/faults.md made of what came of it.
faults: install-test
	$(BIN)/python bench/faults/suite.py --write-docs

# Other releases of torch, one after the other, each in an environment of its own; docs/compatibility.md has the results.
VERSIONS ?=
KEEP ?=
matrix: install-test tools
	$(BIN)/python tests/matrix/matrix.py --uv $(TOOLS)/uv $(if $(KEEP),--keep) $(VERSIONS)

# The generated code is committed; a test holds it in step with the schemas. The compiler is as old as the oldest
# protobuf that we run with, so it has an environment of its own. There are wheels of it for Python up to 3.13.
proto: generator
	proto/generate.sh .venv-generator/bin/python
generator: .venv-generator/.installed

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

# The versions and hashes of all that is installed: they stay as they are but for UPGRADE="grpcio numpy", or UPGRADE=all.
UPGRADE ?=
lock: install-test tools
	$(BIN)/python requirements/lock.py $(TOOLS)/uv $(UPGRADE)
	$(MAKE) sbom

# Ends with 1 if something is found, 3 if nobody can be asked about advisories. ADVISORIES: a copy of OSV's records.
ADVISORIES ?=
audit: install-test tools
	@$(BIN)/python requirements/audit.py $(TOOLS)/pip-audit $(ADVISORIES)

# The wheel for this machine, in seconds: what `pip install` needs. `make dist` makes and tries all that is released.
wheel:
	@test -x .venv-wheel/bin/python || { $(SYSTEM_PACKAGES) venv && $(PYTHON) -m venv .venv-wheel; }
	@rm -rf build dist/*.whl
	@.venv-wheel/bin/python -m pip --disable-pip-version-check -q wheel --no-deps -w dist .
	@rm -rf build; echo "made $$(echo dist/*.whl)"

# What is released: wheels and sources, built twice and compared, checked, installed into empty environments, and run.
dist: install-test
	@$(SYSTEM_PACKAGES) cc 'arm64?'
	$(BIN)/python deploy/wheels/build.py
	$(BIN)/python deploy/wheels/old_system.py
	$(BIN)/python deploy/wheels/arm64.py
	$(MAKE) sbom
	$(BIN)/python deploy/wheels/try_out.py

sbom: install-test tools
	$(BIN)/python requirements/sbom.py
	$(TOOLS)/python requirements/validate.py deploy/docker/service.sbom.json dist/ddp-launch.sbom.json

# Programs that want an environment of their own.
TOOLS := .venv-tools/bin
tools: .venv-tools/.installed
.venv-%/.installed: requirements/%.txt
	@test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	@.venv-$*/bin/python -m pip --disable-pip-version-check -q install --require-hashes --only-binary :all: --no-deps -r $<
	@touch $@

# Bytes of a stranger's making for all that decodes; what reaches something new is kept in tests/fuzz/corpus.
MINUTES ?= 2
fuzz: install-test
	$(BIN)/python tests/fuzz/fuzz.py --minutes $(MINUTES) --keep $(TARGETS)

# The documentation, strictly: generated pages, then the site with all its links checked, in build/site.
site: install-test .venv-site/.installed
	@rm -rf build/pages && $(BIN)/python docs/site/site_reference.py build/pages
	@NO_MKDOCS_2_WARNING=1 .venv-site/bin/mkdocs build --quiet --strict
	@$(BIN)/python docs/site/site_check.py build/site

# One more version of the site, on the local branch SITE_BRANCH: all versions lie side by side there, ready to be served.
SITE_BRANCH ?= site
MIKE := PATH="$(CURDIR)/.venv-site/bin:$$PATH" NO_MKDOCS_2_WARNING=1 mike -q
site-version: site
	@$(MIKE) deploy --branch $(SITE_BRANCH) --update-aliases $(VERSION) latest
	@$(MIKE) set-default --branch $(SITE_BRANCH) latest

# The head of docs/options.md; the site has the table of all options below it.
options: install
	$(BIN)/python docs/options.py > docs/options.md

# The header of the C writer and the phases in docs/status-page.md, from ddp/telemetry/contracts.py; a test holds them together.
layout: install
	$(BIN)/python docs/page_layout.py

# The pictures of the README: the page of a real job with a slow rank, `make demo`, and the box of a job that fails.
screenshots: install-test
	$(BIN)/python tests/wings/web/page_pictures.py
	$(BIN)/python examples/capture.py demo
	$(BIN)/python examples/capture.py box

clean:
	rm -rf $(VENV) .venv-* .mypy_cache .ruff_cache .pytest_cache *.egg-info build dist
