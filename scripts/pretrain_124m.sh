#!/usr/bin/env bash
# Train the preset gpt2-124m on this machine, with one rank per GPU. Further flags, or others than these, come last:
#
#   bash scripts/pretrain_124m.sh --data-path PREFIX --tokenizer DIR --save runs/gpt2-124m --load runs/gpt2-124m
#
# It prints its command. With the same folder for --save and --load it resumes, or starts fresh if that is empty.
set -euo pipefail
set -- bash "$(dirname "${BASH_SOURCE[0]}")/launch.sh" --preset gpt2-124m --log-dir runs/gpt2-124m --save-interval 1000 --keep-last 3 "$@"
echo "command: $(printf '%q ' "$@")"
exec "$@"
