# These commands do everything on a fresh machine with Python >= 3.11 and make:
#   make demo    makes a model of a novel that comes with artel, lets it write, and draws a report; LANGUAGE=ru: a Russian one
#   make demo-rl  a small model learns sums from rewards; killed halfway, it ends as if it had not been
#   make test    lint, types, the import rule, checks of text, and the quick tests of one process: five minutes on two cores
# More tests:
#   make test-ci     what CI runs after `make test`: parity, resuming, launchers, kills, printed commands
#   make test-gpu    on one GPU: kernels beside references, every objective beside a CPU, precisions, stops, serving
#   make test-all    every test: also the slow ones, and those of Slurm, Ray and two hosts
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Tests and the demo never reach for a hub; the C locale would break Russian output on bare machines.
export HF_HUB_OFFLINE = 1
export PYTHONUTF8 = 1

.PHONY: setup demo demo-rl test test-ci test-gpu test-all lint bench docs recipes image constraints clean

# What was tested. `make test CONSTRAINTS=` takes the newest release of everything but torch, where no environment is yet;
# so does `make constraints`, which writes the file anew.
CONSTRAINTS := constraints.txt
TORCH := $(shell grep '^torch==' constraints.txt)
# Python compiles what it imports. If pip compiled every file, that would take two minutes more.
PIP = $(VENV)/bin/python -m pip --quiet --disable-pip-version-check install --no-compile $(addprefix --constraint ,$(CONSTRAINTS))

# The product, what it depends on and what its report needs: all of `make demo`. `make setup` adds the tools of developers.
$(VENV)/.product: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("artel needs Python 3.11 or newer: make PYTHON=python3.11") if sys.version_info < (3, 11) else 0'
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)" hatchling editables
	$(PIP) --no-build-isolation --editable ".[report]"
	touch $@

$(VENV)/.installed: $(VENV)/.product
	$(PIP) setuptools-scm  # seqeval is built here, and an environment of Python 3.12 has no setuptools
	$(PIP) --no-build-isolation --editable ".[dev]"
	$(PIP) --no-deps --target $(VENV)/torchao "torchao>=0.18"
	$(PIP) --no-deps --target $(VENV)/deepspeed "deepspeed>=0.19.8" hjson einops py-cpuinfo ninja msgpack
	touch $@

setup: $(VENV)/.installed

demo: $(VENV)/.product
	PATH="$(CURDIR)/$(BIN):$$PATH" bash scripts/demo.sh

demo-rl: $(VENV)/.product
	$(BIN)/python scripts/demo_rl.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	PYTHONPATH=tests $(BIN)/python scripts/check_text.py
	$(BIN)/python scripts/walk_a_batch.py --check

PYTEST = $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

# Where there is a GPU, tests compare a CPU's numbers all the same; those of a GPU are `make test-gpu`.
test test-ci test-all: export CUDA_VISIBLE_DEVICES =

test: lint
	$(PYTEST)

test-ci: setup
	$(PYTEST) -m "ci and not long"

test-gpu: setup
	$(PYTEST) -m gpu

test-all: lint
	$(PYTEST) -m ""

bench: setup  # make bench TEXT=novel.txt
	PATH="$(CURDIR)/$(BIN):$$PATH" bash benchmarks/run.sh

docs: setup  # docs/run-file.md, and the site in site/
	$(BIN)/python scripts/make_docs.py

recipes: setup  # those that two cores can run in ten minutes: benchmarks/recipes.md
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python benchmarks/recipes.py

BUILD_IMAGE := $(if $(shell command -v docker),docker build,$(if $(shell command -v buildah),buildah build --format docker))

image:  # artel:cpu and artel:gpu, for `artel launch`: make image TORCH_INDEX=… where torch without CUDA is
	$(if $(BUILD_IMAGE),,$(error make image needs docker or buildah))
	$(BUILD_IMAGE) --file docker/cpu.Dockerfile --build-arg TORCH_INDEX=$(TORCH_INDEX) --tag artel:cpu .
	$(BUILD_IMAGE) --file docker/gpu.Dockerfile --tag artel:gpu .

constraints:  # torch stays: choose its release by hand
	rm -rf $(VENV)-newest
	$(MAKE) setup VENV=$(VENV)-newest CONSTRAINTS=
	$(PYTHON) scripts/make_constraints.py $(VENV)-newest > constraints.new
	mv constraints.new constraints.txt
	rm -rf $(VENV)-newest

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache runs build site .cache
