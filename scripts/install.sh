#!/usr/bin/env bash
# Sourced by quickstart.sh and test.sh: makes .venv and installs a requirements file and megazero into it, once.
#   . scripts/install.sh; install requirements.txt
set -euo pipefail

install() {
  local requirements=$1 python stamp
  python=.venv/bin/python
  if ! "$python" -m pip --version >/dev/null 2>&1; then # none, or one whose making was interrupted
    local base
    for base in python3.11 python3 python; do
      if command -v "$base" >/dev/null && "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "making .venv with $(command -v "$base")"
        "$base" -m venv --clear .venv
        break
      fi
    done
    [ -x "$python" ] || { echo "megazero needs Python 3.11 or later, with venv; none was found on PATH" >&2; return 1; }
  fi
  # One stamp per file, with its contents and those of the files it includes: unchanged files are not installed again.
  stamp=.venv/installed-$(basename "$requirements")
  if ! cat requirements.txt "$requirements" | cmp -s - "$stamp" || [ ! -x .venv/bin/megazero ]; then
    echo "installing $requirements into .venv (once; a few minutes)"
    local quiet=--quiet
    [ ! -t 1 ] || quiet=--progress-bar=on
    "$python" -m pip install "$quiet" --disable-pip-version-check -r "$requirements"
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps -e . # the command `megazero`
    cat requirements.txt "$requirements" >"$stamp"
  fi
}
