# Each target first makes sure that .venv is there and current; that takes no time when it is.
.DEFAULT_GOAL := help
.PHONY: help setup quickstart test parity test-all test-gpu clean

PY := .venv/bin/python
# One thread a process: the tests run several processes side by side, and torch would give each of them all the cores.
TEST_THREADS ?= 1

export PYTHONNOUSERSITE := 1
unexport PYTHONPATH PYTHONHOME

help: ## what there is to do
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

setup: ## find Python 3.12 or 3.13 (or take PYTHON=...) and install everything into .venv
	@bash setup.sh

quickstart: setup ## train a small hybrid model here and now
	@$(PY) -m launch quickstart

test: setup ## the tests that fit a few minutes on two cores
	@OMP_NUM_THREADS=$(TEST_THREADS) $(PY) -m pytest tests/cpu -m "not slow" -q

parity: setup ## every mixer under every layout against one process, as a table: tests/parity.md
	@PARITY_TABLE=tests/parity.md OMP_NUM_THREADS=$(TEST_THREADS) $(PY) -m pytest tests/cpu/test_parity.py tests/cpu/test_zoo_parity.py -q
	@cat tests/parity.md

test-all: setup ## every test that needs no GPU; rewrites the table tests/parity.md
	@PARITY_TABLE=tests/parity.md OMP_NUM_THREADS=$(TEST_THREADS) $(PY) -m pytest tests/cpu -q

test-gpu: setup ## the tests that need a GPU
	@$(PY) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("error: test-gpu needs a CUDA device, and torch sees none here")'
	@$(PY) -m pytest tests/gpu -q

clean: ## remove .venv and caches; never runs/ or data/
	rm -rf .venv .venv.old.* .venv.lock .venv.setup.log build dist *.egg-info .pytest_cache .ruff_cache
	find . \( -path ./runs -o -path ./data -o -path ./.git \) -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +
