# `make serve` and `make test` are all it takes: both install what is missing first.

# The interpreter that creates the environment, where to, and which build of vLLM: cpu or gpu.
PYTHON ?= python3
VENV ?= .venv
EXTRA ?= cpu

# Only the command line overrides these: shells export names like HOST for purposes of their own.
BUNDLED := models/scenes-llava
MODEL = $(BUNDLED)
HOST = 127.0.0.1
PORT = 8000
ARGS =
IMAGE_FOLDER = build/image

# The versions to install: those that the tests passed with. `PINNED=` takes the newest that fit.
PINNED = scripts/pinned.txt

ifneq ($(words $(VENV)),1)
$(error VENV must be a path without spaces, got '$(VENV)')
endif

PY := $(VENV)/bin/python
PYTEST := $(PY) -m pytest
SETUP := $(wildcard scripts/*.py scripts/*.pth) $(PINNED) pyproject.toml
RUN_SETUP := $(PYTHON) scripts/setup.py --venv $(VENV) --extra $(EXTRA) $(addprefix --constraints ,$(PINNED))
READY := $(VENV)/.ready-$(EXTRA)
READY_DEV := $(READY)-dev
READY_BENCH := $(READY)-bench

# The bundled models are on disk: no network.
ifneq ($(filter models/scenes-%,$(MODEL)),)
SERVE_ENV := HF_HUB_OFFLINE=1
endif

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup serve bench test lint types test-unit test-engine test-server check-gpu image-proof format clean

help: ## List what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "Options of make serve: MODEL=$(MODEL) HOST=$(HOST) PORT=$(PORT) ARGS='--help'"
	@echo "Options of make bench: ARGS='--users 8 --time 2m --retention 1.0,0.111'"
	@echo "Options of every target: EXTRA=cpu|gpu VENV=$(VENV) PYTHON=$(PYTHON) PINNED=$(PINNED)"

$(READY): $(SETUP)
	@$(RUN_SETUP)
	@touch $@

$(READY_DEV): $(SETUP)
	@$(RUN_SETUP) --group dev
	@touch $(READY) $@

$(READY_BENCH): $(SETUP)
	@$(RUN_SETUP) --group bench
	@touch $(READY) $@

setup: $(READY_DEV) ## Install everything, the developers' tools included

serve: $(READY) ## Serve the bundled model, or another: MODEL=llava-hf/llava-1.5-7b-hf
	@$(SERVE_ENV) exec "$(VENV)/bin/msdg-vllm" serve "$(MODEL)" --host $(HOST) --port $(PORT) $(ARGS)

bench: $(READY_BENCH) ## Load the bundled model's server for a minute; report in benchmarks/runs/load
	@$(PY) -m benchmarks.load run $(ARGS)

test: lint types ## Check everything, as the CI does
	$(PY) -m tests.lanes

lint: $(READY_DEV) ## Check style and formatting
	$(PY) -m ruff check
	$(PY) -m ruff format --check

types: $(READY_DEV) ## Check types
	$(PY) -m mypy

test-unit: $(READY_DEV) ## Run the tests that need no engine
	$(PYTEST) tests/unit

test-engine: $(READY_DEV) ## Run the tests on the real vLLM engine
	$(PYTEST) tests/engine

test-server: $(READY_DEV) ## Run the tests on the real server
	$(PYTEST) tests/server

check-gpu: $(READY_DEV) ## Run what only a GPU can show, and write a report: EXTRA=gpu
	$(PY) -m tests.device $(ARGS)

image-proof: $(READY_DEV) ## Build and run the CPU image without Docker (root, debootstrap, 10 GB)
	$(PY) -m deploy.prove_image build $(IMAGE_FOLDER) $(ARGS)
	$(PY) -m deploy.prove_image serve $(IMAGE_FOLDER)

format: $(READY_DEV) ## Format the code and fix what can be fixed
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

clean: ## Remove the environment and all caches
	if [ -f $(VENV)/pyvenv.cfg ]; then rm -rf $(VENV); fi
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .schemathesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
