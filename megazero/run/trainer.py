"""A pretraining run: checks, start or resume, the loop, evaluation, saving. Straight code, in the order of events."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from megazero.comm.mesh.collectives import MAX
from megazero.comm.mesh.mesh import Mesh
from megazero.config.batch_sizes import BatchSizes
from megazero.config.cli import Command
from megazero.config.schema import Config
from megazero.config.validate import skipped_samples
from megazero.data.corpora import Datasets
from megazero.data.loader import Batches
from megazero.data.tokenizer import Tokenizer
from megazero.log import log
from megazero.memory.fragmentation import device_fragmentation
from megazero.model.kernels.choices import choose_kernels, choose_matmul_backend
from megazero.observe.events import RunEvents
from megazero.observe.loggers import Writers, open_writers
from megazero.observe.profiling import Profiler
from megazero.observe.progress_line import Record
from megazero.observe.watchdog import Watchdog
from megazero.price.time.devices import peak_flops
from megazero.price.trace.trace import model_flops
from megazero.run.checkpoints import Checkpoints
from megazero.run.evaluation import Evaluation, Evaluator, Stopped, line
from megazero.run.replicas import check_replicas
from megazero.run.run_state import Progress
from megazero.run.samples import TextSampler
from megazero.run.stopping import STOPS, Clock, DeadRun, Signals, Stop, asked_to_stop, stopped_words
from megazero.step.engine import Engine, LossScaleExhausted, StepResult
from megazero.step.memory_report import device_in_use


class Trainer:
    """One rank's run."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        datasets: Datasets,
        eod: int | None,
        signals: Signals | None = None,
        clock: Clock | None = None,
        watchdog: Watchdog | None = None,
        tokenizer: Tokenizer | None = None,
        command: Command | None = None,
    ) -> None:
        """Build the engine.

        Args:
            config: resolved.
            eod: the end-of-document token; None where no flag needs it.
            signals: what asks for a stop; None: nothing does.
            clock: rank 0's limits of time.
            watchdog: what watches this run; it is told what the run does.
            tokenizer: goes into the run's checkpoints.
            command: the command line, whose flags go into config.toml.
        """
        self.config, self.mesh = config, mesh
        self.signals, self.clock = signals or Signals(), clock
        self.watchdog = watchdog or Watchdog(0, lambda place: None)
        self.leads, self.command = mesh.rank == 0, command
        chosen, products = choose_matmul_backend(config, mesh)
        self.config, kernels = choose_kernels(chosen, mesh)
        self.choices = "\n".join(said for said in (products, kernels) if said)
        self.engine = Engine(self.config, mesh, max(1, len(datasets.named)))
        self.profiler = Profiler(self.config, self.engine)
        self.progress = Progress()
        given = command.given if command is not None else None
        self.checkpoints = Checkpoints(self.config, self.engine, datasets, tokenizer, self.watchdog, given)
        self.left_out = skipped_samples(config)
        card = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else ""
        self.peak_flops = peak_flops(card, config.training)

        def batches(dataset: Any, num_workers: int, sizes: BatchSizes) -> Batches:
            return Batches(
                dataset,
                config.model.seq_length,
                sizes,
                config.training.micro_batch_size,
                mesh.dp.rank,
                mesh.dp.size,
                eod=eod if config.data.eod_mask_loss else None,
                document_end=eod if config.data.reset_attention_mask or config.data.reset_position_ids else None,
                num_workers=num_workers,
            )

        self.datasets = datasets
        samples = config.log.sample_interval > 0 and config.trains
        self.sampler = TextSampler(config, self.engine, tokenizer) if samples else None
        self.train_batches = batches(datasets.train, config.data.num_workers, config.batch_sizes)
        workers = config.data.num_workers if config.evaluation.eval_only else 0
        split = config.evaluation.eval_split
        full = BatchSizes(config.training.global_batch_size)
        self.evaluator = Evaluator(
            config, self.engine, datasets, split, lambda samples: batches(samples, workers, full)
        )

    def run(self, load: Path | None) -> Stop | None:
        """Train from `load`, or from the beginning, to --train-iters, or until asked to stop; returns by what.

        Raises:
            ValueError: what is to be loaded cannot be.
            DeadRun: the run makes no progress.
        """
        config = self.config
        load, self.progress = self.checkpoints.resume(load)
        self.describe(load)
        events, stop = RunEvents(self.command, config, self.mesh), None
        writers = self._open_writers(events)
        if self.progress.iteration < config.training.train_iters:
            events.start(self.progress.iteration)
        try:
            while self.progress.iteration < config.training.train_iters and (stop := self._stop()) is None:
                try:
                    record = self.iterate()
                except LossScaleExhausted:
                    self.checkpoints.save(self.progress, last=True)  # what the last good update made
                    raise
                self.watchdog.doing = f"what follows iteration {self.progress.iteration}"
                writers.write(record)
                self._check_alive()
                if self._due(config.monitor.check_replicas_interval):
                    check_replicas(self.engine, self.progress.iteration)
                if self._due(config.checkpoint.save_interval):
                    self.checkpoints.save(self.progress)
                if self._due(config.checkpoint.exit_interval):
                    log.info(f"--exit-interval {config.checkpoint.exit_interval}: stopping")
                    break
        except Exception as error:
            events.fail(self.progress.iteration, error)
            raise
        finally:
            writers.close()
            self.train_batches.close()
        self.profiler.close()
        self.watchdog.doing = ""
        if self.progress.iteration:
            self.checkpoints.save(self.progress, last=True)
        self.engine.wait()
        if stop is not None:
            kept = self.checkpoints.saved_at == self.progress.iteration
            log.info(stopped_words(self.progress.iteration, stop.why, config.checkpoint if kept else None))
        done = self.progress.iteration >= config.training.train_iters
        events.end(self.progress.iteration, stop.why if stop else "done" if done else "--exit-interval")
        return stop

    def _open_writers(self, events: RunEvents) -> Writers:
        if not self.leads:
            return Writers([])
        in_use, done = lambda: device_in_use(self.mesh.device), self.progress.iteration
        return Writers(open_writers(self.config, done, in_use, self.command, events.about))

    def _stop(self) -> Stop | None:
        """Return the reason to stop here, agreed over all ranks: a signal may reach only some, and clocks differ."""
        log_dir = self.config.log.log_dir
        stop_file = Path(log_dir) / "stop" if self.leads and log_dir else None
        save = self.clock is not None and self.clock.save_due(time.time())
        # One number: where no rank stops, all save if rank 0's clock says so; who stops saves at the end anyway.
        agreed = self.mesh.agree(2 * asked_to_stop(self.signals, self.clock, stop_file) + save, MAX)
        found, save = agreed // 2, bool(agreed % 2)
        if found < 0:
            if save:
                self._save_by_time()
            return None
        if stop_file is not None:  # obeyed: the next run goes on
            stop_file.unlink(missing_ok=True)
        return STOPS[found]

    def _save_by_time(self) -> None:
        if self.progress.iteration and self.checkpoints.saved_at != self.progress.iteration:
            self.checkpoints.save(self.progress)
        if self.clock is not None:
            self.clock.saved(time.time())

    def _check_alive(self) -> None:
        limit, skipped = self.config.training.max_skipped_iterations, self.progress.skipped_in_a_row
        if limit and skipped >= limit:
            self.checkpoints.finish_save()
            raise DeadRun(
                f"iteration {self.progress.iteration}: {skipped} iterations in a row made no update "
                f"(--max-skipped-iterations {limit}), the last: {self.skip_reason}. The last checkpoint is left "
                "as it is; lower --lr, look at the data, or go on from an earlier checkpoint"
            )

    def _due(self, interval: int) -> bool:
        return interval > 0 and self.progress.iteration % interval == 0

    def iterate(self) -> Record:
        """One training step, and an evaluation where it is due."""
        config, mesh, progress = self.config, self.mesh, self.progress
        self.profiler.begin(progress.iteration + 1)
        self._skip_samples()
        size = config.batch_sizes.at(progress.consumed_samples)
        sent, start = mesh.sent(), time.perf_counter()
        self.watchdog.doing = f"reading the batch of iteration {progress.iteration + 1}"
        batches = self.train_batches.batch(progress.consumed_samples)
        self.watchdog.doing = f"iteration {progress.iteration + 1}"
        result = self.engine.train_step(progress.iteration + 1, batches, size)
        seconds = time.perf_counter() - start
        progress.iteration += 1
        progress.consumed_samples += size
        traffic = {kind: total - sent[kind] for kind, total in mesh.sent().items()}
        record = self._record(result, size, seconds, traffic) | self.profiler.end()
        progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if result.skipped else 0
        self.skip_reason = result.skip_reason
        if result.skip_reason is not None:
            first = progress.consumed_samples - size
            batch = f"samples {first} to {progress.consumed_samples - 1}"
            log.info(f"iteration {progress.iteration}, of {batch}, makes no update: {result.skip_reason}")
        if self._due(config.evaluation.eval_interval):
            found = self.evaluate()
            record["validation_loss"] = found.loss
            if found.loss_by_corpus:
                record["validation_loss_by_corpus"] = found.loss_by_corpus
        if self.sampler is not None and self._due(config.log.sample_interval):
            self.watchdog.doing = f"sampling texts after iteration {progress.iteration}"
            record["samples"] = self.sampler.run()
        return record

    def _skip_samples(self) -> None:
        """Go on behind the samples of --skip-samples where the next batch would hold one of them."""
        left_out, next_one = self.left_out, self.progress.consumed_samples
        if left_out.start < next_one + self.config.batch_sizes.at(next_one) and next_one < left_out.stop:
            log.info(f"--skip-samples: going on from sample {left_out.stop} instead of {next_one}")
            self.progress.consumed_samples = left_out.stop

    def _record(self, result: StepResult, samples: int, seconds: float, traffic: dict[str, int]) -> Record:
        config = self.config
        speed = model_flops(config.model, samples) / self.mesh.layout.world_size / seconds
        record: Record = {
            "iteration": self.progress.iteration,
            "consumed_samples": self.progress.consumed_samples,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "loss_scale": result.loss_scale,
            "skipped": result.skipped,
            "step_seconds": seconds,
            "tokens_per_second": samples * config.model.seq_length / seconds,
            "tflops_per_device": speed / 1e12,
            **({"mfu": speed / self.peak_flops} if self.peak_flops else {}),
            "memory_bytes": self.engine.memory_bytes(result),
            "traffic_bytes": traffic,
        }
        if self.leads and self.profiler.traces:
            found = device_fragmentation(self.mesh.device)
            if found is not None:
                record["fragmentation"] = found._asdict()
        if result.loss_by_corpus:
            by_corpus = zip(self.datasets.named, result.loss_by_corpus, strict=True)
            record["loss_by_corpus"] = {prefix: loss for prefix, loss in by_corpus if loss is not None}
        if self.leads and self.datasets.named and self._due(config.log.log_interval):
            record["samples_served"] = self.datasets.served(self.progress.consumed_samples)
        return record

    def evaluate(self) -> Evaluation:
        """Evaluate the first --eval-iters global batches of the validation split."""
        found = self.evaluator.run()
        assert isinstance(found, Evaluation)
        return found

    def evaluate_only(self, load: Path) -> Stop | None:
        """Evaluate the weights of `load` on --eval-split; returns what stopped it, if anything did."""
        loaded, self.progress = self.checkpoints.resume(load)
        self.describe(loaded)
        writers = self._open_writers(RunEvents(self.command, self.config, self.mesh))
        start = time.perf_counter()
        try:
            found = self.evaluator.run(self._stop)
            if isinstance(found, Evaluation):
                progress, seconds = self.progress, time.perf_counter() - start
                record = self.evaluator.record(found, progress.iteration, progress.consumed_samples, seconds)
                writers.write(record)
        finally:
            writers.close()
        self.engine.wait()
        if isinstance(found, Stopped):
            log.info(f"stopped by {found.stop.why}, with {found.done:.0%} evaluated: no result")
            return found.stop
        log.info(line(record))
        return None

    def describe(self, load: Path | None) -> None:
        """Say where the run begins."""
        config = self.config
        evaluation = config.evaluation
        repeats = ""
        if evaluation.eval_only or evaluation.eval_interval:
            iters, size = evaluation.eval_iters, config.training.global_batch_size
            repeats = self.datasets.repeats(self.evaluator.split, iters, size)
        for note in filter(None, [*self.datasets.notes(), repeats]):
            log.info(note)
        if config.checkpoint.load and load is None:
            log.info(f"--load {config.checkpoint.load} holds no checkpoint: starting fresh")
        if config.evaluation.eval_only:
            iters = config.evaluation.eval_iters
            part = f"the first {iters} global batches" if iters else "all"
            log.info(f"evaluating {part} of the {config.evaluation.eval_split} split")
        elif self.progress.iteration >= config.training.train_iters:
            done, asked = self.progress.iteration, config.training.train_iters
            log.info(f"iteration {done} is done, and --train-iters is {asked}: nothing to do")
        elif load is not None:
            log.info(f"going on after iteration {self.progress.iteration}")
