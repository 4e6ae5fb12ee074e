"""Loggers: metrics.jsonl, report.html, TensorBoard, Weights & Biases, the progress line. Rank 0 alone uses them."""

import json
import math
import os
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, cast

from megazero.families import FAMILIES
from megazero.files import OutputFile, explain, read_regular, refuse_special, replace_file
from megazero.flags.cli import Command
from megazero.flags.config import Config, LogConfig
from megazero.flags.flag_names import flags, to_toml, value_of
from megazero.log import log
from megazero.observe.progress_line import InUse, ProgressLine, Record
from megazero.observe.report.live import LiveReport
from megazero.observe.report.records import Metrics, checked, parse_record
from megazero.observe.start_clock import Lost
from megazero.optional import require_optional
from megazero.world import first_start


def require_packages(options: LogConfig) -> None:
    """Raise ValueError if a logger's package is missing, before a run opens data."""
    if options.tensorboard_dir:
        require_optional("tensorboard", f"--tensorboard-dir {options.tensorboard_dir}")
    if options.wandb_project:
        require_optional("wandb", f"--wandb-project {options.wandb_project}")


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
    """Open the writers that the flags ask for, and write config.toml.

    Args:
        start_iteration: the iteration of the loaded checkpoint, or 0.
        in_use: see `ProgressLine`.
        command: the command line, whose flags go into config.toml; None: all of `config`.
        about: see `WeightsAndBiases`.

    Raises:
        ValueError: a folder or file cannot be made.
    """
    options, writers = config.log, list[Writer]()
    evaluates = config.evaluation.eval_only
    if options.log_dir:
        folder = Path(options.log_dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Not over the options of another run: an evaluation may use its folder, and a finished run trains no more.
            toml = folder / ("evaluation.toml" if evaluates else "config.toml")
            if evaluates or start_iteration < config.training.train_iters or not toml.exists():
                replace_file(toml, to_toml(config) if command is None else command.to_toml(config))
            writers.append(MetricsFile(folder / "metrics.jsonl", None if evaluates else start_iteration))
            if options.report and not evaluates:
                writers.append(LiveReport(folder))
        except (OSError, ValueError) as error:
            reason = explain(error) if isinstance(error, OSError) else f"{error}; remove it, or name another folder"
            raise ValueError(f"--log-dir {folder}: {reason}") from None
    if options.tensorboard_dir:
        try:
            writers.append(TensorBoard(options.tensorboard_dir, start_iteration, config))
        except OSError as error:
            raise ValueError(f"--tensorboard-dir {options.tensorboard_dir}: {explain(error)}") from None
    if options.wandb_project:
        writers.append(WeightsAndBiases(config, start_iteration, about or {}))
    if not evaluates:
        writers.append(ProgressLine(config, start_iteration, in_use))
    return writers


class Writers:
    """All of a run's writers. One that raises is dropped with a warning, because logging must not end a run.

    Attributes:
        lost: the iterations that this run computes again.
    """

    def __init__(self, writers: list[Writer]) -> None:
        self.writers = writers
        self.lost = next((writer.lost for writer in writers if isinstance(writer, MetricsFile)), Lost())

    def write(self, record: Record) -> None:
        for writer in list(self.writers):
            try:
                writer.write(record)
            except Exception as error:
                self.writers.remove(writer)
                log.warning(
                    f"{type(writer).__name__} failed, and is not used any more: {type(error).__name__}: {error}"
                )

    def close(self) -> None:
        for writer in self.writers:
            try:
                writer.close()
            except Exception as error:
                log.warning(f"{type(writer).__name__} failed at its end: {type(error).__name__}: {error}")


class MetricsFile:
    """A file with one JSON object per iteration and line.

    Lines that cannot be written, because the disk is full, are kept and written with the next one.

    Attributes:
        lost: the lines that a resume has cut.
    """

    lost = Lost()

    def __init__(self, path: Path, start_iteration: int | None) -> None:
        """Open the file; OSError or ValueError if it is not a file that can be written.

        Args:
            start_iteration: later lines are cut, because the run computes them again. Its first start renames an older
                run's file to metrics.previous.jsonl. None, an evaluation, keeps all lines.
        """
        refuse_special(path)
        if path.exists() and start_iteration is not None and first_start(start_iteration):
            os.replace(path, path.with_name("metrics.previous.jsonl"))
        elif path.exists():
            lines = read_regular(path).decode(errors="replace").splitlines()
            kept, self.lost = _divide(lines, math.inf if start_iteration is None else start_iteration)
            replace_file(path, "".join(line + "\n" for line in kept))
        self.path, self.pending, self.is_replaced = path, list[bytes](), False
        self.file = OutputFile(path, at=path.stat().st_size if path.exists() else 0)

    def write(self, record: Record) -> None:
        """Append a line. Readers see it at once, and whole."""
        self.pending.append((json.dumps(finite(record)) + "\n").encode())
        try:
            if not (self.is_replaced or self.file.is_in_place):
                self._replace(record)
            self.file.write(b"".join(self.pending))  # overwrites the part that a failed attempt wrote
        except OSError as error:
            if len(self.pending) == 1 or len(self.pending) % 100 == 0:
                log.warning(f"{explain(error)}. Training continues; {len(self.pending)} lines of metrics wait for room")
        else:
            self.pending.clear()

    def _replace(self, record: Record) -> None:
        """Make the file again where its folder was moved or deleted, but leave one that another run has made."""
        log.warning(f"{self.path} was moved, deleted or replaced before iteration {record['iteration']} was logged")
        self.is_replaced = self.path.exists()
        if not self.is_replaced:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file, self.file = self.file, OutputFile(self.path)
            file.close()

    def close(self) -> None:
        if self.pending:
            log.warning(f"{self.path} lacks the last {len(self.pending)} iterations, which could not be written")
        self.file.close()


def _divide(lines: list[str], last: float) -> tuple[list[str], Lost]:
    """Return the lines of iterations up to `last`, and the others' number and seconds. Torn lines are neither.

    Lines are read from the end, because iterations of training ascend. Evaluations (--eval-only) may be among them.
    """
    tail: list[tuple[str, Record]] = []
    until = 0.0
    while lines:
        record = checked(parse_record(lines[-1]), Metrics, [])
        until = max(until, record.get("at", 0.0))
        if "step_seconds" in record and record["iteration"] <= last:
            break
        tail.append((lines.pop(), record))
    kept = [line for line, record in reversed(tail) if record.get("iteration", math.inf) <= last]
    lost = [record for _, record in tail if "step_seconds" in record]
    seconds = sum((record["step_seconds"] or 0.0) + sum(record.get("pause_seconds", {}).values()) for record in lost)
    return lines + kept, Lost(len(lost), seconds, until)


def finite(record: Record) -> Record:
    """Replace numbers that are not finite by null, because JSON has none, and set `nonfinite` then."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [clean(inner) for inner in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    cleaned = clean(record)
    return record if cleaned == record else cleaned | {"nonfinite": True}


class TensorBoard:
    """Scalars, samples as texts, and the options: all as a text, those that are not the default as hyperparameters."""

    def __init__(self, folder: str, start_iteration: int, config: Config) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        self.writer = SummaryWriter(folder, purge_step=start_iteration + 1)
        toml = "".join(f"    {line}\n" for line in to_toml(config).splitlines())  # indented: code, in Markdown
        self.writer.add_text("options", toml, start_iteration)
        known = {name: flag.default for name, flag in flags().items()}
        known |= FAMILIES[config.model.architecture].trait_flags
        given = {name: value for name in known if (value := value_of(config, name)) != known[name]}
        values = {name: " ".join(map(str, x)) if isinstance(x, tuple) else x for name, x in given.items()}
        # not by `add_hparams`, which opens a second file: TensorBoard follows the newest file alone
        experiment, start, self.end = hparams(values, dict.fromkeys(("loss", "validation_loss"), 0.0))
        self.file = cast(Any, self.writer.file_writer)  # None by its types
        for summary in (experiment, start):
            self.file.add_summary(summary)

    def write(self, record: Record) -> None:
        for key, value in flatten(record).items():
            self.writer.add_scalar(key, value, record["iteration"])
        for number, sample in enumerate(record.get("samples", [])):
            text = f"**{sample['prompt']}**{sample['text']}"
            self.writer.add_text(f"samples/{number}", text, record["iteration"])

    def close(self) -> None:
        self.file.add_summary(self.end)
        self.writer.close()


def run_id(folder: Path, start_iteration: int) -> str:
    """Return the Weights & Biases id of the run in a log folder, or make one for a fresh start, and keep it there."""
    path = folder / "wandb-run-id"
    if first_start(start_iteration) or not path.is_file():
        replace_file(path, uuid.uuid4().hex[:12] + "\n")
    return path.read_text().strip()


class WeightsAndBiases:
    """Offline if there is no account; `wandb sync` uploads such a run later, `wandb sync --append` its resumes."""

    def __init__(self, config: Config, start_iteration: int, about: Record) -> None:
        """Open a run, or if the training resumes, the run of the log folder.

        Args:
            about: further groups of the run's configuration there.
        """
        import wandb

        options, evaluates = config.log, config.evaluation.eval_only
        self.run = wandb.init(
            project=options.wandb_project,
            name=options.wandb_name or Path(options.log_dir).resolve().name,
            id=None if evaluates else run_id(Path(options.log_dir), start_iteration),
            resume="allow",
            job_type="evaluation" if evaluates else "training",
            dir=options.log_dir,
            mode=None if wandb.login(prompt=False) else "offline",
            settings=wandb.Settings(silent=True),
        )
        if self.run.offline:
            again = " --append" if start_iteration else ""
            log.info(f"wandb     offline, without an account; to upload it: wandb sync{again} {self.run.sync_dir}")
        self.run.config.update(asdict(config) | about, allow_val_change=True)
        # Steps of Weights & Biases only grow, but a resumed run repeats the iterations after its checkpoint.
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
            flat |= {f"{key}/{inner}": v for inner, v in value.items() if isinstance(v, (int, float))}
        elif isinstance(value, (int, float)) and key not in ("iteration", "at"):
            flat[key] = value
    return flat
