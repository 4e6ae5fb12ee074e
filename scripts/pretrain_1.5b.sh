#!/usr/bin/env bash
# Train the preset gpt2-1.5b on this machine, with one rank per GPU. Further flags, or others than these, come last:
#
#   bash scripts/pretrain_1.5b.sh --data-path PREFIX --tokenizer DIR --save runs/gpt2-1.5b --load runs/gpt2-1.5b
#
# It prints its command. With the same folder for --save and --load it resumes, or starts fresh if that is empty.
set -euo pipefail
set -- bash "$(dirname "${BASH_SOURCE[0]}")/launch.sh" --preset gpt2-1.5b --log-dir runs/gpt2-1.5b --save-interval 1000 --keep-last 3 "$@"
echo "command: $(printf '%q ' "$@")"
exec "$@"
