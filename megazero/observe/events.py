"""events.jsonl in the log folder: every start of a run, with its command, options and environment, and every end.

Rank 0 alone writes it, and report.html. A failure to write is a warning, because it must not end the run.
"""

import contextlib
import functools
import json
import os
import platform
import re
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megazero.cluster import scheduler
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.model.stage import declare
from megazero.files import OutputFile, explain
from megazero.flags.cli import Command
from megazero.flags.config import Config
from megazero.log import log
from megazero.observe.progress_line import Record
from megazero.observe.report.live import RELOAD_SECONDS
from megazero.observe.report.lost_time import goodput_line
from megazero.observe.report.runs import EVENTS, read_events, read_run
from megazero.observe.start_clock import Lost, StartClock
from megazero.planner.parameter_counts import active_parameters, num_parameters
from megazero.units import things
from megazero.world import first_start

ROOT = Path(__file__).resolve().parents[2]
GIT_SECONDS = 2.0


class RunEvents:
    """Records the start and the end of a run in its log folder, and writes its report."""

    def __init__(
        self,
        command: Command | None,
        config: Config,
        mesh: Mesh,
        clock: StartClock | None = None,
        text: Record | None = None,
    ) -> None:
        """Prepare to write, on rank 0 of a run with --log-dir; elsewhere, do nothing.

        Args:
            command: the command line; None: there was none.
            config: resolved.
            clock: of this start; None: it begins here.
            text: facts of the corpus's text.
        """
        self.text = text or {}
        self.command, self.config, self.mesh, self.clock = command, config, mesh, clock or StartClock()
        self.folder = Path(config.log.log_dir) if config.log.log_dir and mesh.rank == 0 else None
        self.started: int | None = None  # after which iteration; None: there was nothing to do
        self.lost = Lost()

    @functools.cached_property
    def about(self) -> Record:
        """Facts of the run that are no options, and the names of the options that were given."""
        return {
            "given": sorted(name.replace("-", "_") for name in self.command.given) if self.command else [],
            "layout": asdict(self.mesh.layout),
            "parameters": num_parameters(declare(self.config.model)),
            "active_parameters": active_parameters(declare(self.config.model)),
            "environment": software(self.mesh),
            **self.text,
        }

    def start(self, iteration: int, lost: Lost, stage: int = 0) -> None:
        """Record a start after `iteration`, and the time since the last record of the run, if any.

        The first start deletes the events of an older run.

        Args:
            stage: that begins with this start; 0: none.
        """
        self.started, self.lost, first = iteration, lost, first_start(iteration)
        if self.folder is not None:
            event = {**_event("start", iteration), "command": sys.argv, "seconds": dict(self.clock.parts)}
            event |= {"lost_iterations": lost.iterations, "lost_seconds": lost.seconds}
            event["down_seconds"] = 0.0 if first else max(0.0, self.clock.began - (self._alive() or self.clock.began))
            event |= {"stage": stage} if stage else {}
            self._add(event | {"config": asdict(self.config)} | self.about, anew=first)

    def first_step(self, iteration: int) -> Record:
        """Return the parts of the start for the first record after it, and report them if it is a resume."""
        if self.started is None or iteration != self.started + 1:
            return {}
        self.clock.mark("first step")
        found: Record = {"start_seconds": self.clock.parts}
        if not first_start(self.started):
            parts = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in self.clock.parts.items())
            words = f"resumed in {sum(self.clock.parts.values()):.1f} s: {parts}"
            if self.lost.until:
                found["recovery_seconds"] = time.time() - self.lost.until
                words += f"; {found['recovery_seconds']:.1f} s after the last record"
            again = f"; {things(self.lost.iterations, 'iteration')} to compute again" if self.lost.iterations else ""
            log.info(words + again)
        return found

    def end(self, iteration: int, why: str, pauses: Record) -> None:
        """Record an end after `iteration`, and write report.html if there were iterations.

        Args:
            pauses: since the last record.
        """
        if self.folder is None or self.started is None:
            return
        self._add(_event("end", iteration) | {"why": why} | pauses)
        if iteration == self.started:
            return
        from megazero.observe.report.page import write_report  # imports jinja2

        try:
            if line := goodput_line(read_run(self.folder)):
                log.info(f"goodput   {line}")
            if self.config.log.report:
                log.info(f"report    {write_report(self.folder, RELOAD_SECONDS)}")
        except Exception as error:
            log.warning(f"no report.html: {type(error).__name__}: {error}")

    def fail(self, iteration: int, error: Exception) -> None:
        """Record an end by an error. Write no report, because other ranks may be waiting to hear of the error."""
        if self.started is not None:
            why = f"{type(error).__name__}: {error}"
            self._add(_event("end", iteration) | {"why": why})

    def _alive(self) -> float:
        """Return the Unix time of the last record or event of the run; 0 if there is none."""
        with contextlib.suppress(OSError):
            times: list[float] = [event.get("at", 0.0) for event in read_events(self.folder or Path())]
            return max([self.lost.until, *times])
        return self.lost.until

    def _add(self, event: Record, anew: bool = False) -> None:
        if self.folder is None:
            return
        try:
            with contextlib.closing(OutputFile(self.folder / EVENTS, at=0 if anew else None)) as file:
                file.write((json.dumps(event) + "\n").encode())
        except (OSError, ValueError) as error:
            reason = explain(error) if isinstance(error, OSError) else error
            log.warning(f"{self.folder / EVENTS} lacks an event: {reason}")


def _event(name: str, iteration: int) -> Record:
    now = time.time()
    written = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    return {"event": name, "time": written, "at": now, "iteration": iteration}


def software(mesh: Mesh) -> dict[str, Any]:
    """Return the hardware and software of a run, as far as rank 0 sees them."""
    on_gpu = mesh.device.type == "cuda"
    found = {
        "hosts": list(dict.fromkeys(mesh.world.hosts or (platform.node(),))),
        "device": torch.cuda.get_device_name(mesh.device) if on_gpu else f"{cpu_name()}, {os.cpu_count()} cores",
        "ranks": mesh.layout.world_size,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
        "commit": git_commit(),
        "slurm job": scheduler.job_id(),
    }
    return {name: value for name, value in found.items() if value is not None}


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    return found[1] if found else platform.machine()


def git_commit() -> str | None:
    """Return the git commit of this code; None if it is not a clone."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS).stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        return None
