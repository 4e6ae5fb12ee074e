#!/usr/bin/env bash
# Train on this one machine, with one process (rank) per GPU. Usage: `bash scripts/launch.sh --help`.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
[ -n "${PYTHON:-}" ] || [ -x "$python" ] || python=python3
if ! "$python" -c '' >/dev/null; then
  echo "launch.sh: $python is no Python; run \`bash scripts/quickstart.sh\`, or set PYTHON to an interpreter" >&2
  exit 2
fi
# exec: the exit code is that of the launcher, and signals reach it, not this shell.
exec "$python" "$root/scripts/launch.py" "${PROGRAM:-$root/pretrain_gpt.py}" "$@"
