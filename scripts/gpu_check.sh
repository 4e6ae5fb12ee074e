#!/usr/bin/env bash
# Check and measure the GPUs of this machine: half an hour, the most important parts first. Installs into .venv, and writes
# docs/results/gpu-NAME.md. A part that fails is named, and the next one starts. `bash scripts/gpu_check.sh --help` lists
# the parts and their questions.
# With PYTHON=/path/to/python nothing is installed: that interpreter has torch and the rest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -z "${PYTHON:-}" ]; then
  . scripts/install.sh
  install requirements-dev.txt
  PYTHON=.venv/bin/python
fi
exec "$PYTHON" -m benchmarks.gpu_check "$@"
