# Everything runs in .venv, which `make install` builds from the locked requirements. Nothing global is touched.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.ONESHELL:
.DEFAULT_GOAL := help
.PHONY: help install engine-vllm engine-transformers demo test test-all test-faults bench-registry bench-ingest bench-boot mutation \
	lint format lock schemas clean

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LOCK := deploy/requirements.lock
BUILD_LOCK := deploy/requirements-build.lock
MUTATION_LOCK := deploy/requirements-mutation.lock
MUTATION := .venv-mutation
PACKAGES := schemas gates registry workers
MYPY_TARGETS := $(addprefix -p ,$(PACKAGES)) $(if $(wildcard tests/support/*.py),-p tests.support)

help: ## Say what each target does
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 28

install: $(STAMP) ## Build .venv from the locked requirements; does nothing when it is current

$(STAMP): $(LOCK) $(BUILD_LOCK) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
		echo "Sluicegate needs Python 3.11 or newer, and '$(PYTHON)' is not: $$($(PYTHON) --version 2>&1)." >&2
		echo "Name another one: make PYTHON=/path/to/python3.11 install" >&2
		exit 1
	}
	$(PYTHON) -m venv $(VENV) || {
		echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu the module is in the package python3-venv." >&2
		exit 1
	}
	@echo "Installing what deploy/requirements.lock pins into $(VENV): about a minute and 1.3 GB"
	$(BIN)/python -m pip install --quiet --require-hashes -r $(LOCK) -r $(BUILD_LOCK)
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@
	@echo "Installed: $(BIN)/sluicegate --help"

engine-vllm: .venv-vllm/.installed ## Build .venv-vllm, in which vLLM serves on a CPU: 3.2 GB

engine-transformers: .venv-transformers/.installed ## Build .venv-transformers, for transformers serve on a CPU: 0.95 GB

# torch first and alone, so that a machine without its build for a CPU says so before anything else is fetched.
.venv-%/.installed: deploy/requirements-%.lock
	@$(PYTHON) -c 'import platform, sys; sys.exit((sys.version_info[:2], platform.machine()) != ((3, 11), "x86_64"))' || {
		echo "The lock of $* is for Python 3.11 on x86-64: make PYTHON=/path/to/python3.11 engine-$*" >&2
		exit 1
	}
	rm -rf .venv-$*
	$(PYTHON) -m venv .venv-$*
	awk '/^torch==/ { wanted = 1 } wanted { print } wanted && !/\\$$/ { exit }' $< > .venv-$*/torch.lock
	.venv-$*/bin/python -m pip install --quiet --no-compile --no-deps --require-hashes -r .venv-$*/torch.lock || {
		echo "$$(head -n 1 .venv-$*/torch.lock | cut -d ' ' -f 1), torch's build for a CPU, is not in your package index, so $*" >&2
		echo "is not installed. What PyPI has under that version is a build for CUDA of several GB, and is not taken." >&2
		echo "Let pip know PyTorch's own index for the CPU, or a folder with that wheel, in its configuration." >&2
		rm -rf .venv-$*
		exit 1
	}
	.venv-$*/bin/python -m pip install --quiet --no-compile --no-deps --require-hashes -r $<
	touch $@

demo: install ## Run the demonstration on a fresh embedded stack: make demo ARGS="--json FILE"
	@$(BIN)/sluicegate demo $(ARGS)

# Building vLLM takes a processor for as long as the rest takes another: it begins first.
test: ## Lint, check migrations, run every test and look into the built wheel
	@mkdir -p $(VENV)
	$(if $(strip $(ARGS)),:,$(MAKE) --no-print-directory engine-vllm > $(VENV)/engine-vllm.log 2>&1) & building=$$!
	trap 'kill $$building 2> /dev/null || true' EXIT
	$(MAKE) --no-print-directory install
	$(MAKE) --no-print-directory lint
	$(BIN)/python -m migrations check
	wait $$building || { cat $(VENV)/engine-vllm.log >&2; echo "Tests on vLLM are counted as not run." >&2; }
	trap - EXIT
	$(BIN)/python -m $(if $(strip $(ARGS)),pytest $(ARGS),tests.suite)

test-all: install ## The same, with what takes minutes and with transformers serve
	@$(MAKE) --no-print-directory engine-transformers || echo "Tests on transformers serve are counted as not run." >&2
	PYTEST_ADDOPTS="-m ''" $(MAKE) --no-print-directory test

bench-registry: install ## Time the API at 1,000 and 100,000 bundles: make bench-registry ARGS="--sizes 1000:10000"
	$(BIN)/python -m tests.bench.registry $(ARGS)

bench-ingest: install ## Time hashing and storing 4 GB against openssl and cp: make bench-ingest ARGS="--bytes 400000000"
	$(BIN)/python -m tests.bench.ingest $(ARGS)

bench-boot: install ## Time what we add to a boot, and the sweep: make bench-boot ARGS="--boots 5"
	$(BIN)/python -m tests.bench.boot $(ARGS)

# cosmic-ray only writes the mutants, and needs nothing of ours: an environment of its own keeps its packages out of .venv.
$(MUTATION)/.installed: $(MUTATION_LOCK)
	$(PYTHON) -m venv $(MUTATION)
	$(MUTATION)/bin/python -m pip install --quiet --require-hashes -r $(MUTATION_LOCK)
	touch $@

mutation: install $(MUTATION)/.installed ## Change each decision once and see that a test notices: ARGS=gates/stats.py
	$(BIN)/python -m tests.mutation.run --mutants $(MUTATION)/bin/python $(ARGS)

FAULT_SEEDS ?= 1,2,3,4,5
FAULT_RELEASES ?= 1

test-faults: install ## Kill, stop and starve every process, with more seeds: make test-faults FAULT_SEEDS=1,2,3
	FAULT_SEEDS=$(FAULT_SEEDS) FAULT_RELEASES=$(FAULT_RELEASES) $(BIN)/python -m pytest tests/faults tests/cases $(ARGS)

lint: install ## Check format, style, types and the direction of imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m mypy $(MYPY_TARGETS)
	$(BIN)/lint-imports

format: install ## Format the code and mend what ruff can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

schemas: install ## Write the committed JSON Schemas and the OpenAPI document anew
	$(BIN)/python -m schemas
	$(BIN)/python -m registry.api --openapi schemas/generated/openapi.json

# An extra names the package itself; calling it unsafe keeps it out of its own lock, and sed drops the warning.
LOCK_WITH := CUSTOM_COMPILE_COMMAND="make lock" $(BIN)/pip-compile --quiet --strip-extras --generate-hashes \
	--no-emit-index-url --no-emit-find-links --no-emit-trusted-host --unsafe-package sluicegate

lock: install ## Resolve the requirements anew within the ranges of pyproject.toml: make lock ARGS=--upgrade
	$(LOCK_WITH) $(ARGS) --extra embedded --extra demo --extra dev --output-file $(LOCK) pyproject.toml
	sed -i '/^# WARNING: The following packages were not pinned/,$$d' $(LOCK)
	$(LOCK_WITH) $(ARGS) --only-build-deps --all-build-deps --constraint $(LOCK) --output-file $(BUILD_LOCK) pyproject.toml
	$(LOCK_WITH) $(ARGS) --constraint $(LOCK) --output-file $(MUTATION_LOCK) deploy/requirements-mutation.in

clean: ## Remove .venv and caches
	rm -rf $(VENV) $(MUTATION) .venv-vllm .venv-transformers .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
