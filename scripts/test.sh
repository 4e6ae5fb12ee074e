#!/usr/bin/env bash
# The tests, from nothing but Python 3.11: installs into .venv, then runs pytest. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/install.sh
install requirements-dev.txt
exec .venv/bin/python -m pytest "$@"
