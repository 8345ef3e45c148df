# make quickstart   set up .venv, then train a small language model on 8 emulated devices
# make test         the same set-up, then the tests
# make test-heavy   the tests that make test leaves out for their time
# make test-transformers TORCH_PYTHON=PATH   every family against transformers, which is in the environment of that python
# make test-t5x T5X_PYTHON=PATH   training and beam search as in T5X, with T5X itself in the environment of that python
# make test-quantized QUANT_PYTHON=PATH      folders in 4 bits against gptqmodel, transformers and ONNX Runtime GenAI
# make test-mergekit MERGEKIT_PYTHON=PATH    merges against mergekit, which is in the environment of that python
# make test-xmanager XMANAGER_PYTHON=PATH    runs and jobs by XManager, which is in the environment of that python
# make test-beam BEAM_PYTHON=PATH            corpora by Apache Beam and Dask, which are in the environment of that python
# make test-trackers TRACKERS_PYTHON=PATH    runs in W&B, MLflow and Comet; that python has capibara and their clients
# make test-gpu GPU_PYTHON=PATH   runs, memory and traces on one NVIDIA GPU; that python has capibara[gpu] and pytest
# make test-hosts   runs of several processes, joined as on TPU VMs, GKE, Slurm and by flags
# make test-slices  every program that trains, evaluates or generates, compiled by the TPU compiler for v5e and v6e slices
# make test-faults  the faults that a run must survive, injected, and a table of what became of them
# make test-dashboard   the dashboard in headless Chromium: screenshots, axe-core and the keyboard; says what it needs
# make finetune     an open model in, adapters trained on conversations, answers before and after, a GGUF file out
# make types        what mypy finds in the package; tests/test_types.py runs it, too
# make format       the layout of the code, by ruff; tests/test_style.py runs its checks
#
# PYTHON=python3.12 chooses the interpreter (3.11, 3.12 or 3.13); each other version gets a .venv-3.X of its own.
# TRAIN_STEPS=600 overrides that macro of the quickstart; ARGS="..." is passed on.

SHELL := /bin/bash
# Images of containers set it; then each of the many processes of the tests would compile JAX's modules anew, for seconds.
unexport PYTHONDONTWRITEBYTECODE
PYTHON ?= python3
ARGS ?=

VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
ifeq ($(PYTHON),python3)
VENV ?= .venv
else
VENV ?= .venv-$(VERSION)
endif
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses=4 --dist=loadfile --no-loadscope-reorder -q
# Named after the version, so that a newer python3 makes a new environment instead of using half of the old one.
STAMP := $(VENV)/.installed-$(VERSION)

.PHONY: quickstart test test-heavy test-transformers test-t5x test-quantized test-mergekit test-xmanager test-beam test-trackers test-gpu test-faults test-hosts test-slices test-dashboard finetune types format bench wheel lock setup

quickstart: $(STAMP)
	$(BIN)/python -m capibara.train --gin_file=quickstart.gin --emulate=8 \
	  $(if $(TRAIN_STEPS),--gin.TRAIN_STEPS=$(TRAIN_STEPS)) $(ARGS)

test: $(STAMP)
	$(PYTEST) -m "not heavy" $(ARGS)

test-heavy: $(STAMP)
	$(PYTEST) -m heavy $(ARGS)

test-transformers: $(STAMP)
	TORCH_PYTHON=$(TORCH_PYTHON) $(BIN)/python -m pytest -q -s tests/interop/test_transformers*.py $(ARGS)

test-t5x: $(STAMP)
	T5X_PYTHON=$(T5X_PYTHON) $(BIN)/python -m pytest -q -s tests/interop/test_t5x_training.py tests/interop/test_t5x_decoding.py $(ARGS)

test-quantized: $(STAMP)
	QUANT_PYTHON=$(QUANT_PYTHON) $(BIN)/python -m pytest -q -s tests/interop/test_quantized_folders.py $(ARGS)

test-mergekit: $(STAMP)
	MERGEKIT_PYTHON=$(MERGEKIT_PYTHON) $(BIN)/python -m pytest -q -s tests/consensus/merging tests/interop/merge $(ARGS)

test-xmanager: $(STAMP)
	XMANAGER_PYTHON=$(XMANAGER_PYTHON) $(BIN)/python -m pytest -q tests/launch $(ARGS)

test-beam: $(STAMP)
	BEAM_PYTHON=$(BEAM_PYTHON) $(BIN)/python -m pytest -q tests/builders/preparation/test_beam.py $(ARGS)

test-trackers: $(STAMP)
	TRACKERS_PYTHON=$(TRACKERS_PYTHON) $(BIN)/python -m pytest -q tests/monitoring/trackers $(ARGS)

test-hosts: $(STAMP)
	$(PYTEST) tests/hosts tests/multihost/test_joining.py tests/faults/test_roll_call.py tests/faults/test_processes.py $(ARGS)
	$(PYTEST) tests/integration/test_train.py tests/faults/test_numbers.py -k two_processes $(ARGS)

test-slices: $(STAMP)
	$(PYTEST) --dist=load tests/slices $(ARGS)

test-gpu:
	CAPIBARA_TEST_PLATFORM=cuda $(GPU_PYTHON) -m pytest -q -s tests/gpu $(ARGS)

test-faults: $(STAMP)
	$(PYTEST) tests/faults $(ARGS)

test-dashboard: $(STAMP)
	$(BIN)/python tests/browser/dashboard_screens.py build/dashboard $(ARGS)

finetune: $(STAMP)
	$(BIN)/python benchmarks/finetune.py $(ARGS)

types: $(STAMP)
	$(BIN)/python -m mypy $(ARGS)

format: $(STAMP)
	$(BIN)/ruff format capibara benchmarks tests examples launch
	$(BIN)/ruff check --fix capibara benchmarks tests examples launch

bench: $(STAMP)
	@set -e; for script in $(filter-out benchmarks/finetune.py,$(wildcard benchmarks/*.py)); do echo "== $$script"; $(BIN)/python $$script $(ARGS); done

wheel: $(STAMP)
	$(BIN)/python -m hatchling build -t wheel

# Renews requirements.lock after a change in pyproject.toml; ARGS=--upgrade takes the newest versions of everything.
lock:
	uv pip compile --universal --python-version 3.11 --no-emit-index-url --no-annotate \
	  --custom-compile-command "make lock  (ARGS=--upgrade for the newest versions)" \
	  --extra seqio --extra dev $(ARGS) pyproject.toml -o requirements.lock

setup: $(STAMP)

# Modules are compiled when they are first imported: all of them at once would be a third of the time.
# A Debian python3 without python3-venv cannot put pip into an environment: then its own pip installs into it.
$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || { echo \
	  "error: $(PYTHON) is $(or $(VERSION),not found): the pinned packages need Python 3.11, 3.12 or 3.13," \
	  "try make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 2; }
	@echo "setting up $(VENV) with Python $(VERSION): about 2 GB, some minutes the first time"
	@set -e; \
	if $(PYTHON) -c 'import venv, ensurepip' 2>/dev/null; then \
	  $(PYTHON) -m venv --clear $(VENV); pip="$(BIN)/python -m pip"; \
	elif $(PYTHON) -c 'import venv, pip' 2>/dev/null; then \
	  $(PYTHON) -m venv --clear --without-pip $(VENV); pip="$(PYTHON) -m pip --python $(BIN)/python"; \
	else \
	  echo "error: $(PYTHON) has neither ensurepip nor pip: install python3-venv (Debian, Ubuntu) or pip" >&2; exit 2; \
	fi; \
	$$pip install --quiet --disable-pip-version-check --no-compile -r requirements.lock; \
	$$pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@
