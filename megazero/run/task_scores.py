"""Scores of tasks during a run or of a checkpoint: --tasks, docs/tasks.md.

Shapes: s sequence, R requests.
"""

from __future__ import annotations

import functools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from megazero.data.loader import Batches
from megazero.data.task_files import ChoiceItem, ClozeItem, Item, TextItem
from megazero.data.task_requests import NO_REQUEST, EncodedTasks, PackedRequests, TaskRequests
from megazero.engine.model.layers.context import DeviceBatch
from megazero.engine.options.batch_sizes import PADDING
from megazero.engine.options.schema import DocumentOptions
from megazero.engine.step.batch import MicroBatch
from megazero.engine.step.engine import Engine
from megazero.files import explain, replace_file
from megazero.flags.batch_ramp import BatchSizes
from megazero.flags.config import Config
from megazero.flags.validate import check_device
from megazero.generation.target_scores import score_batch
from megazero.observe.loggers import finite
from megazero.observe.progress_line import Record
from megazero.run.evaluation import Stopped
from megazero.run.kernel_choices import fuses_attention
from megazero.run.stopping import Wish
from megazero.units import things

COST_SHARE = 50  # an iteration of training per share of an iteration: 1 / 50 of the time
STEP_FORWARDS = 3  # a step takes as long as this many forwards


def pack_requests(config: Config, tasks: EncodedTasks, device_type: str) -> PackedRequests:
    """Return the samples of --tasks for a resolved run.

    Raises:
        ValueError: an item does not fit in a sample.
    """
    length = config.model.seq_length
    return PackedRequests(tasks.requests(length), length, keeps_apart(config, device_type))


def keeps_apart(config: Config, device_type: str) -> bool:
    """Return whether the device computes attention within documents without dropout, and fuses it if training's is.

    A kernel that is not fused makes all scores of attention, for which training may have no room.
    """
    scoring = replace(
        config,
        model=replace(config.model, attention_dropout=0.0),
        data=replace(config.data, reset_attention_mask=True, reset_position_ids=True),
    )
    try:
        check_device(scoring, device_type)
    except ValueError:
        return False
    return fuses_attention(scoring, device_type) or not fuses_attention(config, device_type)


def task_interval(config: Config, num_samples: int) -> int:
    """Return --task-interval, or the least in which the forwards take at most 2 % of the time of training."""
    chosen = -(-COST_SHARE * num_samples // (STEP_FORWARDS * config.training.global_batch_size))
    return config.evaluation.task_interval or chosen


def task_words(config: Config, packed: PackedRequests) -> str:
    """Describe --tasks for the start screen."""
    counts, samples = packed.requests.tasks.counts, len(packed)
    items = ", ".join(f"{task} {count:,}" for task, count in counts.items())
    text = f"{items}: {things(len(packed.requests.pairs), 'request')} in {things(samples, 'sample')}"
    if not config.trains:
        return text
    interval, last = task_interval(config, samples), config.training.train_iters
    share = samples / STEP_FORWARDS / config.training.global_batch_size / interval
    if interval >= last:
        return f"{text}; scored after the last iteration"
    return f"{text}; scored every {things(interval, 'iteration')} and after the last, {share:.1%} of the time"


class TaskScorer:
    """Scores the tasks of a run; all ranks call it together."""

    def __init__(self, config: Config, engine: Engine, packed: PackedRequests) -> None:
        self.config, self.engine, self.packed = config, engine, packed
        self.interval = task_interval(config, len(packed))

    def run(self, stop: Callable[[], Wish | None] = lambda: None) -> TaskScores | Stopped:
        """Score all requests; the result is the same on all ranks. `stop`: as that of `Evaluator.run`."""
        found = self.request_scores(stop)
        return found if isinstance(found, Stopped) else TaskScores(self.packed.requests, *found)

    def request_scores(
        self, stop: Callable[[], Wish | None] = lambda: None
    ) -> tuple[list[float], list[float]] | Stopped:
        """Return each request's negative log-likelihood, and how many of its tokens are not the likeliest.

        Shapes: [R]. The same on all ranks.
        """
        mesh, size = self.engine.mesh, self.config.training.global_batch_size
        found = torch.zeros(2, len(self.packed.requests.pairs), dtype=torch.float64)
        for first in range(0, len(self.packed), size):
            if (why := stop()) is not None:
                return Stopped(why, first / len(self.packed), of="tasks")
            batches = self._batches(min(size, len(self.packed) - first)).batch(first)
            for batch, scores in zip(batches, self.target_scores(batches), strict=False):
                for number, sample in zip(batch.samples, scores.double().cpu().unbind(1), strict=True):
                    if number != PADDING:
                        self._add(found, number, sample)
        # Each request is on one replica, whose tensor- and context-parallel ranks have the same sums.
        summed = mesh.control_sum(found.view(-1).to(mesh.device), mesh.dp, mesh.pp).view_as(found).cpu()
        return summed[0].tolist(), summed[1].tolist()

    def target_scores(self, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Return `generation.target_scores`, [2, b, s], of each micro-batch on the last stage; nothing on other stages.

        Targets that do not count have 0. Attention stays within the documents of a micro-batch and positions restart
        with them, even if no flag asks for it; without `document_starts` every sample is one document.
        """
        apart = any(batch.document_starts is not None for batch in batches)
        head, documents = self.engine.model.head, DocumentOptions(apart, apart)
        score = functools.partial(score_batch, head) if head else None
        found, uploaded = self.engine.forward(batches, score, documents)
        own = [found[i].view(2, *each.ids.shape) for i, each in enumerate(uploaded.micro_batches) if found]
        return [self._whole_samples(x, each) for x, each in zip(own, uploaded.micro_batches, strict=False)]

    def _whole_samples(self, own: torch.Tensor, micro_batch: DeviceBatch) -> torch.Tensor:
        """own [.., b, t]: values of this context-parallel rank's tokens -> of all tokens, [.., b, s]."""
        dealt = micro_batch.tokens.dealt
        if dealt is None:
            return own
        whole = own.new_zeros(*own.shape[:-1], dealt.length)
        return self.engine.mesh.cp.all_reduce_(whole.scatter_(-1, dealt.indices.expand_as(own), own))

    def _add(self, found: torch.Tensor, number: int, sample: torch.Tensor) -> None:
        """Add the targets of a sample, [2, s] of `target_scores`, to the requests in `found`, [2, R]."""
        owners = torch.from_numpy(self.packed.owners(number))
        wanted = owners != NO_REQUEST
        nats, likeliest = sample[:, wanted]
        found.index_add_(1, owners[wanted], torch.stack([nats, 1 - likeliest]))

    def _batches(self, samples: int) -> Batches:
        """Return this rank's micro-batches of a global batch of `samples`."""
        config, dp = self.config, self.engine.mesh.dp
        return Batches(
            dataset=self.packed,
            seq_length=config.model.seq_length,
            sizes=BatchSizes(samples),
            micro_batch_size=config.training.micro_batch_size,
            dp_rank=dp.rank,
            dp_size=dp.size,
        )


class TaskScores(NamedTuple):
    """Results of `TaskScorer.request_scores`."""

    requests: TaskRequests
    nats: list[float]
    missed: list[float]

    def results(self) -> Iterator[ItemResult]:
        """Yield the result of every item, in order."""
        for item, (first, stop) in zip(self.requests.tasks.items, pairwise(self.requests.firsts), strict=True):
            nats, greedy = self.nats[first:stop], [not count for count in self.missed[first:stop]]
            if isinstance(item, TextItem):
                nats, greedy = [sum(nats)], [all(greedy)]
            yield ItemResult(item, nats, greedy)

    def metrics(self) -> Record:
        """Return the scores of all tasks by key of metrics.jsonl, see docs/metrics.md."""
        right, normed = defaultdict[str, list[bool]](list), defaultdict[str, list[bool]](list)
        cloze, texts = defaultdict[str, list[float]](list), defaultdict[str, list[tuple[float, int]]](list)
        for item, nats, greedy in self.results():
            match item:
                case ChoiceItem():
                    losses, sizes = np.array(nats), [len(choice.encode()) for choice in item.choices]
                    right[item.task].append(_least(losses) == item.answer)
                    normed[item.task].append(_least(losses / sizes) == item.answer)
                case ClozeItem():
                    right[item.task] += greedy
                    cloze[item.task] += nats
                case TextItem():
                    for name in filter(None, (item.task, item.domain and f"{item.task}/{item.domain}")):
                        texts[name].append((nats[0], len(item.text.encode())))
        found: Record = {
            "task_items": {name: len(values) for counted in (right, texts) for name, values in counted.items()},
            "task_acc": {task: _mean(values) for task, values in right.items()},
            "task_acc_stderr": _standard_errors(right),
            "task_acc_norm": {task: _mean(values) for task, values in normed.items()},
            "task_acc_norm_stderr": _standard_errors(normed),
            "task_perplexity": {task: _exp(_mean(values)) for task, values in cloze.items()},
            "task_bits_per_byte": {name: _bits_per_byte(values) for name, values in texts.items()},
        }
        return {key: scores for key, scores in found.items() if scores}

    def write(self, path: Path) -> None:
        """Write the result of every item as a line of JSON, see docs/tasks.md.

        Raises:
            ValueError: the file cannot be written.
        """
        lines = [
            json.dumps(finite({"task": item.task, "log_likelihoods": [-x for x in nats], "greedy": greedy}))
            for item, nats, greedy in self.results()
        ]
        try:
            replace_file(path, "".join(line + "\n" for line in lines))
        except OSError as error:
            raise ValueError(f"--log-dir {path.parent}: {explain(error)}") from None


class ItemResult(NamedTuple):
    """Negative log-likelihoods of an item's continuations, and whether each is the model's likeliest.

    A text has the sum of its windows.
    """

    item: Item
    nats: list[float]
    greedy: list[bool]


def _least(losses: np.ndarray[Any, np.dtype[np.float64]]) -> int | None:
    """Return the index of the first of the least losses; None if none is finite."""
    known = np.isfinite(losses)
    return int(np.where(known, losses, np.inf).argmin()) if known.any() else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _standard_errors(values: Mapping[str, Sequence[bool]]) -> dict[str, float]:
    """Return the standard errors of shares, of tasks with several items."""
    shares = {task: (_mean(each), len(each)) for task, each in values.items() if len(each) > 1}
    return {task: math.sqrt(share * (1 - share) / (count - 1)) for task, (share, count) in shares.items()}


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def _bits_per_byte(texts: Sequence[tuple[float, int]]) -> float:
    """texts: nats and bytes of each"""
    return sum(nats for nats, _ in texts) / math.log(2) / sum(size for _, size in texts)
