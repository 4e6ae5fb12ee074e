#!/usr/bin/env bash
# Train on this one machine, with one process (rank) per GPU. Usage: `bash scripts/launch.sh --help`.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# Several words, such as `apptainer exec --nv IMAGE python`, are split at white space, unless they are one file's name.
python=("${PYTHON:-$root/.venv/bin/python}")
[ -x "${python[0]}" ] || read -rd '' -a python <<<"${PYTHON:-python3}" || true
if ! command -v "${python[0]}" >/dev/null; then
  echo "launch.sh: no command ${python[0]}; run \`bash scripts/quickstart.sh\`, or set PYTHON to an interpreter" >&2
  exit 2
fi
if ! "${python[@]}" -c '' >/dev/null; then
  echo "launch.sh: \`${python[*]}\` does not run Python; run \`bash scripts/quickstart.sh\` and unset PYTHON, or set it to an" \
    "interpreter" >&2
  exit 2
fi
# exec: the exit code is that of the launcher, and signals reach it, not this shell.
exec "${python[@]}" "$root/scripts/launch.py" "${PROGRAM:-$root/pretrain_gpt.py}" "$@"
