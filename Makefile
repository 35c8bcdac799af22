# Every target installs what it needs in .venv; nothing outside this folder is touched.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test coverage check lint format bench soak reproduce reproduce-small clean

# The suite compiles many small programs: the cache keeps them for the next run, and loadscope keeps the tests of one
# module, which share them, in one process.
CACHE := JAX_COMPILATION_CACHE_DIR=$(abspath $(VENV))/jax-cache JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 \
         JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1
PYTEST := $(CACHE) $(BIN)/python -m pytest -q -n 2 --dist loadscope --durations=25

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

demo: $(STAMP)  ## stream digits through CCA: a progress bar, a table against the exact answer, a picture
	$(BIN)/eigenstream demo

test: $(STAMP)  ## the whole suite
	$(PYTEST)

coverage: $(STAMP)  ## the whole suite with coverage, 90% at least: half as long again
	$(PYTEST) --cov --cov-report=term

check: lint  ## lint, types, imports and the fast tests: before every commit
	$(PYTEST) -m "not slow"

lint: $(STAMP)  ## ruff, mypy and the import contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)  ## apply what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## time and memory, alone and against other libraries; results in docs/results/
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[bench]"
	$(BIN)/python benchmarks/cost.py
	$(BIN)/python benchmarks/exact_cca.py
	$(BIN)/python benchmarks/pca.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/streaming.py
	$(BIN)/python benchmarks/acceleration.py
	$(BIN)/python benchmarks/communication.py

soak: $(STAMP)  ## SIGKILL at twenty random times, resume, compare bits; results in docs/results/
	$(BIN)/python benchmarks/kills.py

reproduce: $(STAMP)  ## the paper's figures and tables; the large networks need a GPU, and pip install -e ".[cuda]" first
	$(BIN)/python -m experiments

reproduce-small: $(STAMP)  ## the same with one small network and a short training: half an hour on two cores
	$(BIN)/python -m experiments --small

clean:
	rm -rf $(VENV) .coverage .mypy_cache .pytest_cache .ruff_cache
