#!/usr/bin/env bash
# Check and measure the GPUs of this machine: ten minutes, the most telling parts first. Installs into .venv, and writes
# docs/results/gpu-NAME.md. A part that fails is named, and the next one begins. `bash scripts/gpu_check.sh --help`.
# With PYTHON=/path/to/python nothing is installed: that interpreter has torch and the rest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -z "${PYTHON:-}" ]; then
  . scripts/install.sh
  install requirements-dev.txt
  PYTHON=.venv/bin/python
fi
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True,pinned_max_round_threshold_mb:64,pinned_max_cached_size_mb:64}"
exec "$PYTHON" -m benchmarks.gpu_check "$@"
