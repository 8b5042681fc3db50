# Variables: PYTHON, TORCH_SPEC, VENV (see scripts/setup_venv.sh) and PYTEST_ARGS.
VENV ?= .venv
PYTHON ?= python3
PYTEST_ARGS ?= -n logical --dist worksteal
export VENV PYTHON

RUN := $(VENV)/bin/python

.PHONY: help demo test test-all fuzz lint format test-versions clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/ready ## set up, then train, fuse, export and verify a small layer
	@$(RUN) scripts/quickstart.py

test: $(VENV)/ready-test ## set up, then run the tests (PYTEST_ARGS='-m gpu -x')
	@$(RUN) -m pytest $(PYTEST_ARGS)

fuzz: $(VENV)/ready-test ## run the fuzz tests on thousands of random programs, anew each time
	@FUSEDBWD_FUZZ=long $(RUN) -m pytest tests/fuzz --hypothesis-show-statistics

test-all: $(VENV)/ready-test ## run every test, slow ones too: more than half an hour
	@$(RUN) -m pytest -m "slow or not slow" $(PYTEST_ARGS)

lint: $(VENV)/ready-dev ## check formatting, lint and types
	@$(RUN) -m ruff format --check
	@$(RUN) -m ruff check
	@$(RUN) -m mypy

format: $(VENV)/ready-dev ## format, and mend what ruff can
	@$(RUN) -m ruff format
	@$(RUN) -m ruff check --fix

test-versions: $(VENV)/ready-test ## compare pattern counts under torch 2.11, 2.13 and 2.14
	@$(RUN) scripts/test_versions.py

clean: ## remove the environments and caches
	rm -rf .venv .venvs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache

# A stamp for each extra, so that a second run goes straight to work.
$(VENV)/ready: pyproject.toml scripts/setup_venv.sh
	@scripts/setup_venv.sh
	@touch $@

$(VENV)/ready-%: pyproject.toml scripts/setup_venv.sh
	@scripts/setup_venv.sh $*
	@touch $@
