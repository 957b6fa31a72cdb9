# `make` lists the targets. Each one that needs the environment makes it if it is missing.
.DEFAULT_GOAL := help
.PHONY: help env demo soak compare eval port parity bench-kernels test test-slow lint format constraints clean

BIN := .venv/bin
SHELL_SCRIPTS = $(wildcard scripts/*.sh) .ci/run

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env:  ## make the environment (11 GB, shared by clones, in the cache folder)
	@scripts/setup_env.sh

demo: env  ## stock and patched SGLang on real speech: one table (ARGS="--only ROW")
	@$(BIN)/pagealign demo $(ARGS)

soak: env  ## half an hour of mixed traffic on one patched server (ARGS="--minutes 3")
	@$(BIN)/pagealign soak $(ARGS)

compare: env  ## page-aligned, varlen gather and page size 1: a report (ARGS="--quick")
	@$(BIN)/pagealign compare $(ARGS)

eval: env  ## WER of the patched server, 1 and 4 at once (ARGS="--base-url URL" for yours)
	@$(BIN)/pagealign eval whisper $(or $(ARGS),--server aligned --page-size 64 --concurrency 1,4)

port: env  ## try the series on another release (ARGS="0.5.22")
	@$(BIN)/pagealign port $(ARGS)

parity: env  ## at page size 1 the series changes nothing: value by value (ARGS="--quick")
	@$(BIN)/pagealign parity $(ARGS)

bench-kernels:  ## attention kernels timed, in an environment of its own (ARGS="--quick")
	@scripts/setup_bench_env.sh
	@PYTHONPATH=. "$$(scripts/setup_bench_env.sh --print)/bin/python" -m pagealign.bench $(ARGS)

test: env  ## the tests (ARGS="unit -- -k NAME" for some of them)
	@scripts/run_tests.sh $(ARGS)

test-slow: env  ## the tests that `make test` leaves out
	@scripts/run_tests.sh --slow $(ARGS)

lint: env  ## ruff, shellcheck, and the headers and hunks of the diffs
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/shellcheck $(SHELL_SCRIPTS)
	@$(BIN)/python -m pagealign.series check

format: env  ## let ruff put the Python files right
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

constraints:  ## resolve the dependencies of pyproject.toml afresh into constraints.txt
	@scripts/setup_env.sh --constraints

clean:  ## remove what was made in this clone; the cache stays (see scripts/setup_env.sh --prune)
	@rm -rf .venv build reports .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
