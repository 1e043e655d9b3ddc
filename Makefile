# The commands of this project; `make` lists them.

VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed
GHOST := $(VENV)/ghost-te/.installed

# The Python to make the environment with; empty looks for one. The pins of constraints.txt were made with
# 3.12, so that comes first. 3.14 is too new: argparse there refuses how Megatron 0.19 declares its flags.
# pyenv's versions are tried by path too: its shims are on PATH even where no version is selected, and
# fail when run.
PYTHON ?=
PYENV_ROOT ?= $(HOME)/.pyenv
CANDIDATES = $(or $(PYTHON),python3.12 python3.13 python3 \
	$(wildcard $(PYENV_ROOT)/versions/3.12*/bin/python $(PYENV_ROOT)/versions/3.13*/bin/python))

# Processes that run tests, and beside two and more of them one that waits for Slurm; each starts up to 4 more, and
# wants 8 GiB.
JOBS := 2
PROCESSES := -n $(if $(filter 1,$(JOBS)),1,$(shell expr $(JOBS) + 1))
# Without compiled files every process that a test starts would compile megasched anew.
unexport PYTHONDONTWRITEBYTECODE
FAST := $(PROCESSES) -m "not slow and not browser and not checkout"

# What asks Megatron something of its own, beside tests/megatron: names, patches, flags, layers, resuming.
UNDER_CHECKOUT := tests/patches tests/trainer tests/layers tests/parity/test_levels.py tests/parity/test_mixture_blocks.py \
	tests/parity/test_resume.py tests/parity/test_context.py tests/parity/test_packed.py tests/bench/test_contenders.py \
	tests/ghost/test_kernels.py

.PHONY: help setup ghost gpu-check gpu-kit bench quickstart test test-all test-megatron durations browser-test matrix lint docs notebook stubs format clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP) ## make .venv with everything that constraints.txt pins

$(STAMP): pyproject.toml setup.py constraints.txt tests/te/requirements.txt tests/oldest/requirements.txt \
	tests/dialects/requirements.txt
	@set -e; \
	for python in $(CANDIDATES); do \
		if "$$python" -c 'import sys; sys.exit(not (3, 12) <= sys.version_info < (3, 14))' 2>/dev/null; then \
			echo "$$python -m venv $(VENV)"; \
			"$$python" -m venv $(VENV); \
			exit 0; \
		fi; \
	done; \
	echo "error: no working Python 3.12 or 3.13 among: $(CANDIDATES)" >&2; \
	echo "install one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; \
	exit 1
	$(RUN) -m pip install --constraint constraints.txt --editable '.[dev,quickstart]'
	$(RUN) -m pip install --quiet --no-deps --upgrade --target $(VENV)/te --requirement tests/te/requirements.txt
	$(RUN) -m pip install --quiet --no-deps --upgrade --target $(VENV)/oldest --requirement tests/oldest/requirements.txt
	$(RUN) -m pip install --quiet --no-deps --upgrade --target $(VENV)/deepspeed --requirement tests/dialects/requirements.txt
	@touch $@

ghost: $(GHOST) ## Transformer Engine for the tests on ghost GPUs: some minutes, once; `make test` asks for it

$(GHOST): $(STAMP) tests/ghost/requirements.txt tests/ghost/te.py
	$(RUN) -m pip install --quiet --no-deps --upgrade --target $(VENV)/ghost --requirement tests/ghost/requirements.txt
	$(RUN) -m tests.ghost.te $(VENV)/ghost-te
	@touch $@

gpu-check: $(STAMP) ## numbers, NCCL, speed and memory on the GPUs of this machine, step by step (ARGS="--only numerics")
	$(RUN) bench/gpu/check.py $(ARGS)

gpu-kit: $(STAMP) ## the archive that does so on a bare machine without a network: build/gpu_kit.tar
	$(RUN) bench/gpu/pack.py $(ARGS)

bench: $(STAMP) ## whole trainers on this machine's GPUs or CPUs, goes on where it was (ARGS="--only hf_ddp megasched_ddp")
	$(RUN) bench/trainers.py $(ARGS)

quickstart: $(STAMP) ## train a small Llama with Megatron's trainer on this machine (ARGS="--iters 50")
	$(RUN) -m megasched quickstart $(ARGS)

test: lint $(GHOST) ## what CI runs: lint, and the tests that are not marked slow (JOBS=4, on more than 2 cores)
	$(RUN) -m pytest $(FAST) $(ARGS)

test-all: lint $(GHOST) ## every test but the browser's: before a release, with `make matrix`
	$(RUN) -m pytest $(PROCESSES) -m "not browser and not checkout" $(ARGS)

test-megatron: $(GHOST) ## whether a Megatron-LM checkout does what the installed one does (CHECKOUT=DIR)
	@test -d "$(CHECKOUT)/megatron/core" || { echo "make test-megatron CHECKOUT=DIR: no Megatron-LM in '$(CHECKOUT)'" >&2; exit 1; }
	MEGATRON_CHECKOUT=$(abspath $(CHECKOUT)) $(RUN) -m pytest -m checkout tests/megatron $(ARGS)
	PYTHONPATH=$(abspath $(CHECKOUT)) $(RUN) -m pytest $(PROCESSES) -m "not slow" $(UNDER_CHECKOUT) $(ARGS)

durations: $(GHOST) ## the tests of `make test`, and write what they take to tests/suite/durations.json
	$(RUN) -m pytest $(FAST) --record-durations $(ARGS)

browser-test: $(STAMP) ## the page of `show --html` in a real Chromium, which pip does not install (apt-get does)
	$(RUN) -m pytest -m browser tests/browser $(ARGS)

matrix: $(STAMP) ## check every architecture at every layout; hours, goes on where it was (ARGS="--types llama")
	$(RUN) -m megasched.verify.matrix $(ARGS)

lint: $(STAMP) ## ruff: rules and formatting; mypy: the types of what users call and of the plan
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

docs: $(STAMP) ## the pages as a site with a search, every link checked: build/site/index.html
	$(RUN) docs/site/draw.py
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build $(ARGS)

notebook: $(STAMP) ## run docs/tutorial.md and write it as docs/tutorial.ipynb, with what its commands print
	$(RUN) -m tests.pages.notebook

stubs: $(STAMP) ## write the types of the primitives, as they are called on a schedule, from the registry
	$(RUN) -m tests.house.stubs

format: $(STAMP) ## let ruff rewrite what it can
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

clean: ## remove the environment, caches and build outputs; quickstart/ stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
