# One .venv for everything. `make` lists the targets.
#
# PYTHON          the interpreter .venv is made with: python3.11, or a python3 that is at least that
# TORCH_PIP_ARGS  how pip gets torch's CPU build where the default package index carries CUDA builds,
#                 for example: make quickstart TORCH_PIP_ARGS="--index-url https://host/of/cpu/wheels"
# ARGS            settings added to a run, for example: make quickstart ARGS="--run.seed 1"
# WORKERS         processes that share the default tests, a file at a time; engines of one take gigabytes

PYTHON ?= $(shell command -v python3.11 || echo python3)
TORCH_PIP_ARGS ?=
ARGS ?=
WORKERS ?= 2

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SETUP := .venv/.runs
DEV := .venv/.tests
MUTATION := .venv/.mutation
SMOLLM2 := .cache/smollm2
SHELL_FILES := $(wildcard .ci/run slurm/*.sbatch slurm/*.sh tests/slurm/*.sh tests/gpu/*.sh)

# Idle OpenMP threads spin and slow every other process on a small machine.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1

.PHONY: help venv quickstart smollm2 test test-slow test-slurm mutation check lint types contracts format docs clean
.DEFAULT_GOAL := help

help:
	@echo "quickstart  GRPO on two-digit addition, a few minutes on a CPU (runs/quickstart)"
	@echo "smollm2     a few steps on a real pretrained model (runs/smollm2)"
	@echo "test        the default tests, in two processes; test-slow and test-slurm: the long ones, those on a real Slurm"
	@echo "mutation    how many small changes to a folder its tests notice (docs/testing.md)"
	@echo "check       everything a change must pass: lint, types, contracts, tests"
	@echo "lint types contracts format docs venv clean"

$(SETUP): requirements/cpu.txt requirements/cpu-nodeps.txt pyproject.toml setup.py \
		megarl/weight_sync/sums.c
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
		"megarl needs Python 3.11 or newer; name one: make PYTHON=/path/to/python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) install $(TORCH_PIP_ARGS) "$$(grep '^torch==' requirements/cpu.txt)"
	$(PIP) install -r requirements/cpu.txt
	$(PIP) install --no-deps --ignore-requires-python -r requirements/cpu-nodeps.txt
	$(PIP) install --no-deps --no-build-isolation -e .
	touch $@

$(DEV): $(SETUP) requirements/dev.txt
	$(PIP) install -r requirements/dev.txt
	touch $@

$(MUTATION): $(DEV) requirements/mutation.txt
	$(PIP) install -r requirements/mutation.txt
	touch $@

venv: $(DEV)

quickstart: $(SETUP)
	$(BIN)/megarl train examples/quickstart.toml $(ARGS)

$(SMOLLM2)/model.safetensors: | $(SETUP)
	$(BIN)/python tools/fetch_smollm2.py --out $(SMOLLM2)

smollm2: $(SETUP) $(SMOLLM2)/model.safetensors
	$(BIN)/megarl train examples/smollm2.toml $(ARGS)

test: $(DEV)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-slow: $(DEV)
	$(BIN)/python -m pytest -m "slow and not gpu and not slurm" $(ARGS)

test-slurm: $(DEV)
	$(BIN)/python -m pytest -m slurm -rs $(ARGS)

mutation: $(MUTATION)
	$(BIN)/python -W ignore -m tools.mutation $(ARGS)

check: lint types contracts test

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/make_settings_doc.py --check
	@if command -v shellcheck >/dev/null; then shellcheck $(SHELL_FILES); \
	else echo "shellcheck is not installed: shell files are not checked"; fi

types: $(DEV)
	$(BIN)/mypy

contracts: $(DEV)
	$(BIN)/lint-imports

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(SETUP)
	$(BIN)/python tools/make_settings_doc.py

clean:
	rm -rf .venv .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist *.egg-info
	rm -f megarl/weight_sync/*.so
