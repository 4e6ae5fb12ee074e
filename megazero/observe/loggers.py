"""Loggers: metrics.jsonl, TensorBoard, Weights & Biases, and the progress line. Used by rank 0 alone.

The heavy libraries are imported only when asked for.
"""

from __future__ import annotations

import json
import math
import os
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from megazero.config.cli import Command
from megazero.config.flags import to_toml
from megazero.config.schema import Config
from megazero.files import OutputFile, explain, read_regular, replace_file
from megazero.log import log
from megazero.observe.progress_line import InUse, ProgressLine, Record


class Writer(Protocol):
    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


def open_writers(
    config: Config,
    start_iteration: int,
    in_use: InUse = lambda: None,
    command: Command | None = None,
    about: Record | None = None,
) -> list[Writer]:
    """Everything that the flags ask for.

    config.toml holds what the command line gave; a run with nothing to do leaves it as it is.

    Args:
        start_iteration: of the checkpoint that the run goes on from, or 0.
        in_use: see `ProgressLine`.
        command: the command line; None: all of `config` was given.
        about: see `WeightsAndBiases`.

    Raises:
        ValueError: a folder or file cannot be made; nothing has been trained yet.
    """
    logs, writers = config.log, []
    if logs.log_dir:
        folder = Path(logs.log_dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            evaluates = config.evaluation.eval_only  # perhaps a run in whose folder its own files are
            options = folder / ("evaluation.toml" if evaluates else "config.toml")
            if evaluates or start_iteration < config.training.train_iters or not options.exists():
                replace_file(options, command.to_toml(config) if command is not None else to_toml(config))
            writers.append(MetricsFile(folder / "metrics.jsonl", None if evaluates else start_iteration))
        except OSError as error:
            raise ValueError(f"--log-dir {logs.log_dir}: {explain(error)}") from None
        except ValueError as error:
            raise ValueError(f"--log-dir {logs.log_dir}: {error}; remove it, or name another folder") from None
    if logs.tensorboard_dir:
        try:
            writers.append(TensorBoard(logs.tensorboard_dir, start_iteration))
        except OSError as error:
            raise ValueError(f"--tensorboard-dir {logs.tensorboard_dir}: {explain(error)}") from None
    if logs.wandb_project:
        writers.append(WeightsAndBiases(config, start_iteration, about or {}))
    if not config.evaluation.eval_only:
        writers.append(ProgressLine(config, start_iteration, in_use))
    return writers


class Writers:
    """All of a run's writers. One that fails is said and left out from then on: what it tells is not worth the run."""

    def __init__(self, writers: list[Writer]) -> None:
        self.writers = writers

    def write(self, record: Record) -> None:
        for writer in list(self.writers):
            try:
                writer.write(record)
            except Exception as error:
                self.writers.remove(writer)
                log.warning(
                    f"{type(writer).__name__} failed, and is left out from here on: {type(error).__name__}: {error}"
                )

    def close(self) -> None:
        for writer in self.writers:
            try:
                writer.close()
            except Exception as error:
                log.warning(f"{type(writer).__name__} failed at its end: {type(error).__name__}: {error}")


MAX_PENDING_LINES = 100_000  # of about a kilobyte


class MetricsFile:
    """One JSON object per iteration and line. Lines after `start_iteration` are of a run that is left, and are cut.

    A run that starts fresh over an older one's file keeps that as metrics.previous.jsonl; an evaluation (None) adds to
    what is there. What cannot be written, on a full disk say, is kept and tried again with every later line: the run
    goes on, and the file becomes whole again.
    """

    def __init__(self, path: Path, start_iteration: int | None) -> None:
        """OSError or ValueError if it is not a file that can be written."""
        adds = start_iteration is None
        if path.exists() and start_iteration == 0:
            os.replace(path, path.with_name("metrics.previous.jsonl"))
        elif path.exists():
            lines = read_regular(path).decode(errors="replace").splitlines()
            kept = [line + "\n" for line in lines if adds or _iteration(line) <= start_iteration]
            replace_file(path, "".join(kept))
        self.path, self.pending = path, list[bytes]()
        self.file = OutputFile(path, at=path.stat().st_size if path.exists() else 0)

    def write(self, record: Record) -> None:
        """Append a line at once: readers see whole ones."""
        self.pending.append((json.dumps(finite(record)) + "\n").encode())
        try:
            self.file.write(b"".join(self.pending))  # over what an attempt that failed may have left
        except OSError as error:
            if len(self.pending) == 1 or len(self.pending) % 100 == 0:
                log.warning(f"{explain(error)}. Training goes on; {len(self.pending)} lines of metrics wait for room")
            del self.pending[:-MAX_PENDING_LINES]
        else:
            self.pending.clear()

    def close(self) -> None:
        if self.pending:
            log.warning(f"{self.path} lacks the last {len(self.pending)} iterations, which could not be written")
        self.file.close()


def _iteration(line: str) -> float:
    """Return the iteration of a line of metrics.jsonl; infinity for a line that a crash cut short."""
    try:
        return json.loads(line)["iteration"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return math.inf


def finite(record: Record) -> Record:
    """JSON has no NaN: what is not finite becomes null, and `nonfinite` says so."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(inner) for key, inner in value.items()}
        return None if isinstance(value, float) and not math.isfinite(value) else value

    cleaned = clean(record)
    return record if cleaned == record else cleaned | {"nonfinite": True}


class TensorBoard:
    def __init__(self, folder: str, start_iteration: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(folder, purge_step=start_iteration + 1)

    def write(self, record: Record) -> None:
        for key, value in flatten(record).items():
            self.writer.add_scalar(key, value, record["iteration"])
        for number, sample in enumerate(record.get("samples", [])):
            text = f"**{sample['prompt']}**{sample['text']}"
            self.writer.add_text(f"samples/{number}", text, record["iteration"])

    def close(self) -> None:
        self.writer.close()


RUN_ID = "wandb-run-id"  # a file in the log folder: a resume goes on in the same Weights & Biases run


def new_id() -> str:
    return uuid.uuid4().hex[:12]


def run_id(folder: Path, start_iteration: int) -> str:
    """Return the Weights & Biases id of the run in a log folder: a new one for a fresh start, which is kept there."""
    path = folder / RUN_ID
    if start_iteration > 0 and path.is_file():
        return path.read_text().strip()
    replace_file(path, (made := new_id()) + "\n")
    return made


class WeightsAndBiases:
    """Offline where there is no account; `wandb sync` uploads such a run later, `wandb sync --append` its resumes."""

    def __init__(self, config: Config, start_iteration: int, about: Record) -> None:
        """Open a run, or the run that the log folder belongs to, where the training goes on.

        Args:
            about: further groups of the run's configuration there.
        """
        import wandb

        logs, evaluates = config.log, config.evaluation.eval_only
        self.run = wandb.init(
            project=logs.wandb_project,
            name=logs.wandb_name or Path(logs.log_dir).resolve().name,
            id=new_id() if evaluates else run_id(Path(logs.log_dir), start_iteration),
            resume="allow",
            job_type="evaluation" if evaluates else "training",
            dir=logs.log_dir,
            mode=None if wandb.login(prompt=False) else "offline",
            settings=wandb.Settings(silent=True),
        )
        self.run.config.update(asdict(config) | about, allow_val_change=True)
        # Steps of Weights & Biases only grow; iterations after the checkpoint that a run goes on from come again.
        self.run.define_metric("iteration")
        self.run.define_metric("*", step_metric="iteration")

    def write(self, record: Record) -> None:
        logged: Record = flatten(record) | {"iteration": record["iteration"]}
        if record.get("samples"):
            import wandb

            rows = [[record["iteration"], sample["prompt"], sample["text"]] for sample in record["samples"]]
            logged["samples"] = wandb.Table(columns=["iteration", "prompt", "text"], data=rows)
        self.run.log(logged)

    def close(self) -> None:
        self.run.finish()


def flatten(record: Record) -> dict[str, float]:
    """{"memory_bytes": {"peak": 1}} -> {"memory_bytes/peak": 1}; only numbers."""
    flat: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, dict):
            flat |= {f"{key}/{inner}": v for inner, v in value.items() if v is not None}
        elif isinstance(value, (int, float)) and key != "iteration":
            flat[key] = value
    return flat
