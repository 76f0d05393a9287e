# Every target sets up what it needs; a second run starts at once.
.DEFAULT_GOAL := help
.PHONY: help setup demo lint check test test-chaos bench clean

READY := .venv/.ready
BIN := .venv/bin

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

$(READY): pyproject.toml constraints.txt scripts/setup.sh
	@bash scripts/setup.sh
	@touch $(READY)

setup: $(READY) ## make .venv and install everything into it

demo: $(READY) ## show the planner at work on a hybrid model
	@$(BIN)/kvstrata demo

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint ## style, types, layers and the quick tests: under two minutes
	$(BIN)/pytest -q -n 2 -m "not slow" tests/unit tests/property

test: lint ## everything: style, types, layers, all tests with coverage, faults, 5,000 examples per property
	$(BIN)/pytest -q -n 2 tests --ignore tests/chaos --cov --cov-config=pyproject.toml \
	  --cov-report=term-missing:skip-covered
	$(BIN)/pytest -q tests/chaos
	HYPOTHESIS_PROFILE=thorough $(BIN)/pytest -q -n 2 --timeout 900 -o faulthandler_timeout=0 \
	  tests/property

test-chaos: $(READY) ## inject faults into real components, the long form: about ten minutes
	KVSTRATA_CHAOS=full $(BIN)/pytest -q -s --timeout 1800 -o faulthandler_timeout=0 tests/chaos

bench: $(READY) ## measure, against the goals
	@$(BIN)/kvstrata bench planning
	@$(BIN)/kvstrata bench host
	@$(BIN)/kvstrata bench filesystem

clean: ## remove .venv and caches
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage*
