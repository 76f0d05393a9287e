# Every target sets up what it needs; a second run starts at once.
.DEFAULT_GOAL := help
.PHONY: help setup demo lint check test test-chaos test-soak test-vllm test-vllm-soak test-vllm-versions bench clean

READY := .venv/.ready
VLLM_READY := .venv/.vllm-ready
BIN := .venv/bin

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

$(READY): pyproject.toml constraints.txt scripts/setup.sh hatch_build.py $(wildcard src/kvstrata/*/_*.[ch])
	@bash scripts/setup.sh
	@touch $(READY)

$(VLLM_READY): $(READY) scripts/setup_vllm.sh
	@bash scripts/setup_vllm.sh
	@touch $(VLLM_READY)

setup: $(READY) ## make .venv and install everything into it

demo: $(READY) ## lose the caches of hybrid models, restore them from every tier, and compare: a minute or two
	@$(BIN)/kvstrata demo

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint ## style, types, layers and the quick tests: under two minutes
	$(BIN)/pytest -q -n 2 -m "not slow" tests/unit tests/property

test: lint test-vllm test-vllm-versions ## everything: style, types, layers, all tests with coverage, faults, vLLM, 5,000 examples per property
	$(BIN)/pytest -q -n 2 tests --ignore tests/chaos --ignore tests/soak \
	  --ignore tests/integration/vllm --ignore tests/integration/vllm_serve \
	  --ignore tests/soak_vllm --cov --cov-config=pyproject.toml \
	  --cov-report=term-missing:skip-covered
	$(BIN)/pytest -q tests/chaos
	$(BIN)/pytest -q tests/soak
	HYPOTHESIS_PROFILE=thorough $(BIN)/pytest -q -n 2 --timeout 900 -o faulthandler_timeout=0 \
	  tests/property

test-chaos: $(READY) ## inject faults into real components, the long form: about ten minutes
	KVSTRATA_CHAOS=full $(BIN)/pytest -q -s --timeout 1800 -o faulthandler_timeout=0 tests/chaos

test-soak: $(READY) ## hundreds of requests against tiny caches and broken tiers, the long form: ten minutes
	KVSTRATA_SOAK=full $(BIN)/pytest -q -s --timeout 1800 -o faulthandler_timeout=0 tests/soak

test-vllm: $(VLLM_READY) ## the connector on real vLLM (CPU build): in one process, in several, as servers, a short soak
	$(BIN)/pytest -q -n 2 --dist loadfile tests/integration/vllm
	$(BIN)/pytest -q -o faulthandler_timeout=0 tests/integration/vllm_serve
	$(BIN)/pytest -q -o faulthandler_timeout=0 tests/soak_vllm

test-vllm-soak: $(VLLM_READY) ## conversations with vLLM servers with tiny caches and a broken tier, the long form: a quarter of an hour
	KVSTRATA_SOAK=full $(BIN)/pytest -q -s --timeout 1800 -o faulthandler_timeout=0 tests/soak_vllm

test-vllm-versions: $(VLLM_READY) ## the connector on the older versions of vLLM that it supports
	@for version in 0.30.0 0.31.0; do \
	  echo "vLLM $$version"; \
	  PYTHONPATH=$(CURDIR)/.venv/vllm-$$version $(BIN)/pytest -q tests/integration/vllm/test_restore.py \
	    tests/integration/vllm/test_adapters.py -k "gemma3 or qwen3_next or same_name" || exit 1; \
	done

bench: $(READY) ## measure, against the goals
	@$(BIN)/kvstrata bench planning
	@$(BIN)/kvstrata bench host
	@$(BIN)/kvstrata bench filesystem
	@$(BIN)/kvstrata bench engine
	@$(BIN)/kvstrata bench runtime

clean: ## remove .venv and caches
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage*
