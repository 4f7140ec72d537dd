# One set of commands for people and for CI. `make demo` and `make test` need Python 3.11+ with pip, nothing else.
#
#   make demo    create .venv, install, compile SmolLM2-135M for chat traffic on this machine
#   make test    create .venv, install, run the tests; those of the vLLM engine in a venv of its own (about 3 GB; VLLM=0 leaves them out)
#   make lint    ruff and mypy (strict)
#   make bench   the figures; each prints one JSON line last
#
# PYTHON=python3.12 picks the interpreter; TORCH_INDEX=URL picks the index that torch comes from (a CPU-only one saves gigabytes).

PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3 python; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH_INDEX ?=
VLLM ?= 1
PIP := $(BIN)/python -m pip --disable-pip-version-check
PYTEST_ARGS ?=

.PHONY: demo test test-fast lint vllm bench bench-decode bench-baselines bench-fast-tier bench-costmodel bench-experiments bench-reload bench-aa bench-leaks bench-search format install clean

install: $(STAMP)

$(STAMP): pyproject.toml scripts/install.sh
	@PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" sh scripts/install.sh $(VENV)
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/hotpass compile --model smollm2-135m --traffic chat --budget 6m40s

# Where it cannot be installed, make says so, and the tests that need it are skipped.
vllm: $(STAMP)
	@[ "$(VLLM)" = 0 ] || PYTHON="$(BIN)/python" TORCH_INDEX="$(TORCH_INDEX)" sh scripts/install-vllm.sh || \
		echo "make: no vLLM here, so its tests are skipped" >&2

# Two processes: engines, and the rest (tests/conftest.py).
test: $(STAMP) vllm
	$(BIN)/python -m pytest tests -n 2 $(PYTEST_ARGS)

test-fast: $(STAMP)
	$(BIN)/python -m pytest tests -m "not ray and not slow" $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: bench-decode bench-fast-tier

bench-decode: $(STAMP)
	$(BIN)/python -m benchmarks.bench_decode

bench-baselines: $(STAMP)
	$(BIN)/python -m benchmarks.bench_baselines

bench-fast-tier: $(STAMP)
	$(BIN)/python -m benchmarks.bench_fast_tier

bench-costmodel: $(STAMP)
	$(BIN)/python -m benchmarks.bench_costmodel

# Arm a needs vLLM in a venv of its own (scripts/install-vllm.sh); without it that arm is left out, and said so.
bench-experiments: $(STAMP)
	$(BIN)/python -m benchmarks.bench_experiments

bench-reload: $(STAMP)
	$(BIN)/python -m benchmarks.bench_reload

bench-aa: $(STAMP)
	$(BIN)/python -m benchmarks.bench_aa

bench-leaks: $(STAMP)
	$(BIN)/python -m benchmarks.bench_leaks

bench-search: $(STAMP)
	$(BIN)/python -m benchmarks.bench_search

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
