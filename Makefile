# The developer's commands. `bash scripts/test.sh` once makes .venv with all that they need.
BIN := .venv/bin

.PHONY: help check format test test-second test-all test-gpu test-floors test-oldest test-pythons chaos fuzz mutate bench paper test-machines same-bits site

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

check:  ## format, lint, imports, types, and the unit tests of the files that changed: half a minute on two cores
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/python -m tests.changed

format:  ## rewrite all files in the house's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test:  ## the default suite
	bash scripts/test.sh

test-second:  ## the second ring: tests of rarer regressions, which CI runs after the default suite
	bash scripts/test.sh -m "second and not slow and not gpu"

test-all:  ## the default suite, the second ring and slow tests
	bash scripts/test.sh -m "not gpu"

test-machines:  ## the default suite on seven imitated CPUs, with two and four threads, and under jitter: an hour
	$(BIN)/python -m tests.machines

test-floors:  ## tests of data, flags and interop with the oldest Python and packages that pyproject.toml allows
	$(BIN)/python -m tests.environments floors tests/unit/data tests/unit/flags tests/unit/interop

test-gpu:  ## what needs a GPU
	bash scripts/test.sh -m gpu

test-oldest:  ## the default suite with the oldest torch that pyproject.toml allows, on Python 3.12: 5 GB of packages
	$(BIN)/python -m tests.environments oldest

test-pythons:  ## the default suite on Python 3.12 and 3.13
	$(BIN)/python -m tests.environments 3.12
	$(BIN)/python -m tests.environments 3.13

chaos:  ## 100 kills, 20 full disks and 1,000 damages at random, then 200 chains of resumes: half an hour
	$(BIN)/python -m tests.chaos
	$(BIN)/python -m tests.chains

fuzz:  ## megazero verify on random models and layouts, each resumed in another layout: an hour
	$(BIN)/python -m tests.fuzz

mutate:  ## plant the faults of tests/mutations.toml, then single-token faults in the step's modules: a night
	$(BIN)/python -m tests.mutate
	$(BIN)/python -m pip install -q mutmut==3.8.1
	$(BIN)/mutmut run
	$(BIN)/mutmut results

same-bits:  ## are losses, bytes and checkpoints of 28 layouts bit for bit those of main? Two minutes
	$(BIN)/python -m tests.same_bits --before main

bench:  ## speed of one process against transformers, of two against DDP and FSDP2
	$(BIN)/python benchmarks/single_process.py
	$(BIN)/python benchmarks/zero.py

site:  ## the pages with search, into site/; a dead link fails. To look: `.venv/bin/mkdocs serve`
	$(BIN)/mkdocs build --strict

paper:  ## the tables and pictures of docs/results: a hundred rehearsals, half an hour
	$(BIN)/python -m benchmarks.reports.paper
	$(BIN)/python benchmarks/paper_speed.py > docs/results/paper_speed.md
	$(BIN)/python -m benchmarks.reports.scale
