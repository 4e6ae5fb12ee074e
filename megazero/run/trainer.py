"""`Trainer`: the training steps and evaluations of one rank, and their records for metrics.jsonl."""

import time
from collections.abc import Callable
from typing import Any

from megazero.cluster.launch import card_name
from megazero.cluster.watchdog import Watchdog
from megazero.data.corpora import Datasets
from megazero.data.loader import Batches
from megazero.data.task_requests import PackedRequests
from megazero.data.text_bytes import bytes_per_token
from megazero.data.tokenizer import Tokenizer
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.step.engine import Engine
from megazero.engine.step.results import StepResult
from megazero.flags.batch_ramp import BatchSizes, batch_sizes
from megazero.flags.config import Config
from megazero.flags.validate import skipped_samples
from megazero.log import log
from megazero.observe.bad_step import diagnose_step
from megazero.observe.fragmentation import device_fragmentation
from megazero.observe.layer_statistics import LayerStatistics
from megazero.observe.memory_report import explain_out_of_memory
from megazero.observe.pauses import Pauses
from megazero.observe.profiling import Profiler
from megazero.observe.progress_line import Record
from megazero.observe.sensors import DeviceSensors
from megazero.observe.step_metrics import expert_loads, expert_metrics, memory_bytes
from megazero.planner.time.devices import peak_flops
from megazero.planner.trace.trace import model_flops
from megazero.run.averages import averaged_weights
from megazero.run.evaluation import Evaluation, Evaluator, Stopped
from megazero.run.kernel_choices import choose_compile, choose_kernels, choose_matmul_backend
from megazero.run.run_state import Progress
from megazero.run.stopping import Wish
from megazero.run.task_scores import TaskScorer
from megazero.run.text_samples import TextSampler


class Trainer:
    """One rank's engine and batches; all ranks call each method together.

    Attributes:
        choices: a text that names the measured choices of matrix products and kernels, for the start screen.
        progress: advanced by `iterate`; a resume sets it.
        pauses: since the last record.
        bytes_per_token: of the data, for events.jsonl; None on other ranks, and if no tokenizer is known.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        datasets: Datasets,
        eod: int | None,
        watchdog: Watchdog | None = None,
        tokenizer: Tokenizer | None = None,
        tasks: PackedRequests | None = None,
    ) -> None:
        """Build the engine, and open the batches.

        Args:
            config: resolved.
            eod: the end-of-document token; None if no flag needs it.
            watchdog: reports this rank's current action, which the trainer writes to `doing`.
            tokenizer: encodes --sample-prompts and decodes the texts; None if none is known.
            tasks: the requests of --tasks.
        """
        self.mesh, self.datasets, self.leads = mesh, datasets, mesh.rank == 0
        self.watchdog = watchdog or Watchdog(0, lambda place: None)
        chosen, products = choose_matmul_backend(config, mesh)
        chosen, kernels = choose_kernels(chosen, mesh)
        self.config, compiles = choose_compile(chosen, mesh.device.type)
        self.choices = "\n".join(filter(None, (products, kernels, compiles)))
        num_corpora = max(1, len(datasets.named))
        self.engine = Engine(self.config, mesh, num_corpora, explain_out_of_memory, diagnose=diagnose_step)
        self.profiler = Profiler(self.config, self.engine)
        self.statistics, self.sensors = LayerStatistics(self.engine), DeviceSensors(mesh.device)
        self.progress, self.pauses = Progress(), Pauses()
        self.skip_reason: str | None = None  # cause, if the last iteration made no update
        self.left_out = skipped_samples(config)
        self.peak_flops = peak_flops(card_name(mesh.device), config.training)
        samples = config.log.sample_interval > 0 and config.trains
        told = tokenizer if self.leads and config.log.log_dir and config.trains else None
        self.bytes_per_token = bytes_per_token(datasets, told) if told is not None else None
        self.sampler = TextSampler(config, self.engine, tokenizer) if samples else None
        self.tasks = TaskScorer(self.config, self.engine, tasks) if tasks is not None else None

        def batches(dataset: Any, num_workers: int, sizes: BatchSizes) -> Batches:
            return Batches(
                dataset=dataset,
                seq_length=config.model.seq_length,
                sizes=sizes,
                micro_batch_size=config.training.micro_batch_size,
                dp_rank=mesh.dp.rank,
                dp_size=mesh.dp.size,
                eod=eod if config.data.eod_mask_loss else None,
                document_end=eod if config.data.reset_attention_mask or config.data.reset_position_ids else None,
                num_workers=num_workers,
            )

        self.train_batches = batches(datasets.train, config.data.num_workers, batch_sizes(config))
        workers = config.data.num_workers if config.evaluation.eval_only else 0
        split = config.evaluation.eval_split
        full = BatchSizes(config.training.global_batch_size)
        self.evaluator = Evaluator(
            config=config,
            engine=self.engine,
            datasets=datasets,
            split=split,
            open_batches=lambda samples: batches(samples, workers, full),
        )

    def due(self, interval: int) -> bool:
        """Return whether the iteration is a multiple of `interval`; 0: never."""
        return interval > 0 and self.progress.iteration % interval == 0

    def iterate(self, stop: Callable[[], Wish | None] = lambda: None) -> Record:
        """Run one training step, and an evaluation, text samples and scores of tasks if they are due.

        `stop` is called before every global batch of tasks; if it returns a wish, there are no scores.
        """
        config, mesh, progress = self.config, self.mesh, self.progress
        self.profiler.begin(progress.iteration + 1)
        size = batch_sizes(config).at(progress.consumed_samples)
        sent, start = mesh.sent(), time.perf_counter()
        self.watchdog.doing = f"reading the batch of iteration {progress.iteration + 1}"
        batches = self.train_batches.batch(progress.consumed_samples)
        self.watchdog.doing = f"iteration {progress.iteration + 1}"
        every = config.log.stats_interval
        observes = every > 0 and (progress.iteration + 1) % every == 0
        if observes:
            self.statistics.begin()
        result = self.engine.train_step(progress.iteration + 1, batches, size)
        statistics = self.statistics.end(result.grad_norm) if observes else {}
        seconds = time.perf_counter() - start
        progress.iteration += 1
        progress.consumed_samples += size
        traffic = {kind: total - sent[kind] for kind, total in mesh.sent().items()}
        record = self._record(result, size, seconds, traffic) | statistics | self.profiler.end()
        progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if result.skipped else 0
        self.skip_reason = result.skip_reason
        if result.skip_reason is not None:
            first = progress.consumed_samples - size
            batch = f"samples {first} to {progress.consumed_samples - 1}"
            log.info(f"iteration {progress.iteration}, of {batch}, makes no update: {result.skip_reason}")
        if self.due(config.evaluation.eval_interval):
            with self.pauses.of("evaluation"):
                found = self.evaluate()
            record["validation_loss"] = found.loss
            if found.loss_by_corpus:
                record["validation_loss_by_corpus"] = found.loss_by_corpus
            if self.engine.averages:
                with self.pauses.of("evaluation"), averaged_weights(self.engine):
                    record["validation_loss_ema"] = self.evaluate().loss
        if self.sampler is not None and self.due(config.log.sample_interval):
            self.watchdog.doing = f"sampling texts after iteration {progress.iteration}"
            with self.pauses.of("samples"):
                record["samples"] = self.sampler.run()
        if self.tasks is not None and (self.due(self.tasks.interval) or self.due(config.training.train_iters)):
            self.watchdog.doing = f"scoring tasks after iteration {progress.iteration}"
            with self.pauses.of("tasks"):
                scores = self.tasks.run(stop)
            if isinstance(scores, Stopped):
                log.info(f"scores of tasks after iteration {progress.iteration} {scores}")
            else:
                record |= scores.metrics()
        return record | self.pauses.take() | {"at": time.time()}

    def skip_samples(self) -> None:
        """If the next batch would contain a sample of --skip-samples, continue after the last of these."""
        left_out, next_one = self.left_out, self.progress.consumed_samples
        if left_out.start < next_one + batch_sizes(self.config).at(next_one) and next_one < left_out.stop:
            log.info(f"--skip-samples: continuing from sample {left_out.stop} instead of {next_one}")
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
            "memory_bytes": memory_bytes(self.engine, result),
            "traffic_bytes": traffic,
        }
        if result.imbalance is not None:
            record["cp_imbalance"] = result.imbalance
        if result.mtp_losses:
            record["mtp_losses"] = {str(depth): loss for depth, loss in enumerate(result.mtp_losses, 1)}
        loads = expert_loads(result, config.model)
        if loads is not None:
            ends = self.due(config.evaluation.eval_interval) or self.due(config.training.train_iters)
            record |= expert_metrics(loads, config.model, choices=ends)
        if self.leads and self.profiler.traces:
            found = device_fragmentation(self.mesh.device)
            if found is not None:
                record["fragmentation"] = found._asdict()
        if self.leads and self.due(config.log.log_interval) and (sensed := self.sensors.read()):
            record["device"] = sensed
        if result.loss_by_corpus:
            by_corpus = zip(self.datasets.named, result.loss_by_corpus, strict=True)
            record["loss_by_corpus"] = {prefix: loss for prefix, loss in by_corpus if loss is not None}
        if self.leads and self.datasets.named and self.due(config.log.log_interval):
            record["samples_served"] = self.datasets.served(self.progress.consumed_samples)
        return record

    def evaluate(self) -> Evaluation:
        """Evaluate --eval-iters global batches of --eval-split, always the same ones."""
        found = self.evaluator.run()
        assert isinstance(found, Evaluation)
        return found
