#!/usr/bin/env bash
# Train the preset gpt2-345m on this machine, with one rank per GPU. Further flags, or others than these, come last:
#
#   bash scripts/pretrain_345m.sh --data-path PREFIX --tokenizer DIR --save runs/gpt2-345m --load runs/gpt2-345m
#
# It prints its command. With the same folder for --save and --load it resumes, or starts fresh if that is empty.
set -euo pipefail
set -- bash "$(dirname "${BASH_SOURCE[0]}")/launch.sh" --preset gpt2-345m --log-dir runs/gpt2-345m --save-interval 1000 --keep-last 3 "$@"
echo "command: $(printf '%q ' "$@")"
exec "$@"
