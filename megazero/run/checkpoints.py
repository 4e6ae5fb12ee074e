"""`Checkpoints`: saves a run's checkpoints, also in the background, prunes them, and loads the newest sound one."""

from __future__ import annotations

import fnmatch
import math
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path

import torch

from megazero import checkpoint
from megazero.checkpoint import LocalShard
from megazero.comm.mesh.collectives import MIN
from megazero.config.schema import Config, ModelConfig
from megazero.data.corpora import Datasets
from megazero.data.tokenizer import Tokenizer
from megazero.log import log
from megazero.observe.watchdog import Watchdog
from megazero.run.resume import changed_options, check_data, find_checkpoint
from megazero.run.run_state import Progress, RunState, attached_tokenizer, is_hugging_face, source_digest
from megazero.run.stopping import DeadRun
from megazero.step.engine import Engine

# Opens a Hugging Face folder for a model; returns the function that fills a rank's shards.
OpenWeights = Callable[[Path, ModelConfig], Callable[[Mapping[str, LocalShard]], None]]


class Checkpoints:
    """One rank's part in the checkpoints of a run; all ranks call each method together."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        datasets: Datasets,
        tokenizer: Tokenizer | None,
        watchdog: Watchdog,
        given: Collection[str] | None = None,
        open_weights: OpenWeights | None = None,
    ) -> None:
        """Prepare to save into --save, if it is given.

        Args:
            config: resolved.
            engine: owner of the tensors that are saved and loaded.
            datasets: checkpoints keep the fingerprints of their corpora.
            tokenizer: rank 0 puts a copy into every checkpoint.
            watchdog: paused during a save, because waits in a save have limits of their own.
            given: names of the flags that were given, without dashes; None: all were.
            open_weights: reads the weights of a Hugging Face folder, which --load may name.
        """
        self.config, self.engine, self.mesh = config, engine, engine.mesh
        self.fingerprints, self.split_by_tokens = tuple(datasets.fingerprints()), datasets.split_by_tokens
        self.watchdog, self.given, self.open_weights = watchdog, given, open_weights
        self.source_digest = source_digest(config.hf_config)
        self.saved_at: int | None = None  # iteration of the newest checkpoint in --save
        self.run_id = uuid.uuid4().hex  # a resume from the same folder replaces it by that of the run
        minutes = config.parallel.distributed_timeout_minutes
        self.saver = checkpoint.BackgroundSaver(minutes) if config.checkpoint.async_save else None
        self.saving_since = 0.0
        self.reading: Future[None] | None = None  # an export, which reads the newest checkpoint
        packed = tokenizer if self.mesh.rank == 0 and config.checkpoint.save else None
        self.saved_tokenizer, self.attached = attached_tokenizer(packed)

    def save(self, progress: Progress, last: bool = False) -> None:
        """Save into --save, once per iteration; with --async-save in the background, unless it is the last save.

        If a rank cannot write, a warning is printed and training continues, unless it is the last save.

        Raises:
            AgreedFailure: a rank cannot write the last save.
            DeadRun: weights are not finite; nothing is saved.
        """
        options, iteration = self.config.checkpoint, progress.iteration
        if not options.save:
            return
        self.finish_save(last and self.saved_at == iteration)
        if self.saved_at == iteration:
            return
        self.saving_since = time.perf_counter()
        self.engine.wait()
        shards = self.engine.shards()
        self._refuse_nonfinite(shards, iteration)
        state = RunState(
            **asdict(progress),
            **self.engine.state_dict(),
            model=asdict(self.config.model),
            layout=asdict(self.mesh.layout),
            config=asdict(self.config),
            run=self.run_id,
            sound=progress.skipped_in_a_row == 0,
            fingerprints=self.fingerprints,
            saved_tokenizer=self.saved_tokenizer,
            source_digest=self.source_digest,
        ).to_json()
        root, group = Path(options.save), self.mesh.host_group
        self.saved_at = iteration
        if self.saver is not None:
            self.saver.start(root, iteration, shards, state, self.attached)
            log.info(f"saving in the background; training stopped for {time.perf_counter() - self.saving_since:.1f} s")
            if last:
                self.finish_save(last)
        else:
            self._outcome(lambda: checkpoint.save(root, iteration, shards, state, group, self.attached), last)

    def finish_save(self, last: bool = False) -> None:
        """Wait for the end of a save in the background."""
        if self.saver is not None:
            self._outcome(self.saver.finish, last)

    def _outcome(self, save: Callable[[], Path | None], last: bool) -> None:
        """Finish a save: report its result, and delete old checkpoints."""
        doing, self.watchdog.doing = self.watchdog.doing, ""
        try:
            with self.mesh.world.peer_errors(f"saving iteration {self.saved_at}"):
                path = save()
        except checkpoint.AgreedFailure as error:  # no other error, because other ranks might not have it
            self.saved_at = None
            if last:
                raise
            log.warning(f"{error}. Training continues; the next save is attempted as scheduled")
            return
        finally:
            self.watchdog.doing = doing
        if path is not None:
            log.info(f"saved {path} in {time.perf_counter() - self.saving_since:.1f} s")
            if self.mesh.rank == 0:
                self.prune()

    def prune(self) -> None:
        """Delete old checkpoints, on rank 0, unless one is being read: then the end of the export does."""
        options = self.config.checkpoint
        if self.reading is not None and not self.reading.done():
            return
        try:
            checkpoint.prune(Path(options.save), options.keep_last, options.keep_every, self.run_id)
        except (OSError, checkpoint.Damaged) as error:  # perhaps for a while only; the next save prunes
            log.warning(f"cannot delete old checkpoints in --save {options.save}: {error}")

    def _refuse_nonfinite(self, shards: dict[str, LocalShard], iteration: int) -> None:
        """Raise DeadRun if weights are not finite, so that the newest checkpoint has finite weights."""
        mesh, mine = self.mesh, next((n for n, s in shards.items() if n.startswith("model.") and not _finite(s)), None)
        rank = mesh.agree(mesh.rank if mine is not None else mesh.world.size, MIN)
        if rank < mesh.world.size:
            where = f"{mine.removeprefix('model.')} is" if mine is not None else f"weights of rank {rank} are"
            raise DeadRun(
                f"iteration {iteration}: {where} not finite; nothing is saved, and the last checkpoint "
                "is unchanged; lower --lr, or resume from an earlier checkpoint"
            )

    def resume(self, load: Path | None) -> tuple[Path | None, Progress]:
        """Load the checkpoint `load`, or if it is damaged, the newest sound one before it.

        Returns:
            The folder that was loaded (None: a fresh start), and its progress.

        Raises:
            ValueError: this run cannot resume from the checkpoint.
            Damaged: it is damaged, and --load-exact is given, or --load is this checkpoint's own folder.
        """
        passed: dict[str, str] = {}
        while load is not None:
            try:
                return load, self._load(load)
            except checkpoint.Damaged as error:
                if self.config.checkpoint.load_exact or load == Path(self.config.checkpoint.load):
                    raise
                passed[load.name] = str(error)
                load = find_checkpoint(self.config, self.mesh.host_group, passed)
        return None, Progress()

    def _load(self, path: Path) -> Progress:
        start = time.perf_counter()
        if is_hugging_face(path):
            self._load_weights(path, {})
            log.info(f"loaded the weights of {path} in {time.perf_counter() - start:.1f} s")
            return Progress()
        state = RunState.read(path, self.mesh.host_group)
        if self.config.checkpoint.finetune or self.config.evaluation.eval_only or state.weights_only:
            self._load_weights(path, state.expert_biases)
            log.info(f"loaded the weights of {path} in {time.perf_counter() - start:.1f} s")
            return Progress(state.iteration, state.consumed_samples) if self.config.evaluation.eval_only else Progress()
        check_data(path, state, self.config, self.fingerprints, self.split_by_tokens)
        ours = self.config.optimizer
        same = state.optimizer == ours.optimizer
        shards = self._trained() if same else self._weights()
        self._load_shards(path, shards, partial=not same or bool(self.config.training.freeze_parameters))
        updates = state.updates if same else 0
        found = {"updates": updates, "loss_scale": state.loss_scale, "expert_biases": state.expert_biases}
        self.engine.load_state_dict(found, shards)
        if not same:
            anew = ", ".join(each.name for each in ours.rules.states)
            log.info(f"--optimizer {ours.optimizer} begins with the weights that {state.optimizer} left: {anew} are 0")
        for difference in changed_options(state.config, self.config, self.given):
            log.info(difference)
        if path.parent.resolve() == Path(self.config.checkpoint.save or ".").resolve():
            self.saved_at = state.iteration
            self.run_id, self.source_digest = state.run, state.source_digest
        log.info(f"loaded {path} in {time.perf_counter() - start:.1f} s")
        return Progress(state.iteration, state.consumed_samples, state.skipped_in_a_row)

    def _load_weights(self, path: Path, expert_biases: Mapping[str, list[float]]) -> None:
        """Load the weights alone, with the biases of experts; optimizer states stay fresh."""
        weights = self._weights()
        self._load_shards(path, weights, partial=True)
        self.engine.load_state_dict({"updates": 0, "loss_scale": None, "expert_biases": expert_biases}, weights)

    def _trained(self) -> dict[str, LocalShard]:
        """Return weights, and states of those that train: moments of earlier steps would move a frozen one."""
        frozen = self.config.training.freeze_parameters
        return {
            name: shard
            for name, shard in self.engine.shards().items()
            if name.startswith("model.") or not any(fnmatch.fnmatchcase(name.partition(".")[2], p) for p in frozen)
        }

    def _weights(self) -> dict[str, LocalShard]:
        return {name: shard for name, shard in self.engine.shards().items() if name.startswith("model.")}

    def _load_shards(self, path: Path, shards: dict[str, LocalShard], partial: bool = False) -> None:
        self.engine.wait()  # an all-gather of initial weights in flight would overwrite the loaded ones
        self.mesh.in_flight.check("loading a checkpoint", writes=[shard.data for shard in shards.values()])
        with self.mesh.world.peer_errors(f"loading {path}"):
            if is_hugging_face(path):
                assert self.open_weights is not None
                model, opened = self.config.model, self.open_weights
                checkpoint.fill(path, shards, lambda shards: opened(path, model)(shards), self.mesh.host_group)
            else:
                checkpoint.load(path, shards, self.mesh.host_group, partial=partial)


def _finite(shard: LocalShard) -> bool:
    """Return true if all elements of a shard are finite, without a temporary of its size."""
    return not shard.data.numel() or all(math.isfinite(float(x)) for x in torch.aminmax(shard.data))
