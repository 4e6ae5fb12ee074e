"""The progress of a run on the console."""

import sys
from collections import deque
from collections.abc import Callable
from typing import Any

from megazero.flags.config import Config
from megazero.log import log
from megazero.observe.shown_tasks import task_scores
from megazero.units import count, duration, size

RECENT = 50  # iterations whose mean time predicts the time left

Record = dict[str, Any]  # one iteration, as in metrics.jsonl
InUse = Callable[[], tuple[int, int] | None]


class ProgressLine:
    """A line every --log-interval iterations; on a terminal also a bar below the lines, with the time left."""

    def __init__(self, config: Config, start_iteration: int, in_use: InUse = lambda: None) -> None:
        """`in_use`: returns the bytes of device memory that this process uses, and its size (0: unknown)."""
        self.interval, self.last = config.log.log_interval, config.training.train_iters
        self.in_use = in_use
        self.recent = deque[float](maxlen=RECENT)
        self.bar = self._open_bar(start_iteration) if sys.stdout.isatty() else None

    def _open_bar(self, start_iteration: int) -> Any:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = [BarColumn(None), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")]
        bar = Progress(*columns, transient=True)  # prints lines of the log above the bar
        bar.start()
        self.task = bar.add_task("", total=self.last, completed=start_iteration)
        return bar

    def write(self, record: Record) -> None:
        self.recent.append(record["step_seconds"])
        i = record["iteration"]
        left = f"{duration((self.last - i) * sum(self.recent) / len(self.recent))} left"
        if self.bar is not None:
            self.bar.update(self.task, completed=i, description=left)
        if i % self.interval == 0 or i == self.last or "validation_loss" in record:
            log.info(progress_line(record, self.last, in_use=self.in_use(), left=left))
        if words := [str(score) for score in task_scores(record) if "/" not in score.task]:
            log.info(f"tasks after iteration {i}: {' | '.join(words)}")

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()


def progress_line(record: Record, last: int, in_use: tuple[int, int] | None, left: str) -> str:
    """Return the progress line of an iteration."""
    parts = [f"iteration {record['iteration']:>{len(str(last))}}/{last}", f"loss {record['loss']:.4f}"]
    if "validation_loss" in record:
        parts.append(f"validation {record['validation_loss']:.4f}")
    if "validation_loss_ema" in record:
        parts.append(f"of the average {record['validation_loss_ema']:.4f}")
    parts += [f"norm {record['grad_norm']:.3f}", f"lr {record['lr']:.2e}"]
    speed = f"{record['tokens_per_second']:,.0f} tokens/s, {record['tflops_per_device']:.3g} TFLOP/s"
    parts.append(speed + (f", MFU {record['mfu']:.1%}" if "mfu" in record else ""))
    if in_use is not None:
        used, whole = in_use
        parts.append(size(used) + (f" of {size(whole)}" if whole else ""))
    parts += [f"{count(record['consumed_tokens'])} tokens", left]
    if "moe_load" in record:
        dropped = f", {record['moe_dropped']:.1%} dropped" if record.get("moe_dropped") else ""
        parts.append(f"expert load {max(record['moe_load'].values()):.2f}{dropped}")
    if record["loss_scale"] != 1:
        parts.append(f"scale {record['loss_scale']:g}")
    if record["skipped"]:
        parts.append("SKIPPED")
    return " | ".join(parts)
