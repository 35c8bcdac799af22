# Every target sets up what it needs in .venv; nothing outside this folder is touched.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check format bench soak reproduce reproduce-small clean

# The suite is many short compilations: two processes share them, and the next run finds them in the cache.
CACHE := JAX_COMPILATION_CACHE_DIR=$(abspath $(VENV))/jax-cache JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 \
         JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1
PYTEST := $(CACHE) $(BIN)/python -m pytest -q -n 2

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

demo: $(STAMP)  ## stream digits through CCA: a progress bar, a table against the exact answer, a picture
	$(BIN)/eigenstream demo

test: $(STAMP)  ## the whole suite, with coverage
	$(PYTEST) --cov --cov-report=term

check: $(STAMP)  ## lint, types, imports, the fast tests: before every commit
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(PYTEST) -m "not slow"

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## cost as the work grows, and against peers; results under docs/results/
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[bench]"
	$(BIN)/python benchmarks/cost.py
	$(BIN)/python benchmarks/exact_cca.py
	$(BIN)/python benchmarks/pca.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/streaming.py
	$(BIN)/python benchmarks/acceleration.py
	$(BIN)/python benchmarks/communication.py

soak: $(STAMP)  ## SIGKILL at twenty random moments, resume, compare bits; the outcome under docs/results/
	$(BIN)/python benchmarks/kills.py

reproduce: $(STAMP)  ## the paper's figures and tables; the large networks want a GPU: pip install -e ".[cuda]" there first
	$(BIN)/python -m experiments

reproduce-small: $(STAMP)  ## the same with one small network, shortly trained: half an hour on two cores
	$(BIN)/python -m experiments --small

clean:
	rm -rf $(VENV) .coverage .mypy_cache .pytest_cache .ruff_cache
