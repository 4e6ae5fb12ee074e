#!/usr/bin/env bash
# Train the preset tiny on this machine, with one rank per GPU. Further flags, or others than these, come last:
#
#   bash scripts/pretrain_tiny.sh --data-path PREFIX --tokenizer DIR --save runs/tiny --load runs/tiny
#
# It prints its command. With the same folder for --save and --load it resumes, or starts fresh if that is empty.
set -euo pipefail
set -- bash "$(dirname "${BASH_SOURCE[0]}")/launch.sh" --preset tiny --log-dir runs/tiny --save-interval 1000 --keep-last 3 "$@"
echo "command: $(printf '%q ' "$@")"
exec "$@"
