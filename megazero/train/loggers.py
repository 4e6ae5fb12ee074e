"""What a run tells: metrics.jsonl, a progress line, TensorBoard, Weights & Biases. Used by rank 0 alone.

The heavy libraries are imported only when asked for.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from megazero.config.cli import to_toml
from megazero.config.schema import Config
from megazero.files import replace_file

Record = dict[str, Any]  # one iteration, as in metrics.jsonl


class Writer(Protocol):
    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


def open_writers(config: Config, start_iteration: int) -> list[Writer]:
    """Everything that the flags ask for. `start_iteration`: of the checkpoint that the run goes on from, or 0."""
    log, writers = config.log, []
    if log.log_dir:
        folder = Path(log.log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / "config.toml", to_toml(config))
        writers.append(MetricsFile(folder / "metrics.jsonl", start_iteration))
    if log.tensorboard_dir:
        writers.append(TensorBoard(log.tensorboard_dir, start_iteration))
    if log.wandb_project:
        writers.append(WeightsAndBiases(config))
    writers.append(ProgressLine(config, start_iteration))
    return writers


class MetricsFile:
    """One JSON object a line and iteration. Lines after `start_iteration` are those of a run that is left, and are cut.

    A run that starts afresh over an older one's file keeps that as metrics.previous.jsonl.
    """

    def __init__(self, path: Path, start_iteration: int) -> None:
        if path.exists() and start_iteration == 0:
            os.replace(path, path.with_name("metrics.previous.jsonl"))
        elif path.exists():
            kept = [line for line in path.read_text().splitlines() if _iteration(line) <= start_iteration]
            replace_file(path, "".join(line + "\n" for line in kept))
        self.file = path.open("a", buffering=1)  # a line at a time: readers see whole ones

    def write(self, record: Record) -> None:
        self.file.write(json.dumps(finite(record)) + "\n")

    def close(self) -> None:
        self.file.close()


def _iteration(line: str) -> float:
    """Of a line of metrics.jsonl; infinite for one that was cut short by a crash."""
    try:
        return json.loads(line)["iteration"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return math.inf


def finite(record: Record) -> Record:
    """JSON has no NaN: what is not finite becomes null, and `nonfinite` says so."""
    bad = {key for key, value in record.items() if isinstance(value, float) and not math.isfinite(value)}
    if not bad:
        return record
    return {key: None if key in bad else value for key, value in record.items()} | {"nonfinite": True}


class TensorBoard:
    def __init__(self, folder: str, start_iteration: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(folder, purge_step=start_iteration + 1)

    def write(self, record: Record) -> None:
        for key, value in flatten(record).items():
            self.writer.add_scalar(key, value, record["iteration"])

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """Offline where there is no account; `wandb sync` uploads such a run later."""

    def __init__(self, config: Config) -> None:
        import wandb

        online = wandb.login(prompt=False)
        self.run = wandb.init(
            project=config.log.wandb_project,
            dir=config.log.log_dir,
            mode=None if online else "offline",
            settings=wandb.Settings(silent=True),
        )
        self.run.config.update({"config": to_toml(config)})

    def write(self, record: Record) -> None:
        self.run.log(flatten(record), step=record["iteration"])

    def close(self) -> None:
        self.run.finish()


def flatten(record: Record) -> dict[str, float]:
    """{"memory_bytes": {"peak": 1}} -> {"memory_bytes/peak": 1}; only numbers."""
    flat: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, dict):
            flat |= {f"{key}/{inner}": v for inner, v in value.items()}
        elif value is not None and key != "iteration":
            flat[key] = value
    return flat


class ProgressLine:
    """A line every --log-interval iterations; on a terminal a bar below them with the time left."""

    def __init__(self, config: Config, start_iteration: int) -> None:
        self.interval, self.last = config.log.log_interval, config.training.train_iters
        self.start, self.seconds, self.seen = start_iteration, 0.0, 0
        self.bar, self.show = self._open_bar() if sys.stdout.isatty() else (None, _print)

    def _open_bar(self) -> tuple[Any, Callable[[str], None]]:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = [BarColumn(None), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")]
        bar = Progress(*columns, transient=True)
        bar.start()
        self.task = bar.add_task("", total=self.last, completed=self.start)
        return bar, lambda text: bar.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def write(self, record: Record) -> None:
        self.seconds += record["step_seconds"]
        self.seen += 1
        i = record["iteration"]
        left = duration((self.last - i) * self.seconds / self.seen)
        if self.bar is not None:
            self.bar.update(self.task, completed=i, description=f"{left} left")
        if i % self.interval == 0 or i == self.last or "validation_loss" in record:
            self.show(line(record, self.last, left))

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()


def _print(text: str) -> None:
    print(text, flush=True)


def line(record: Record, last: int, left: str) -> str:
    """What a person reads of an iteration."""
    width = len(str(last))
    parts = [f"iteration {record['iteration']:>{width}}/{last}", f"loss {record['loss']:.4f}"]
    if "validation_loss" in record:
        parts.append(f"validation {record['validation_loss']:.4f}")
    parts += [f"norm {record['grad_norm']:.3f}", f"lr {record['lr']:.2e}"]
    parts += [f"{record['tokens_per_second']:,.0f} tokens/s", size(record["memory_bytes"]["peak"]), f"{left} left"]
    if record["loss_scale"] != 1:
        parts.append(f"scale {record['loss_scale']:g}")
    if record["skipped"]:
        parts.append("SKIPPED")
    return " | ".join(parts)


def duration(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{s:02}" if hours else f"{minutes}:{s:02}"


def size(num_bytes: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes / 1024:.3g} KiB"
