"""`TrainingRun`: a run around its trainer. It resumes, saves, logs, and stops when asked to."""

import time
from pathlib import Path

from megazero.cluster import agent_notes
from megazero.engine.mesh.collectives import MAX
from megazero.engine.step.engine import LossScaleExhausted
from megazero.flags.cli import Command
from megazero.log import log
from megazero.observe.events import RunEvents
from megazero.observe.loggers import Writers, open_writers
from megazero.observe.memory_report import device_in_use
from megazero.observe.progress_line import Record
from megazero.observe.report.runs import DONE
from megazero.observe.start_clock import StartClock
from megazero.run.checkpoints import CheckpointLoader
from megazero.run.evaluation import Stopped, evaluation_line
from megazero.run.exports import Exports
from megazero.run.replicas import check_replicas
from megazero.run.stopping import ENDING, EVALUATING, DeadRun, Wish, Wishes, stopped_words, training_promise
from megazero.run.task_scores import TaskScores
from megazero.run.trainer import Trainer


class TrainingRun:
    """One rank's part in a run; all ranks call each method together."""

    def __init__(
        self,
        trainer: Trainer,
        loader: CheckpointLoader,
        wishes: Wishes,
        command: Command | None = None,
        exports: Exports | None = None,
        clock: StartClock | None = None,
        elastic: str = "",
    ) -> None:
        """Take the parts of a run.

        Args:
            wishes: the requests to save or stop that this rank sees.
            command: its flags go into config.toml.
            clock: of the parts of this start; None: it begins here.
            elastic: the nodes and the layout of this start, with --elastic.
        """
        self.exports, self.clock, self.elastic = exports, clock or StartClock(), elastic
        self.goes_on = False  # with the next stage
        self.trainer, self.loader, self.wishes, self.command = trainer, loader, wishes, command
        self.checkpoints = loader.saves
        self.config, self.mesh, self.watchdog = trainer.config, trainer.mesh, trainer.watchdog

    def train(self) -> Wish | None:
        """Train from --load, or from the beginning, to --train-iters; returns the request that stopped it earlier.

        Raises:
            ValueError: the checkpoint cannot be loaded.
            DeadRun: the run makes no progress.
        """
        config, trainer = self.config, self.trainer
        load, trainer.progress = self.loader.resume()
        progress, last, stage = trainer.progress, config.training.train_iters, self.checkpoints.stage
        self.describe(load)
        self.clock.mark("checkpoint")
        text = {"bytes_per_token": trainer.bytes_per_token} if trainer.bytes_per_token else {}
        events, stop = RunEvents(self.command, config, self.mesh, clock=self.clock, text=text), None
        writers = self._open_writers(events)
        if self.exports is not None:
            self.exports.resume(progress)
        self.wishes.signals.promise = training_promise(config.checkpoint.save)
        if progress.iteration < last:
            begins = stage.number if self.loader.enters_stage else 0
            events.start(progress.iteration, writers.lost, begins)
            if begins:
                log.info(f"stage {begins} of --data-stages begins, at sample {progress.consumed_samples:,}")
            agent_notes.leave(agent_notes.BEGAN, str(progress.iteration))
        try:
            while progress.iteration < last:
                trainer.skip_samples()
                self.goes_on = not stage.holds(progress.consumed_samples)
                if self.goes_on or (stop := self._stop()) is not None:
                    break
                try:
                    record = trainer.iterate(self._asked_to_stop)
                except LossScaleExhausted:
                    self.checkpoints.save(progress, last=True)  # the weights of the last good update
                    raise
                self.watchdog.doing = f"the end of iteration {progress.iteration}"
                tokens = stage.consumed_tokens(progress.consumed_samples, config.model.seq_length)
                in_stage = {"consumed_tokens": tokens} | ({"stage": stage.number} if config.data.data_stages else {})
                writers.write(record | in_stage | events.first_step(progress.iteration))
                self._check_alive()
                if trainer.due(config.monitor.check_replicas_interval):
                    check_replicas(trainer.engine, progress.iteration)
                exits = trainer.due(config.checkpoint.exit_interval)
                if trainer.due(config.checkpoint.save_interval) and progress.iteration < last and not exits:
                    self._save()
                if self.checkpoints.copy_due(progress.iteration):
                    with trainer.pauses.of("memory_save"):
                        self.checkpoints.save_in_memory(progress)
                if self.exports is not None and trainer.due(config.checkpoint.save_hf_interval):
                    with trainer.pauses.of("export"):
                        self.exports.export(progress)
                if exits:
                    log.info(f"--exit-interval {config.checkpoint.exit_interval}: stopping")
                    break
        except Exception as error:
            events.fail(progress.iteration, error)
            raise
        finally:
            writers.close()
            trainer.train_batches.close()
        trainer.profiler.close()
        self.watchdog.doing = ""
        if progress.iteration:
            if config.checkpoint.save:
                self.wishes.signals.promise = ENDING
            self._save(last=True)
            self.checkpoints.end_in_memory(progress)
            self._export_last()
        trainer.engine.wait()
        if stop is not None:
            agent_notes.leave(agent_notes.STOPPED, stop.name)
            kept = self.checkpoints.saved_at == progress.iteration
            log.info(stopped_words(progress.iteration, stop.why, config.checkpoint if kept else None))
        why = stop.why if stop else DONE if progress.iteration >= last else "--exit-interval"
        if self.goes_on:
            why = f"the end of stage {stage.number}"
        events.end(progress.iteration, why, trainer.pauses.take())
        return stop

    def _save(self, last: bool = False) -> None:
        with self.trainer.pauses.of("save"):
            self.checkpoints.save(self.trainer.progress, last)

    def _export_last(self) -> None:
        """Export the last iteration of the run. A run that stops earlier only waits for an export that has begun."""
        if self.exports is None:
            return
        with self.trainer.pauses.of("export"):
            if self.trainer.progress.iteration >= self.config.training.train_iters:
                self.exports.export(self.trainer.progress, last=True)
            else:
                self.exports.finish(all_ranks=True)

    def evaluate(self) -> Wish | None:
        """Evaluate the weights of --load on --eval-split and --tasks; returns the request that stopped it earlier."""
        trainer, folder = self.trainer, self.config.log.log_dir
        loaded, trainer.progress = self.loader.resume()
        self.describe(loaded)
        writers = self._open_writers(RunEvents(self.command, self.config, self.mesh))
        self.wishes.signals.promise = EVALUATING
        try:
            found = self._results()
            if not isinstance(found, Stopped):
                record, scores = found
                writers.write(record)
                if scores is not None and trainer.leads and folder:
                    scores.write(Path(folder) / "tasks.jsonl")
        finally:
            writers.close()
        trainer.engine.wait()
        if isinstance(found, Stopped):
            log.info(str(found))
            return found.stop
        log.info(evaluation_line(record))
        return None

    def _results(self) -> tuple[Record, TaskScores | None] | Stopped:
        """Evaluate --eval-split, then score --tasks; return the line of metrics.jsonl, and the scores if any."""
        trainer, evaluator, start = self.trainer, self.trainer.evaluator, time.perf_counter()
        found = evaluator.run(self._stop)
        if isinstance(found, Stopped):
            return found
        progress, seconds = trainer.progress, time.perf_counter() - start
        record = evaluator.record(found, progress.iteration, progress.consumed_samples, seconds)
        if trainer.tasks is None:
            return record, None
        scores = trainer.tasks.run(self._stop)
        return scores if isinstance(scores, Stopped) else (record | scores.metrics(), scores)

    def _open_writers(self, events: RunEvents) -> Writers:
        if not self.trainer.leads:
            return Writers([])
        in_use, done = lambda: device_in_use(self.mesh.device), self.trainer.progress.iteration
        return Writers(open_writers(self.config, done, in_use, command=self.command, about=events.about))

    def _stop(self) -> Wish | None:
        """Save if it is time to; return the reason to stop here, if any."""
        wish, progress = self._agreed(), self.trainer.progress
        if wish == Wish.SAVE and progress.iteration and self.checkpoints.saved_at != progress.iteration:
            self._save()
        self.wishes.obey(wish)
        return wish if wish.stops else None

    def _asked_to_stop(self) -> Wish | None:
        """Return the reason to stop, if any; `_stop` obeys it after the iteration."""
        wish = self._agreed()
        return wish if wish.stops else None

    def _agreed(self) -> Wish:
        """Return the highest wish of all ranks: a signal may reach only some of them, and only rank 0 has a clock."""
        return Wish(self.mesh.agree(self.wishes.now(), MAX))

    def _check_alive(self) -> None:
        progress, limit = self.trainer.progress, self.config.training.max_skipped_iterations
        if limit and progress.skipped_in_a_row >= limit:
            self.checkpoints.finish_save()
            raise DeadRun(
                f"iteration {progress.iteration}: {progress.skipped_in_a_row} iterations in a row made no update "
                f"(--max-skipped-iterations {limit}), the last: {self.trainer.skip_reason}. The last checkpoint is "
                "unchanged; lower --lr, check the data, or resume from an earlier checkpoint"
            )

    def describe(self, load: Path | None) -> None:
        """Report the start of the run: its data, its checkpoint and its first iteration."""
        config, trainer = self.config, self.trainer
        evaluation, datasets = config.evaluation, trainer.datasets
        notes = datasets.notes(trainer.evaluator.split if evaluation.eval_only else "train")
        if evaluation.eval_only or evaluation.eval_interval:
            size = config.training.global_batch_size
            notes.append(datasets.repeats(trainer.evaluator.split, evaluation.eval_iters, size))
        for note in filter(None, notes):
            log.info(note)
        if config.checkpoint.load and load is None:
            log.info(f"--load {config.checkpoint.load} holds no checkpoint: starting fresh")
        done, asked = trainer.progress.iteration, config.training.train_iters
        if evaluation.eval_only:
            part = f"the first {evaluation.eval_iters} global batches" if evaluation.eval_iters else "all"
            log.info(f"evaluating {part} of the {evaluation.eval_split} split")
        elif done >= asked:
            log.info(f"iteration {done} is done, and --train-iters is {asked}: nothing to do")
        elif done:
            log.info(f"resuming after iteration {done}")
        if self.elastic:
            log.info(f"{self.elastic}, from iteration {done}")
