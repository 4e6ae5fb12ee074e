#!/usr/bin/env bash
# Train on this one machine, with one process (rank) per GPU. Usage: `bash scripts/launch.sh --help`.
set -euo pipefail

usage() {
  cat <<'HELP'
Train on this machine, or on several with --elastic, with torchrun.

  bash scripts/launch.sh [--nproc N] FLAGS OF pretrain_gpt.py
  bash scripts/launch.sh --nproc 2 --num-layers 4 --hidden-size 256 ... --log-dir runs/first
  bash scripts/launch.sh -- --help        the flags of pretrain_gpt.py

  --nproc N     number of ranks; default: the number of GPUs, or 1 without a GPU
  --elastic MIN:MAX
                train on as many nodes as there are, from MIN to MAX, while they come and go (docs/cluster.md). Start
                this command on each of them; pretrain_gpt.py gets the flag too
  --rdzv-endpoint HOST:PORT
                with --elastic: where the nodes meet, the same for all. On HOST this command starts a small process for
                it, which outlives the command. Needed if MAX is more than 1
  --wait MINUTES
                with --elastic: how long to wait for MIN nodes; default: 30
  --help        this text
  --            all further words are for pretrain_gpt.py, whatever their names

Rank 0 prints to the console. Each other rank's stdout and stderr are under LOG_DIR/ranks/START_TIME_.../attempt_0/RANK/,
where LOG_DIR is the value of --log-dir, or else `runs`; rank 0's too, unless the console is a terminal. torchrun's own
messages are in LOG_DIR/ranks/torchrun.log. Relative paths start at the current folder.

The exit code is 0 if every rank succeeded. Otherwise it is that of the rank that failed first, whose message is
printed last. TERM and INT are passed on to the ranks, which have 30 s to end. With --elastic, TERM takes this node out
of the run: the ranks save after their step, and the other nodes go on.

Environment:
  PYTHON            interpreter; default: .venv/bin/python of this repository, or else python3
  PROGRAM           program to run; default: pretrain_gpt.py of this repository
  OMP_NUM_THREADS   CPU threads of a rank; default: the number of cores / N
  ELASTIC_LOST_SECONDS
                --elastic: whole seconds without a sign of life of a node, after which it is lost; default: 8
  ELASTIC_SECRET    --elastic: what proves that a node belongs to the run, the same for all; default: the content of
                    elastic.key in --save, which the first node makes for this user alone
  TORCH_FR_DUMP_TEMP_FILE
                    GPUs: files of the last NCCL calls; default: nccl_trace_rank_ in --log-dir. megazero/environment.py
                    has the defaults of torch's other variables
HELP
}

fail() {
  echo "launch.sh: $1" >&2
  exit 2
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
[ -n "${PYTHON:-}" ] || [ -x "$python" ] || python=python3
program=${PROGRAM:-$root/pretrain_gpt.py}

nproc=
nproc_given=false
elastic=
endpoint=
wait=30
log_dir=runs
flags=()
while (($# > 0)); do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --nproc) nproc=${2-} nproc_given=true; shift ;;
    --nproc=*) nproc=${1#*=} nproc_given=true ;;
    --elastic) elastic=${2-}; flags+=("$1" "${2-}"); shift ;;
    --elastic=*) elastic=${1#*=}; flags+=("$1") ;;
    --rdzv-endpoint) endpoint=${2-}; shift ;;
    --rdzv-endpoint=*) endpoint=${1#*=} ;;
    --wait) wait=${2-}; shift ;;
    --wait=*) wait=${1#*=} ;;
    --) shift; flags+=("$@"); break ;;
    *) flags+=("$1") ;;
  esac
  shift || true # it fails if --nproc was the last word
done
previous=
for flag in ${flags[@]+"${flags[@]}"}; do
  case $flag in --log-dir=*) log_dir=${flag#*=} ;; esac
  [ "$previous" != --log-dir ] || log_dir=$flag
  previous=$flag
done
log_dir=${log_dir:-runs} # --log-dir "" writes no metrics; ranks' logs are kept all the same

[ -f "$program" ] || fail "no program at $program; set PROGRAM to a file that exists, or unset it"
if ! $nproc_given; then # torch counts the GPUs in CUDA_VISIBLE_DEVICES
  nproc=$("$python" -c 'import torch; print(max(1, torch.cuda.device_count()))') ||
    fail "$python cannot import torch; run \`bash scripts/quickstart.sh\`, or set PYTHON to an interpreter that can"
fi
[[ $nproc =~ ^[1-9][0-9]*$ ]] || fail "--nproc '$nproc' is not a number of ranks; give one from 1, such as --nproc 2"

nodes=1
if [ -n "$elastic" ]; then
  [[ $elastic =~ ^([1-9][0-9]*):([1-9][0-9]*)$ ]] && ((BASH_REMATCH[1] <= BASH_REMATCH[2])) ||
    fail "--elastic '$elastic' is no MIN:MAX; give the least and the largest number of nodes, such as --elastic 6:8"
  nodes=$elastic
  [ -n "$endpoint" ] || ((BASH_REMATCH[2] == 1)) ||
    fail "--elastic $elastic needs --rdzv-endpoint HOST:PORT, the same on all nodes: --rdzv-endpoint $(hostname):29400"
  [[ $wait =~ ^[0-9]+(\.[0-9]+)?$ ]] || fail "--wait '$wait' is no number of minutes; give one such as --wait 30"
else
  [ -z "$endpoint" ] || fail "--rdzv-endpoint needs --elastic MIN:MAX; add it"
  wait=
fi

# The soft limit of 1,024 open files is too low for large jobs: a rank has many connections and files of data.
files=$(ulimit -H -n)
[[ $files =~ ^[0-9]+$ ]] && ((files < 65536)) || files=65536
ulimit -S -n "$files" || true

cores=$(nproc)
threads=$((cores / nproc))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"
export PYTHONUNBUFFERED=1   # show lines at once, also in a pipe
export PYTHONFAULTHANDLER=1 # a crash prints a traceback

# After a time-out, NCCL's last calls are written to these files.
export TORCH_FR_DUMP_TEMP_FILE="${TORCH_FR_DUMP_TEMP_FILE:-$log_dir/nccl_trace_rank_}"

# exec: the exit code is that of the launcher, and signals reach it, not this shell. If the console is a terminal, rank 0
# writes to it directly, because of its progress bar; otherwise torchrun copies its lines from its files, with a prefix:
# the role, which is empty.
others=
for ((rank = 1; rank < nproc; rank++)); do others+=,$rank:3; done
options=(--redirects "0:0$others")
if [ ! -t 1 ]; then options=(--redirects 3 --tee 0:3); fi
export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='${role_name}'
if [ -n "$elastic" ]; then options+=(--rdzv-backend c10d --rdzv-endpoint "${endpoint:-localhost:0}"); fi
exec "$python" "$root/scripts/launch_ranks.py" "$log_dir/ranks" "$wait" --nnodes "$nodes" --nproc-per-node "$nproc" \
  --role "" "${options[@]}" "$program" ${flags[@]+"${flags[@]}"}
