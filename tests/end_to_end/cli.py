"""Runs the real programs, as a user does."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent.parent
SECONDS = 240


def run(*command: object) -> subprocess.CompletedProcess[str]:
    """One thread a process: two cores are shared by all ranks."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=SECONDS)


def pretrain(*flags: object, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """pretrain_gpt.py with `flags`: alone, or under torchrun on a free port."""
    launcher = [sys.executable]
    if ranks > 1:
        torchrun = "-m torch.distributed.run --rdzv-backend c10d --rdzv-endpoint localhost:0 --nproc-per-node"
        launcher += [*torchrun.split(), str(ranks)]
    return run(*launcher, "pretrain_gpt.py", *flags)


def pretrain_here(*flags: object) -> str:
    """Run `pretrain` alone and in this process, which saves its start; return what it printed. A failure is raised."""
    import pretrain_gpt

    def fail(world: object, message: str, **_: object) -> NoReturn:  # the program's own would end this process
        raise AssertionError(message)

    said = io.StringIO()
    with contextlib.redirect_stdout(said), mock.patch.object(pretrain_gpt, "fail", fail):
        try:
            pretrain_gpt.main([str(flag) for flag in flags])
        except SystemExit as end:
            assert end.code in (0, None), end.code
    return said.getvalue()


def metrics(log_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (log_dir / "metrics.jsonl").read_text().splitlines()]
