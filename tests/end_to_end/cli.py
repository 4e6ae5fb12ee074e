"""Runs the real programs, as a user does."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.helpers.programs import ROOT, python_path, warm


def run(*command: object) -> subprocess.CompletedProcess[str]:
    """One thread a process: two cores are shared by all ranks."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)


def pretrain(*flags: object, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """pretrain_gpt.py with `flags`, in processes that have imported torch already, as srun would start them."""
    return warm("pretrain_gpt.py", *flags, ranks=ranks)


def pretrain_cold(*flags: object) -> subprocess.CompletedProcess[str]:
    """pretrain_gpt.py as a user starts it."""
    return run(sys.executable, "pretrain_gpt.py", *flags)


def metrics(log_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (log_dir / "metrics.jsonl").read_text().splitlines()]
