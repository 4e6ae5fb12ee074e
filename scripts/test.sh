#!/usr/bin/env bash
# The tests, from nothing but Python 3.11: installs into .venv, then runs pytest, a worker per core (at most four).
# Arguments go to pytest: `-n 0` runs in one process, `-m slow` runs the slow tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/install.sh
install requirements-dev.txt
unset PYTHONDONTWRITEBYTECODE # else each process compiles all modules: 30 CPU seconds and more
workers=$(nproc)
exec .venv/bin/python -m pytest -n "$((workers < 4 ? workers : 4))" --dist worksteal "$@"
