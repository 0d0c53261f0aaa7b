# Everything a newcomer, a contributor and the continuous integration run. `make` alone lists the targets.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.complete
SHELL := /bin/bash
export PYTHON

.DEFAULT_GOAL := help
.PHONY: help install quickstart quickstart-ppo test test-fast test-long test-exhaustive lint format smoke clean distclean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

install: $(READY)  ## make .venv, or bring it up to the locks

$(READY): requirements/cpu-py311.txt requirements/dev-py311.txt requirements/install.sh pyproject.toml
	@echo "making $(VENV): a few minutes, about 5 GB"
	@requirements/install.sh $(VENV)
	@touch $@

quickstart: $(READY)  ## a small model learns to add: SFT, GRPO, evaluation, gate, registry
	$(BIN)/hybridflow run deployments/presets/quickstart.yaml

quickstart-ppo: $(READY)  ## the same with PPO and a critic
	$(BIN)/hybridflow run deployments/presets/quickstart-ppo.yaml

test: $(READY)  ## all tests but those marked long or exhaustive; GPU tests where there is a GPU
	$(BIN)/pytest -m "not long and not exhaustive"

test-fast: $(READY)  ## unit, parity and contract tests
	$(BIN)/pytest -m "not long and not exhaustive" tests/unit tests/parity tests/contracts

test-long: $(READY)  ## killed runs end bit for bit like others; deployed runs; the production stack (needs Postgres): a quarter of an hour
	$(BIN)/pytest -m long

test-exhaustive: $(READY)  ## more kills, more damaged stores, all that operators do with Prefect: half an hour
	$(BIN)/pytest -m exhaustive

lint: $(READY)  ## style, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)  ## put the code into the agreed format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

smoke: $(READY)  ## every stage in seconds, result checked
	@.ci/smoke $(BIN)/hybridflow

clean:  ## remove caches and build output; keeps .venv and runs
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find flows tasks engine deployments benchmarks tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## clean, and remove .venv
	rm -rf $(VENV)
