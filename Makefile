# On a fresh machine with Python >= 3.10 and a C++ compiler, `make demo` and `make test` each
# build the environment they need (.venv) and do their whole job.

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= hf,ao,cli,audit,bench,serve,train,report,docs,dev
JOBS ?= $(shell $(PYTHON) -c "import os; print(min(8, os.cpu_count() or 1))")
GPU_JOBS ?= $(shell $(PYTHON) -c "import os; print(min(16, os.cpu_count() or 1))")
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# One thread a worker: several compiled kernels with a thread per core each only disturb one another.
PYTEST := OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 $(BIN)/python -m pytest

.PHONY: help env demo bench audit test exhaustive families matrix compat lint format unit wheel-test gpu-test docs clean

help:
	@echo "make demo        train, compile and audit a small patched Llama on real text"
	@echo "make bench       measure NSA against dense attention; ARGS='--preset headline'"
	@echo "make audit       nsa-flex audit of nsa_flex itself: graphs, breaks, recompilations, syncs"
	@echo "make families    check every decoder of transformers, write docs/guide/families.md anew"
	@echo "make matrix      compile changed kernels for six GPU architectures, without a GPU"
	@echo "make test        lint, type check and the tests, on CPU and GPU"
	@echo "make exhaustive  the CPU tests that make test leaves out: more sizes of the same"
	@echo "make compat      the tests in the oldest and newest torch, Triton, transformers and Python"
	@echo "make lint        ruff, mypy and the import contracts"
	@echo "make format      let ruff rewrite what it can"
	@echo "make unit        the CPU tests alone; ARGS='-k causal --seed 7' narrows them"
	@echo "make wheel-test  build sdist and wheel, compare them with the tree, import them"
	@echo "make gpu-test    the tests marked gpu; fails where there is no CUDA device"
	@echo "make docs        build the site of these pages into build/site; a broken link fails"
	@echo "make clean       remove the environment, builds and caches"

env: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10))" || \
	  { echo "nsa_flex needs Python >= 3.10; name one with make PYTHON=..." >&2; exit 1; }
	@command -v "$${CXX:-g++}" >/dev/null || \
	  { echo "torch.compile needs a C++ compiler: install g++, or set CXX" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  -c constraints.txt -e ".[$(EXTRAS)]"
	@touch $@

demo: $(STAMP)
	$(BIN)/nsa-flex demo $(ARGS)

bench: $(STAMP)
	$(BIN)/nsa-flex bench $(ARGS)

# Training is swept by tests/test_graph_break.py; 3 graphs: S = 1, the first length, all others.
audit: $(STAMP)
	$(BIN)/nsa-flex audit self --device cpu --lengths 100,7,1 --batch-sizes 2 --no-train \
	  --no-measure --max-graphs 3 $(ARGS)

families: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m nsa_flex.bench.tools.sweep_families

matrix: $(STAMP)
	OMP_NUM_THREADS=1 nice $(BIN)/python -W ignore -m nsa_flex.bench.tools.matrix \
	  --jobs $(JOBS) $(ARGS)

compat: $(STAMP)
	$(BIN)/python -m nsa_flex.bench.tools.compat $(ARGS)

test: lint audit unit
	@command -v chromium >/dev/null || echo "no Chromium: the tests in a browser were left out"
	@if $(BIN)/python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; \
	  then $(MAKE) gpu-test; else echo "no CUDA device: the tests marked gpu were left out"; fi

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

unit: $(STAMP)
	$(PYTEST) -m "not gpu" -n $(JOBS) --dist worksteal $(ARGS)

exhaustive: $(STAMP)
	$(PYTEST) -m "exhaustive and not gpu" -n $(JOBS) --dist worksteal $(ARGS)

wheel-test: $(STAMP)
	$(PYTEST) tests/test_packaging.py $(ARGS)

# Most of its time is compilation, so that many processes share the one GPU.
gpu-test: $(STAMP)
	$(PYTEST) -m gpu -n $(GPU_JOBS) --dist load --maxschedchunk 1 tests $(ARGS)

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) build dist nsa_flex.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
