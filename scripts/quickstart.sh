#!/usr/bin/env bash
# Pretrain a small GPT on Shakespeare, from nothing but Python 3.11: installs into .venv, gets the text, trains a
# tokenizer and a model with two processes, stops half way, resumes, draws the loss curve and generates text.
# A few minutes on two CPU cores after the installation. If it was interrupted, run it again: it continues.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,4s/^# //p' "$0"; exit 0 ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/install.sh
install requirements.txt
exec .venv/bin/python scripts/quickstart.py
