"""Loss of a split: over its first global batches, always the same ones, or over each of its tokens once."""

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from megazero.data.corpora import Datasets
from megazero.data.loader import Batches
from megazero.data.samples import Samples
from megazero.engine.step.engine import Engine
from megazero.flags.config import Config
from megazero.log import log
from megazero.observe.progress_line import Record
from megazero.observe.shown_tasks import task_scores
from megazero.run.stopping import Wish
from megazero.units import duration

REPORT_SECONDS = 30.0  # between two reports of an evaluation's progress


class Evaluation(NamedTuple):
    """Result of an evaluation, the same on all ranks."""

    loss_sum: float  # nats, over all targets
    targets: int
    loss_by_corpus: dict[str, float]  # nats a target, by prefix, of those with targets; empty if there is one alone

    @property
    def loss(self) -> float:
        """Nats a target."""
        return self.loss_sum / self.targets if self.targets else math.nan

    @property
    def perplexity(self) -> float:
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


class Stopped(NamedTuple):
    """An evaluation, or scores of tasks, that were asked to stop before their end; there is no result."""

    stop: Wish
    done: float  # share of the global batches
    of: str = "evaluation"

    def __str__(self) -> str:
        return f"stopped by {self.stop.why} after {self.done:.0%} of the {self.of}: no result"


class Evaluator:
    """Evaluates one split of a run's corpora; all ranks call `run` together."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        datasets: Datasets,
        split: str,
        open_batches: Callable[[Samples], Batches],
    ) -> None:
        self.engine, self.split = engine, split
        self.batch_size = size = config.training.global_batch_size
        iters = config.evaluation.eval_iters
        # (corpus, its batches, their number); with --eval-iters the corpora are blended
        self.parts: list[tuple[str, Batches, int]]
        if iters:
            self.parts, self.named = [("", open_batches(getattr(datasets, split)), iters)], datasets.named
        else:
            whole = datasets.whole(split)
            self.parts = [(name, open_batches(samples), -(-len(samples) // size)) for name, samples in whole.items()]
            self.named = ()

    def run(self, stop: Callable[[], Wish | None] = lambda: None) -> Evaluation | Stopped:
        """Evaluate. `stop` is called before every global batch; if it returns a wish, the evaluation ends."""
        losses, counts = defaultdict[str, float](float), defaultdict[str, int](int)
        done, last = 0, sum(count for _, _, count in self.parts)
        start = reported = time.monotonic()
        for name, batches, count in self.parts:
            names = self.named or (name,)
            with contextlib.closing(batches):  # or threads would read on
                for i in range(count):
                    if (why := stop()) is not None:
                        return Stopped(why, done / last)
                    sums, targets = self.engine.evaluate_by_corpus(batches.batch(i * self.batch_size))
                    # A single corpus has one loss.
                    for prefix, loss, counted in zip(names, sums, targets, strict=False):
                        losses[prefix] += loss
                        counts[prefix] += counted
                    done += 1
                    if (now := time.monotonic()) - reported > REPORT_SECONDS:
                        left = duration((now - start) / done * (last - done))
                        loss = sum(losses.values()) / max(1, sum(counts.values()))
                        log.info(f"evaluated {done} of {last} global batches, loss {loss:.4f}, {left} left")
                        reported = now
        by_corpus = {name: losses[name] / count for name, count in counts.items() if count}
        return Evaluation(sum(losses.values()), sum(counts.values()), by_corpus if len(counts) > 1 else {})

    def record(self, found: Evaluation, iteration: int, consumed_samples: int, seconds: float) -> Record:
        """Return the line of metrics.jsonl for --eval-only."""
        record: Record = {
            "iteration": iteration,
            "consumed_samples": consumed_samples,
            "eval_split": self.split,
            f"{self.split}_loss": found.loss,
            "perplexity": found.perplexity,
            "targets": found.targets,
            "eval_seconds": seconds,
            "tokens_per_second": found.targets / seconds,
        }
        if found.loss_by_corpus:
            record["loss_by_corpus"] = found.loss_by_corpus
        return record


def evaluation_line(record: Record) -> str:
    """Format the result of --eval-only for the console."""
    split = record["eval_split"]
    parts = [f"iteration {record['iteration']}: {split} loss {record[f'{split}_loss']:.4f}"]
    parts += [f"perplexity {record['perplexity']:.4g}", f"{record['targets']:,} targets"]
    parts += [f"{duration(record['eval_seconds'])}", f"{record['tokens_per_second']:,.0f} tokens/s"]
    by_corpus = record.get("loss_by_corpus", {}).items()
    corpora = [f"  {loss:.4f}  {prefix}" for prefix, loss in by_corpus]
    tasks = [f"  {score}" for score in task_scores(record)]
    return "\n".join([" | ".join(parts), *corpora, *tasks])
