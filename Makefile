# make help lists what can be made. PYTHON chooses the interpreter: make demo PYTHON=python3.12,
# JOBS how many tests run at once: make test JOBS=8

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
MANIFESTS := pyproject.toml clients/python/pyproject.toml clients/http/pyproject.toml
CODE := src runtime actors daemon bench clients/python clients/http clients/ros clients/conformance models tests tools
TESTS ?= tests
JOBS ?= 2

.DEFAULT_GOAL := help
.PHONY: help env dev bench-env clients-env lint test clients-test system kernels-check demo bench release arm64 clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' Makefile

env: $(VENV)/.env ## what the daemon needs, in .venv
dev: $(VENV)/.dev ## also what lint and test need
bench-env: $(VENV)/.bench ## also the peers that hearth bench decode and clients compare with

demo: $(VENV)/.env ## questions about a home and a picture to the shipped models
	@$(BIN)/hearth demo

# Tests side by side take the cores; threads of a library beside them wait for each other.
test: $(VENV)/.dev ## the whole test suite
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(TESTS)

# Toolchains go onto the machine, ROS's wheels into environments of their own in clients/ros.
clients-env: ## as root: what clients in other languages are built with; names what cannot be had
	PYTHON=$(PYTHON) clients/env

# CLIENTS="--client go" chooses; what the machine lacks is skipped by name.
clients-test: $(VENV)/.dev ## every client's own tests, and the conformance suite with each of them
	$(BIN)/python -m pytest -n $(JOBS) clients/conformance $(CLIENTS)

# FLAGS are those of the row: python -m tests.system faults --help, overload and soak likewise.
system: $(VENV)/.dev ## what a daemon survives and bears: ROW="GPU actor killed", overload, soak; FLAGS=--json
	$(BIN)/python -m tests.system $(if $(ROW),"$(ROW)") $(FLAGS)

lint: $(VENV)/.dev ## style, format and types
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy

# RECORD=--record writes what was found in place of comparing it.
kernels-check: $(VENV)/.dev ## registers and spills of hot kernels against the record, without a GPU
	$(BIN)/python -m tests.runtime.executor.kernels.ptxas $(RECORD)

bench: $(VENV)/.env ## what the daemon adds to a token, and how it holds under load
	$(BIN)/hearth bench overhead
	$(BIN)/hearth bench load

# From nothing: what setuptools left of an earlier build would go into the wheel. The time of the
# commit is that of the files in it, so that two builds of one commit are equal.
release: $(VENV)/bin/python ## all wheels and their digests, in dist
	rm -rf build clients/python/build clients/http/build dist
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct 2>/dev/null || echo 315532800) \
	  $(PIP) wheel --no-deps --wheel-dir dist . clients/python clients/http
	cd dist && sha256sum *.whl | tee SHA256SUMS

arm64: ## the wheels, the demo and a part of the suite on an emulated Debian for arm64, as root
	.ci/arm64

clean: ## remove the environment and what was built here
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -rf *.egg-info clients/python/*.egg-info clients/http/*.egg-info
	find $(CODE) -name __pycache__ -prune -exec rm -rf {} +

# A venv without pip is what Debian leaves when python3-venv is missing, so look for ensurepip.
$(VENV)/bin/python:
	@command -v $(PYTHON) >/dev/null || \
	  { echo "make: there is no $(PYTHON): install Python 3.10 or newer (apt install python3)"; exit 1; }
	@$(PYTHON) -c '' >/dev/null 2>&1 || \
	  { echo "make: $(PYTHON) does not run (try $(PYTHON) --version): name another with PYTHON="; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "make: $(PYTHON) is too old, 3.10 or newer is needed: make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "make: $(PYTHON) cannot make environments: apt install python3-venv"; exit 1; }
	@echo "making the environment $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.env: $(VENV)/bin/python $(MANIFESTS)
	@echo "installing Hearth"
	@$(PIP) install -e clients/python -e clients/http -e '.[cpu]'
	@touch $@

$(VENV)/.dev: $(VENV)/.env
	@echo "installing the tools for lint and test"
	@$(PIP) install -e clients/python -e clients/http -e '.[dev]'
	@touch $@

$(VENV)/.bench: $(VENV)/.env
	@echo "installing the peers of the benches; one of them compiles for some minutes"
	@$(PIP) install -e clients/python -e '.[bench]'
	@touch $@
