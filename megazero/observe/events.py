"""events.jsonl in the log folder: when, as what and where a run was started, and how it ended; and report.html.

Used by rank 0 alone. What cannot be written is said in a line: it is not worth the run.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from megazero.comm.launch import scheduler
from megazero.comm.mesh.mesh import Mesh
from megazero.config.cli import Command
from megazero.config.schema import Config
from megazero.log import log
from megazero.model.stage import declare
from megazero.observe.progress_line import Record
from megazero.observe.report.runs import EVENTS
from megazero.plan.layout.layers import num_parameters

ROOT = Path(__file__).resolve().parents[2]
GIT_SECONDS = 2.0


class RunEvents:
    """Records the start and the end of a run in its log folder, and writes its report."""

    def __init__(self, command: Command | None, config: Config, mesh: Mesh) -> None:
        """Do nothing without --log-dir, and on all ranks but 0.

        Args:
            command: the command line; None: what is not at its default was given.
            config: resolved.
        """
        self.command, self.config, self.mesh = command, config, mesh
        self.folder = Path(config.log.log_dir) if config.log.log_dir and mesh.rank == 0 else None
        self.started: int | None = None  # after which iteration; None: there was nothing to do

    @functools.cached_property
    def about(self) -> Record:
        """Facts of the run that belong beside its configuration."""
        given = changed(self.config)
        if self.command is not None:
            given = [name.replace("-", "_") for name in sorted(self.command.given)]
        size = {"parameters": num_parameters(declare(self.config.model))}
        return {"given": given, "layout": asdict(self.mesh.layout), **size, "environment": environment(self.mesh)}

    def start(self, iteration: int) -> None:
        """Record that the run goes on after `iteration`; at 0 the events of an older run are left."""
        self.started = iteration
        start = {"event": "start", "time": now(), "iteration": iteration, "command": sys.argv}
        self._add(lambda: start | {"config": asdict(self.config)} | self.about)

    def end(self, iteration: int, why: str) -> None:
        """Record an end after `iteration`, and write report.html if there is anything new to report."""
        self._end(iteration, why)
        if self.folder is None or self.started is None or iteration == self.started:
            return
        from megazero.observe.report.page import write_report

        try:
            log.info(f"report    {write_report(self.folder)}")
        except Exception as error:
            log.warning(f"no report.html: {type(error).__name__}: {error}")

    def fail(self, iteration: int, error: Exception) -> None:
        """Record an end by an error. No report: other ranks may be waiting to hear of it."""
        self._end(iteration, f"{type(error).__name__}: {error}")

    def _end(self, iteration: int, why: str) -> None:
        if self.started is not None:
            self._add(lambda: {"event": "end", "time": now(), "iteration": iteration, "why": why})

    def _add(self, event: Callable[[], Record]) -> None:
        if self.folder is None:
            return
        try:
            found = event()
            with (self.folder / EVENTS).open(
                "w" if found["event"] == "start" and not found["iteration"] else "a"
            ) as file:
                file.write(json.dumps(found) + "\n")
        except Exception as error:
            log.warning(f"{self.folder / EVENTS} lacks an event: {type(error).__name__}: {error}")


def now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())


def changed(config: Config) -> list[str]:
    """Return the options that are not at their defaults, by their names in `Config`."""
    found = []
    for group in fields(Config):
        ours, default = getattr(config, group.name), getattr(Config(), group.name)
        if not isinstance(ours, str):
            found += [o.name for o in fields(ours) if getattr(ours, o.name) != getattr(default, o.name)]
    return found


def environment(mesh: Mesh) -> dict[str, Any]:
    """Return where a run takes place, as far as rank 0 sees."""
    on_gpu = mesh.device.type == "cuda"
    device = torch.cuda.get_device_name(mesh.device) if on_gpu else f"{cpu_name()}, {os.cpu_count()} cores"
    found = {
        "hosts": list(dict.fromkeys(mesh.world.hosts or (platform.node(),))),
        "device": device,
        "ranks": mesh.layout.world_size,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
        "commit": commit(),
        "slurm job": scheduler.job_id(),
    }
    return {name: value for name, value in found.items() if value is not None}


def cpu_name() -> str:
    try:
        names = re.findall(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def commit() -> str | None:
    """Return the commit of this code, if it is a clone and git is there."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
