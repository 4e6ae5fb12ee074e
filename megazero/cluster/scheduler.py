"""The SLURM job that this process belongs to, and the script that started it."""

import contextlib
import datetime
import os
import re
import subprocess
from pathlib import Path

from megazero.checkpoint.folders import save_mark
from megazero.files import write_atomically
from megazero.world import BEGUN

ANSWER_SECONDS = 30  # slurmctld can be slow, and a run must not hang on it


def job_end() -> float | None:
    """Return the end of the job, in seconds since the epoch; None outside a job or without a time limit."""
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        return None
    try:
        done = subprocess.run(
            ["scontrol", "--oneliner", "show", "job", job], capture_output=True, text=True, timeout=ANSWER_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"\bEndTime=(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", done.stdout)
    limited = not re.search(r"\bTimeLimit=UNLIMITED\b", done.stdout)
    return datetime.datetime.fromisoformat(found[1]).timestamp() if found and limited else None


def job_id() -> str | None:
    """Return the id of the SLURM job of this process; None outside a job."""
    return os.environ.get("SLURM_JOB_ID")


def report_begin(save: str) -> None:
    """Report to pretrain.sbatch or the launcher that all ranks have begun, and note signals. Rank 0 calls it.

    The file has two lines: the folder of --save, and its mark; empty ones without --save. A container may hide the
    folder of the file: the script then knows the flags of the command line alone.
    """
    if path := os.environ.get(BEGUN):
        lines = f"{Path(save).absolute()}\n{save_mark(save)}\n" if save else "\n\n"
        with contextlib.suppress(OSError):
            write_atomically(path, lines.encode())
