# Everything a person does with the tree. On a fresh machine `make demo` is all that is needed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# How long `make soak` lets mixed traffic run; the other long forms take what they take.
SOAK_MINUTES ?= 60

# Stamps: what is installed changes only when pyproject.toml does.
RUN_STAMP := $(VENV)/.installed-all
DEV_STAMP := $(VENV)/.installed-dev
MODEL_STAMP := models/smollm2/SHA256SUMS

PYTEST := $(BIN)/pytest -m "not soak" --numprocesses 3 --dist loadfile

# Tests start hundreds of processes, which would each compile what they import.
unexport PYTHONDONTWRITEBYTECODE

.NOTPARALLEL:
.PHONY: help demo test check lint soak bench rolling-restart audit protos clean

help:
	@echo "make demo    install, fetch the model, ask it twelve questions at once"
	@echo "make test    stubs, lint, types, import rules, tests"
	@echo "make soak    the long forms of the tests"
	@echo "make rolling-restart   each container of a running compose stack, one by one, under load"
	@echo "make bench   the figures of docs/results.md"
	@echo "make audit   what the public advisories say of the dependencies"
	@echo "make protos  stubs and docs/api.md from protos/v1"
	@echo "make clean   what was built; models stay"

demo: $(RUN_STAMP) $(MODEL_STAMP)
	$(BIN)/chairlift demo

# Types are checked beside the tests: by themselves they leave cores without work for a minute.
test: lint $(MODEL_STAMP)
	@echo '$(BIN)/mypy & $(PYTEST)'; $(BIN)/mypy & types=$$!; \
	$(PYTEST); tests=$$?; wait $$types && exit $$tests

check: lint
	$(BIN)/mypy

lint: $(DEV_STAMP)
	$(BIN)/python scripts/gen_protos.py --check
	$(BIN)/python scripts/gen_api_docs.py --check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

soak: $(DEV_STAMP) $(MODEL_STAMP)
	$(BIN)/pytest -m soak --timeout 3600 --soak-minutes $(SOAK_MINUTES) --artefacts artefacts

bench: $(DEV_STAMP) $(MODEL_STAMP)
	$(BIN)/python -m bench

rolling-restart: $(RUN_STAMP)
	PYTHON=$(BIN)/python scripts/rolling_restart.sh

# 0: nothing known; 1: something is; 2: they could not be asked.
audit: $(DEV_STAMP)
	$(BIN)/python scripts/audit.py

protos: $(DEV_STAMP)
	$(BIN)/python scripts/gen_protos.py
	$(BIN)/python scripts/gen_api_docs.py

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(RUN_STAMP): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[all]'
	touch $@

$(DEV_STAMP): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[all,dev]'
	touch $@ $(RUN_STAMP)

# Present models are neither fetched nor looked up again.
$(MODEL_STAMP): | $(RUN_STAMP)
	$(BIN)/chairlift pull smollm2
