"""The SLURM job that this process belongs to."""

import datetime
import os
import re
import subprocess

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
