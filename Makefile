# Each target first makes sure that .venv is there and current; that takes no time when it is.
.DEFAULT_GOAL := help
.PHONY: help setup quickstart test parity test-all test-gpu slurm-rehearsal soak clean

PY := .venv/bin/python
# One thread a process: the tests run several processes side by side, and torch would give each of them all the cores.
TEST_THREADS ?= 1
# Files of tests run in two processes: those that wait leave the cores to the others.
TEST_PROCESSES ?= 2

export PYTHONNOUSERSITE := 1
unexport PYTHONPATH PYTHONHOME

help: ## what there is to do
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' Makefile

setup: ## find Python 3.12 or 3.13 (or take PYTHON=...) and install everything into .venv
	@bash setup.sh

quickstart: setup ## train a small hybrid model here and now
	@$(PY) -m launch quickstart

# Slurm's packages are installed where CI=true says that the machine is nobody's own, and where the target's name promises tests of it.
test: setup ## the tests that fit a quarter of an hour on two cores
	@[ -z "$$CI" ] || timeout 60 bash tests/slurm/install.sh || true
	@OMP_NUM_THREADS=$(TEST_THREADS) $(PY) -m pytest tests/cpu tests/slurm -m "not slow" -q -rs -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

parity: setup ## every mixer under every layout against one process, as a table: tests/parity.md
	@PARITY_TABLE=tests/parity.md OMP_NUM_THREADS=$(TEST_THREADS) $(PY) -m pytest tests/cpu/test_parity.py tests/cpu/test_zoo_parity.py -q
	@cat tests/parity.md

test-all: setup ## every test that needs no GPU, on a Slurm cluster made here too; rewrites the table tests/parity.md
	@bash tests/slurm/install.sh || true
	@PARITY_TABLE=tests/parity.md OMP_NUM_THREADS=$(TEST_THREADS) $(PY) -m pytest tests/cpu tests/slurm -q -rs

slurm-rehearsal: setup ## a Slurm cluster here: a job on two nodes loses one and reaches its time limit; its curve against an undisturbed one
	@bash tests/slurm/install.sh || true
	@OMP_NUM_THREADS=$(TEST_THREADS) $(PY) -m tests.slurm.rehearsal

soak: setup ## kill a Slurm job fifty times at random moments; shows what each kill cost
	@bash tests/slurm/install.sh || true
	@OMP_NUM_THREADS=$(TEST_THREADS) $(PY) -m pytest tests/slurm/test_soak.py -q -rs

test-gpu: setup ## the tests that need a GPU
	@$(PY) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("error: test-gpu needs a CUDA device, and torch sees none here")'
	@$(PY) -m pytest tests/gpu -q

clean: ## remove .venv and caches; never runs/ or data/
	rm -rf .venv .venv.old.* .venv.lock .venv.setup.log build dist *.egg-info .pytest_cache .ruff_cache
	find . \( -path ./runs -o -path ./data -o -path ./.git \) -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +
