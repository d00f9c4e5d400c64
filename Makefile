# Needs Python 3.11 or newer. Everything goes into $(VENV); nothing outside the project folder is touched.
#   PYTHON          the interpreter the environment is made from
#   TORCH_PIP_ARGS  more arguments for pip when it installs torch, if your pip does not find a CPU build of its own accord
#   RUN             the name of the run that `make demo` makes, under runs/; one that is there and unfinished goes on
#   ARGS            more arguments for `seqrelay train` in `make demo`, for example ARGS="learner.steps=3"

VENV ?= .venv
RUN ?= demo
TORCH_PIP_ARGS ?=
ARGS ?=
NEW_ENOUGH := -c 'import sys; sys.exit(sys.version_info < (3, 11))'
PYTHON ?= $(shell for p in python3.11 python3; do "$$p" $(NEW_ENOUGH) 2>/dev/null && echo "$$p" && break; done)

TORCH := torch==2.13.0
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
REQUIREMENTS := requirements/cpu.txt requirements/dev.txt
SMOLLM2 := models/smollm2-135m
TINY_MOE := models/tiny-moe

# One thread a process: several processes share the cores, and waiting threads spin.
export OMP_NUM_THREADS := 1
export MKL_NUM_THREADS := 1
export OPENBLAS_NUM_THREADS := 1
export NUMEXPR_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false
# Nothing calls home or looks for models on a hub.
export HF_HUB_OFFLINE := 1
export HF_HUB_DISABLE_TELEMETRY := 1
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1
export RAY_USAGE_STATS_ENABLED := 0
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup models demo test test-full lint format lock clean
.DELETE_ON_ERROR:

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP)  ## make the environment (once; again when the pins change)

$(STAMP): $(REQUIREMENTS) pyproject.toml
	@"$(PYTHON)" $(NEW_ENOUGH) 2>/dev/null || { \
	  echo 'error: PYTHON="$(PYTHON)": no Python 3.11 or newer there; run `make setup PYTHON=/path/to/python3.11`' >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV)
	$(BIN)/pip install $(TORCH_PIP_ARGS) $(TORCH)
	$(BIN)/pip install --no-deps $(addprefix -r ,$(REQUIREMENTS))
	$(BIN)/pip install --no-deps -e .
	$(BIN)/python scripts/check_setup.py
	@touch $@

models: setup  ## make both small models
	$(BIN)/python scripts/make_smollm2.py --out $(SMOLLM2)
	$(BIN)/python scripts/make_tiny_moe.py --out $(TINY_MOE)

demo: setup  ## train SmolLM2-135M on sums: about ten minutes on two cores
	$(BIN)/python scripts/make_smollm2.py --out $(SMOLLM2)
	$(BIN)/seqrelay train scripts/configs/demo.toml run.name=$(RUN) $(ARGS) $(if $(wildcard runs/$(RUN)/config.json),--resume)

lint: setup  ## the checks that run nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint models  ## checks and quick tests
	$(BIN)/python -m pytest -m "not full"

test-full: models  ## slow tests, with the real engine
	$(BIN)/python -m pytest -m full

format: setup  ## let ruff rewrite the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: setup  ## resolve the pins in requirements/ again
	$(BIN)/python scripts/lock_requirements.py

clean:  ## remove caches (keeps .venv, models and runs)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
