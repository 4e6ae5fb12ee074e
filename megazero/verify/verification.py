"""Prove that a layout trains the same model as one process: shrink the run, train it in both, and compare."""

import math
import shlex
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from megazero.cluster.local import LocalRanks, RankLost
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.topology import Layout
from megazero.flags.batch_ramp import batch_sizes
from megazero.flags.cli import Command, read, read_own
from megazero.flags.config import ActivationConfig, Config, ParallelConfig, ZeroConfig
from megazero.flags.flag_names import flags, value_of, with_values
from megazero.flags.resolve import resolve
from megazero.flags.validate import check_device
from megazero.host import host_memory
from megazero.interop.huggingface.model_flags import find_model
from megazero.log import log
from megazero.planner.layouts import layout_words
from megazero.planner.parameter_counts import num_parameters
from megazero.planner.run_plan import vocabulary
from megazero.units import count, things
from megazero.verify.compare import Comparison, Row, Whole, noted, row
from megazero.verify.planned import byte_difference, unplanned
from megazero.verify.shrink import Shrunk, changes, least_world, shrink, steps_alone
from megazero.verify.tolerance import Tolerance
from megazero.verify.training import Task, Trained, train_rank

USUAL_VOCABULARY = 50257  # of a run whose tokenizer is not on this machine; GPT-2's
SECONDS, LONG = 300.0, 7200.0  # in which ranks must answer; the second with --keep
FP64 = "fp64"

Prepare = Callable[[], object]
Run = tuple[Config, Layout]


class Wanted(NamedTuple):
    """A command line to verify. The fields are flags of `megazero verify`, but `flags` are the run's."""

    flags: list[str]
    world_size: int = 0
    steps: int = 3
    keep: bool = False
    then: str = ""


@dataclass(frozen=True)
class Resumed:
    """Flags of `--then` that are not the run's."""

    world_size: int = 0
    """Ranks of the layout that resumes. 0: those of the run."""


class Proof(NamedTuple):
    """The result of a verification.

    Attributes:
        tables: title -> lines.
        first: the first thing that differs, as a sentence; empty: nothing does.
        lost: a rank that failed, as a sentence; the tables are then those of before.
    """

    passed: bool
    words: list[str]
    tables: dict[str, list[Row]]
    first: str
    lost: str
    seconds: float


def real_run(words: list[str], world_size: int, steps: int) -> tuple[Run, Command]:
    """Read the flags of a run, and resolve them for its own ranks.

    Raises:
        ValueError: the run itself is impossible, or it has no layout of its own.
    """
    command = read(words, lambda: max(1, world_size), find_model)
    config = command.config
    if config.parallel.layout == "auto":
        raise ValueError("--layout auto: there is no layout to verify yet; give the flags that --plan prints for it")
    if config.evaluation.eval_only:
        raise ValueError("--eval-only trains nothing, so that there is nothing to verify; drop it")
    try:
        tokens = config.model.vocab_size or vocabulary(config)
    except (ValueError, OSError):
        tokens = 0
    config = steps_alone(with_values(config, {"vocab-size": tokens or USUAL_VOCABULARY}), steps)
    world = world_size or least_world(config)
    return resolve(config, world, 0, declare), command


class Runs(NamedTuple):
    """The trainings of a verification, resolved: one process, the layout, and the layout after a resume."""

    alone: Run
    layout: Run
    then: Run


def make_runs(wanted: Wanted, precision: str, size: int = 1) -> tuple[Runs, Run]:
    """Return the runs in a precision, and the real run.

    Raises:
        ValueError: the flags are wrong, or cannot be shrunk.
    """
    real, _ = real_run(wanted.flags, wanted.world_size, wanted.steps)
    reals = [real]
    if wanted.then:
        batch = ["--global-batch-size", str(real[0].training.global_batch_size)]  # for any number of replicas
        resumed, words = read_own(Resumed, shlex.split(wanted.then), "verify.py --then")
        ranks = resumed.world_size or wanted.world_size
        reals.append(real_run([*wanted.flags, *batch, *words], ranks, wanted.steps)[0])
        same = [name for name, flag in flags().items() if flag.group in ("model", "optimizer", "training")]
        same = [name for name in same if name != "micro-batch-size" and not name.startswith("optimizer-")]
        for name in (name for name in same if value_of(reals[1][0], name) != value_of(real[0], name)):
            raise ValueError(f"--then changes --{name}, so that it is another run; give flags of the layout alone")
    try:
        shrunk = [_fit(each, precision) for each in shrink(reals, size)]
        resolved = [resolve(each.config, each.layout.world_size, 0, declare) for each in shrunk]
    except ValueError as error:
        raise ValueError(f"this run cannot be shrunk: {error}") from None
    (config, layout), *others = resolved
    return Runs(_alone(config), (config, layout), (others or resolved)[0]), real


def _fit(shrunk: Shrunk, precision: str) -> Shrunk:
    """Return the run in a precision, with the options that this machine can compute in it."""
    config, values = shrunk.config, dict[str, Any]()
    if precision == FP64:
        values = {"precision": FP64, "grad-dtype": FP64, "master-weights": "fp32", "fused-kernels": "auto"}
    config = with_values(config, values)
    device = device_of(shrunk.layout)
    if device == "cpu":
        config = with_values(config, {"fused-kernels": "auto"})
    if config.optimizer.optimizer_nvme_offload:
        config = with_values(config, {"optimizer-nvme-offload": tempfile.gettempdir()})
    try:
        check_device(config, device)
    except ValueError:  # a ring without fused attention in this precision
        config = with_values(config, {"cp-exchange": "auto"})
        check_device(config, device)
    return shrunk._replace(config=config)


def device_of(layout: Layout) -> str:
    """Return the kind of device that the ranks of a layout get on this machine."""
    return "cuda" if torch.cuda.device_count() >= layout.world_size else "cpu"


def _alone(config: Config) -> Run:
    """Return the same training in one process, without any mechanism that a layout adds."""
    optimizer = replace(config.optimizer, optimizer_cpu_offload=False, optimizer_nvme_offload="")
    optimizer = replace(optimizer, optimizer_offload_fraction=1.0)
    plain = replace(
        config,
        parallel=ParallelConfig(),
        zero=ZeroConfig(zero_stage=0, poison_buffers=True),
        activations=ActivationConfig(),
        optimizer=optimizer,
        training=replace(config.training, micro_batch_size=config.training.global_batch_size),
    )
    return resolve(plain, 1, 0, declare)


def largest(wanted: Wanted) -> int:
    """Return the largest factor of the smallest sizes whose trainings fit in half of this machine's memory."""
    memory = host_memory()
    room, size = (memory.num_bytes if memory is not None else 2**32) // 2, 1
    while size < 2**12:
        runs, real = make_runs(wanted, FP64, 2 * size)
        parameters = num_parameters(declare(runs.layout[0].model))
        # weights, gradients, two moments on each rank; and gradients of every step of all trainings, twice
        if 8 * parameters * (4 * (runs.layout[1].world_size + 1) + 4 * wanted.steps + 12) > room:
            break
        size *= 2
        if runs.layout[0].model == real[0].model:
            break
    return size


class Verification:
    """Trainings and comparisons in one precision after the other. All ranks are started once."""

    def __init__(self, wanted: Wanted, prepare: Prepare | None = None) -> None:
        """Read the flags, and shrink the run; ValueError as `make_runs`.

        Args:
            prepare: called in each rank before it trains; tests plant a fault by it.
        """
        if wanted.steps < 1:
            raise ValueError(f"--steps {wanted.steps}: must be at least 1")
        self.wanted, self.prepare = wanted, prepare
        size = largest(wanted) if wanted.keep else 1
        self.runs, (self.real, self.real_layout) = make_runs(wanted, FP64, size)
        own = self.real.training.precision
        self.precisions = ({own: make_runs(wanted, own, size)[0]} if own != FP64 else {}) | {FP64: self.runs}
        self.gpus = all(device_of(run[1]) == "cuda" for run in self.runs)
        self.tables: dict[str, list[Row]] = {}
        self.first = ""

    def words(self) -> list[str]:
        """Return the lines that report how the run was shrunk."""
        (config, layout), real = self.runs.layout, self.real_layout
        lines = [f"verifying {layout_words(real)} ({things(real.world_size, 'rank')})"]
        if layout.world_size != real.world_size:
            lines.append(
                f"  on {layout_words(layout)} ({things(layout.world_size, 'rank')}), "
                "with the same axes of more than one rank"
            )
        parameters = [count(num_parameters(declare(each.model))) for each in (self.real, config)]
        shrunk = ", ".join([f"parameters {parameters[0]} -> {parameters[1]}", *changes(self.real, config)])
        lines.append(f"  {shrunk}")
        device = "GPUs, over NCCL" if self.gpus else "this CPU, over gloo"
        return [*lines, f"  {things(self.wanted.steps, 'step')} on {device}, in {' and in '.join(self.precisions)}"]

    def run(self) -> Proof:
        """Train and compare everything; log a line for each training."""
        start, lost = time.monotonic(), ""
        for line in self.words():
            log.info(line)
        try:
            with tempfile.TemporaryDirectory(prefix="megazero-verify-") as folder:
                self._compare_all(folder)
        except RankLost as error:
            lost = str(error)
        passed = not lost and all(each.passed for rows in self.tables.values() for each in rows)
        return Proof(
            passed,
            words=self.words(),
            tables=self.tables,
            first=self.first,
            lost=lost,
            seconds=time.monotonic() - start,
        )

    def _compare_all(self, folder: str) -> None:
        seconds, middle = LONG if self.wanted.keep else SECONDS, self.wanted.steps // 2
        world = self.runs.layout[1].world_size
        with LocalRanks(1, seconds, self.gpus) as one, LocalRanks(world, seconds, self.gpus) as many:
            for precision, runs in self.precisions.items():
                exact = precision == FP64
                save = (folder, middle) if exact and middle else None
                alone = self._train(one, runs.alone, f"one process, {precision}")
                found = self._train(many, runs.layout, f"the layout, {precision}", save=save)
                self._compare(precision, runs, alone, found)
                if save:
                    title = f"resumed after step {middle}, {precision}"
                    whole = Whole.of(found)
                    again = self._train(one, runs.alone, f"{title}, in one process", load=folder)
                    self._compare_resumed(f"{title}, in one process", runs, whole, again)
                    self._resume_then(many, runs, whole, folder, title)

    def _resume_then(self, many: LocalRanks, runs: Runs, whole: Whole, folder: str, title: str) -> None:
        name = f"in {self.wanted.then}" if self.wanted.then else "in the same layout"
        if runs.then[1].world_size == many.world:
            again = self._train(many, runs.then, f"{title}, {name}", load=folder)
        else:
            with LocalRanks(runs.then[1].world_size, SECONDS, self.gpus) as others:
                again = self._train(others, runs.then, f"{title}, {name}", load=folder)
        self._compare_resumed(f"{title}, {name}", runs, whole, again)

    def _train(
        self, ranks: LocalRanks, run: Run, title: str, save: tuple[str, int] | None = None, load: str = ""
    ) -> list[Trained]:
        start = time.monotonic()
        try:
            found: list[Trained] = ranks.run(train_rank, Task(*run, save=save, load=load, prepare=self.prepare))
        except RankLost as error:
            raise RankLost(f"{title}: {error}") from None
        log.info(f"  trained: {title}, {things(ranks.world, 'rank')}, {time.monotonic() - start:.1f} s")
        return found

    def _compare(self, precision: str, runs: Runs, alone: list[Trained], found: list[Trained]) -> None:
        config, layout = runs.layout
        comparison = self._comparison(runs, Whole.of(alone), Whole.of(found))
        rows = comparison.rows(self._unpadded(runs))
        for what, traffic in (("bytes in memory", False), ("bytes sent", True)):
            where, note = byte_difference(config, layout, found, self.gpus, traffic=traffic)
            if len(skipped := unplanned(config, layout, self.gpus)) > 1 and not where:
                where = f"without {', '.join(skipped)}: they depend on the loads of experts"
            rows.append(noted(f"{what}, of every rank", not note, note or "as planned", where))
        title = f"the layout next to one process, {precision}"
        self._add(title, rows, lambda: comparison.first(self._unpadded(runs)) if precision == FP64 else "")

    def _comparison(self, runs: Runs, reference: Whole, found: Whole, before: int = 0) -> Comparison:
        config = runs.layout[0]
        tolerance = Tolerance.of(config, self.gpus)
        return Comparison(reference, found, config, layers=declare(config.model), tolerance=tolerance, before=before)

    def _compare_resumed(self, title: str, runs: Runs, whole: Whole, again: list[Trained]) -> None:
        """Compare a resumed training with the uninterrupted one, whose last steps it repeats."""
        resumed, steps = Whole.of(again), len(again[0].steps)
        rest = whole._replace(
            steps=whole.steps[-steps:], gradients=whole.gradients[-steps:], layers=whole.layers[-steps:]
        )
        comparison = self._comparison(runs, rest, resumed, self.wanted.steps - steps)
        losses = row("loss", [comparison.loss(n) for n in range(steps)])
        rows = [losses, comparison.weights_row(), *comparison.states_row()]
        self._add(title, rows, lambda: f"{title}: {comparison.first([False] * steps)}")

    def _add(self, title: str, rows: list[Row], first: Callable[[], str]) -> None:
        """Add a table; if it is the first that fails, find the first thing that differs."""
        self.tables[title] = rows
        if not self.first and not all(each.passed for each in rows):
            self.first = first()

    def _unpadded(self, runs: Runs) -> list[bool]:
        """Return for each step whether neither training computes padding."""
        found, consumed = [], 0
        for _ in range(self.wanted.steps):
            samples = batch_sizes(runs.layout[0]).at(consumed)
            consumed += samples
            each = [samples % (config.training.micro_batch_size * layout.dp) for config, layout in runs[:2]]
            found.append(not any(each))
        return found


def to_json(verdict: Proof, wanted: Wanted) -> dict[str, Any]:
    """Return the contents of --json."""
    tables = [{"table": title, **each._asdict()} for title, rows in verdict.tables.items() for each in rows]
    for each in tables:  # JSON has no infinity
        each["difference"] = each["difference"] if math.isfinite(each["difference"]) else None
    return {
        "passed": verdict.passed,
        "flags": wanted._asdict(),
        "shrunk": verdict.words,
        "rows": tables,
        "first_difference": verdict.first,
        "lost_rank": verdict.lost,
        "seconds": verdict.seconds,
    }
