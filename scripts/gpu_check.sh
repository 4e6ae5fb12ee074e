#!/usr/bin/env bash
# Check and measure the GPUs of this machine, the most important parts first: one GPU in eight minutes. Installs into
# .venv, and writes docs/results/gpu-NAME.md and runs/gpu_check. A part that fails is named, and the next one starts.
# `bash scripts/gpu_check.sh --help` lists the parts and their questions.
# With PYTHON=/path/to/python nothing is installed: that interpreter has torch and the rest. Packages that it lacks may be
# in a folder of wheels, WHEELS=DIR: they are unpacked for this check alone, without a network.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -z "${PYTHON:-}" ]; then
  . scripts/install.sh
  install requirements-dev.txt
  PYTHON=.venv/bin/python
fi
if [ -n "${WHEELS:-}" ]; then
  site=$(mktemp -d)
  "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$WHEELS"/*.whl
  export PYTHONPATH="$site:$PWD${PYTHONPATH:+:$PYTHONPATH}"
fi
exec "$PYTHON" -m benchmarks.gpu_check "$@"
