"""Start the ranks of this machine, or with --elastic of several: scripts/launch.sh, and `megazero launch`."""

import contextlib
import io
import os
import re
import resource
import socket
import sys
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from megazero.called_as import in_own_words, is_installed_command, program_name

HELP = """\
Train on this machine, or on several with --elastic, with torchrun.

  bash scripts/launch.sh [--nproc N] FLAGS OF pretrain_gpt.py
  bash scripts/launch.sh --nproc 2 --num-layers 4 --hidden-size 256 ... --log-dir runs/first
  PROGRAM=scripts/generate.py bash scripts/launch.sh --nproc 2 --tensor-model-parallel-size 2 --load runs/first
  bash scripts/launch.sh -- --help        the flags of pretrain_gpt.py

  --nproc N     number of ranks; default: the number of GPUs, or 1 without a GPU
  --elastic MIN:MAX
                train on as many nodes as there are, from MIN to MAX, while they come and go (docs/cluster.md). Start
                this command on each of them; the program gets the flag too
  --rdzv-endpoint HOST:PORT
                with --elastic: where the nodes meet, the same for all. On HOST this command starts a small process for
                it, which outlives the command. Needed if MAX is more than 1
  --wait MINUTES
                with --elastic: how long to wait for MIN nodes; default: 30
  --help        this text
  --            all further words are for the program, also --nproc and the other names above

Rank 0 prints to the console. Each other rank's stdout and stderr are in LOG_DIR/ranks/START_TIME_.../attempt_0/RANK,
where LOG_DIR is the value of --log-dir, or else `runs`; rank 0's too, unless the console is a terminal. torchrun's own
messages are in LOG_DIR/ranks/torchrun.log. Relative paths start at the current folder.

The exit code is 0 if every rank succeeded. Otherwise it is that of the rank that failed first, whose message is
printed last. TERM and INT are passed on to the ranks, which have 30 s to end. With --elastic, TERM takes this node out
of the run: the ranks save after their step, and the other nodes continue.

Environment:
{interpreter}  OMP_NUM_THREADS   CPU threads of a rank; default: the number of cores / N
  ELASTIC_LOST_SECONDS
                --elastic: whole seconds without a sign of life of a node, after which it is lost; default: 8
  ELASTIC_SECRET    --elastic: a secret, which proves that a node belongs to the run, the same for all; default: the
                    content of elastic.key in --save, which the first node makes for this user alone
  TORCH_FR_DUMP_TEMP_FILE
                    GPUs: files of the last NCCL calls; default: nccl_trace_rank_ in --log-dir. megazero/environment.py
                    has the defaults of torch's other variables"""
INTERPRETER = """\
  PYTHON            interpreter; default: .venv/bin/python of this repository, or else python3
  PROGRAM           program to run; default: pretrain_gpt.py of this repository
"""
OWN_FLAGS = ("--nproc", "--elastic", "--rdzv-endpoint", "--wait")
OPEN_FILES = 65536  # a rank of a large job has many connections and files of data; the usual soft limit is 1,024


class Asked(NamedTuple):
    """The words of a command line.

    Attributes:
        own: values of OWN_FLAGS that are given.
        rest: words of the program.
    """

    own: dict[str, str]
    rest: list[str]


NO_TORCH = (
    f"{sys.executable} cannot import torch; run `bash scripts/quickstart.sh`, or set PYTHON to an interpreter that can"
)


def launch_ranks_here(words: list[str], program: list[str]) -> int:
    """Start the ranks, wait for them, and return the exit code.

    Args:
        program: torchrun's words for the program: a file, or -m, a module and its first words.
    """
    asked = read_words(words)
    if asked is None:
        print(in_own_words(HELP.format(interpreter="" if is_installed_command() else INTERPRETER)))
        return 0
    try:
        return _launch(asked, program)
    except ValueError as error:
        print(f"{program_name('scripts/launch.sh')}: {in_own_words(str(error))}", file=sys.stderr)
        return 2


def read_words(words: list[str]) -> Asked | None:
    """Divide a command line; None if it asks for help."""
    own, rest, left = dict[str, str](), list[str](), iter(words)
    for word in left:
        flag, equals, value = word.partition("=")
        if word in ("-h", "--help"):
            return None
        if word == "--":
            rest += left
        elif flag in OWN_FLAGS:
            own[flag] = value if equals else next(left, "")
            rest += ["--elastic", own[flag]] if flag == "--elastic" else []
        else:
            rest.append(word)
    return Asked(own, rest)


def _launch(asked: Asked, program: list[str]) -> int:
    own = asked.own
    if program[0] != "-m" and not Path(program[0]).is_file():
        raise ValueError(f"no program at {program[0]}; set PROGRAM to a file that exists, or unset it")
    nproc, elastic = own.get("--nproc", ""), own.get("--elastic", "")
    if "--nproc" not in own:
        nproc = str(_num_gpus() or 1)
    if not re.fullmatch("[1-9][0-9]*", nproc):
        raise ValueError(f"--nproc '{nproc}' is not a number of ranks; give one from 1, such as --nproc 2")
    wait = _elastic_wait(own) if elastic else ""
    if "--rdzv-endpoint" in own and not elastic:
        raise ValueError("--rdzv-endpoint needs --elastic MIN:MAX; add it")
    log_dir = _log_dir(asked.rest)
    set_environment(int(nproc), log_dir)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # torchrun copies lines of rank 0 to it, perhaps a pipe
    # If the console is a terminal, rank 0 writes to it directly, because of its progress bar; otherwise torchrun copies
    # its lines from its files, with a prefix: the role, which is empty.
    others = "".join(f",{rank}:3" for rank in range(1, int(nproc)))
    options = ["--redirects", f"0:0{others}"] if sys.stdout.isatty() else ["--redirects", "3", "--tee", "0:3"]
    if elastic:
        options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", own.get("--rdzv-endpoint") or "localhost:0"]
    try:
        from megazero.cluster.launch_ranks import launch_ranks
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ValueError(NO_TORCH) from None

    where = ["--nnodes", elastic or "1", "--nproc-per-node", nproc, "--role", "", *options]
    return launch_ranks(log_dir / "ranks", wait, [*where, *program, *asked.rest])


def _num_gpus() -> int:
    """Return the number of GPUs in CUDA_VISIBLE_DEVICES."""
    try:
        import torch
    except ImportError:
        raise ValueError(NO_TORCH) from None
    return torch.cuda.device_count()


def _elastic_wait(own: dict[str, str]) -> str:
    """Check the flags of --elastic, and return the minutes to wait for nodes."""
    elastic, wait = own["--elastic"], own.get("--wait", "30")
    found = re.fullmatch("([1-9][0-9]*):([1-9][0-9]*)", elastic)
    if found is None or int(found[1]) > int(found[2]):
        raise ValueError(
            f"--elastic '{elastic}' is no MIN:MAX; give the least and the largest number of nodes, such as "
            "--elastic 6:8"
        )
    if not own.get("--rdzv-endpoint") and int(found[2]) > 1:
        raise ValueError(
            f"--elastic {elastic} needs --rdzv-endpoint HOST:PORT, the same on all nodes: --rdzv-endpoint "
            f"{socket.gethostname()}:29400"
        )
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", wait):
        raise ValueError(f"--wait '{wait}' is no number of minutes; give one such as --wait 30")
    return wait


def _log_dir(words: list[str]) -> Path:
    """Return the last --log-dir of the program; `runs` if it is empty or missing, because ranks' logs are kept."""
    found = ""
    for word, following in pairwise([*words, ""]):
        flag, equals, value = word.partition("=")
        if flag.replace("_", "-") == "--log-dir":  # as the program reads it
            found = value if equals else following
    return Path(found or "runs")


def set_environment(nproc: int, log_dir: Path) -> None:
    """Set the variables and the limit of open files that ranks inherit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        files = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // nproc)))
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", f"{log_dir}/nccl_trace_rank_")
    os.environ.update(
        {
            "PYTHONUNBUFFERED": "1",  # show lines at once, also in a pipe
            "PYTHONFAULTHANDLER": "1",  # a crash prints a traceback
            "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "${role_name}",
        }
    )
