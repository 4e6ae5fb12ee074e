"""Checkpoints of a run: `Checkpoints` saves them, also in the background, and prunes them; a loader resumes."""

import fnmatch
import functools
import math
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch

from megazero import checkpoint
from megazero.checkpoint import InMemory
from megazero.checkpoint.engine_state import EngineState
from megazero.checkpoint.locking import SaveLock, Taken
from megazero.checkpoint.shards import LocalShard
from megazero.cluster.watchdog import Watchdog
from megazero.data.corpora import Datasets
from megazero.data.tokenizer import Tokenizer
from megazero.engine.mesh.collectives import MIN
from megazero.engine.options.optimizers import AVERAGE
from megazero.engine.step.engine import Engine
from megazero.flags.config import Config, ModelConfig
from megazero.flags.implied import SETS
from megazero.flags.stages import WHOLE, DataStage
from megazero.log import log
from megazero.run.changes import changed_options
from megazero.run.resume import check_data, check_same_model, check_stage, find_checkpoint, takes_memory
from megazero.run.run_state import Progress, RunState, attached_tokenizer, is_hugging_face, source_digest, source_type
from megazero.run.stopping import DeadRun, newest_words
from megazero.units import things
from megazero.world import generation

# Seconds before each further attempt of a run's last save: ten minutes in which a user can free space.
LAST_SAVE_WAITS = (10.0, 20.0, 30.0, *[60.0] * 9)

WEIGHTS_ALONE = (
    "{} has weights alone, because it was imported, upcycled or merged: a new run begins with them at iteration 0 and "
    "sample 0, with new optimizer states. To continue a run, --load a checkpoint that it saved"
)

# Opens a Hugging Face folder for a model; returns the function that fills shards, and `RunState.expert_biases`.
OpenWeights = Callable[[Path, ModelConfig], tuple[Callable[[Mapping[str, LocalShard]], None], dict[str, list[float]]]]


class Checkpoints:
    """One rank's part in the saves of a run; all ranks call each method together.

    Attributes:
        waits: seconds before each further attempt of the last save, which `wait` sleeps.
    """

    waits: Sequence[float] = LAST_SAVE_WAITS
    wait: Callable[[float], object] = staticmethod(time.sleep)

    def __init__(
        self,
        config: Config,
        engine: Engine,
        datasets: Datasets,
        tokenizer: Tokenizer | None,
        watchdog: Watchdog,
        stage: DataStage = WHOLE,
        lock: SaveLock | None = None,
    ) -> None:
        """Prepare to save into --save, if it is given.

        Args:
            config: resolved.
            engine: owner of the tensors that are saved.
            datasets: checkpoints keep the fingerprints of their corpora.
            tokenizer: rank 0 puts a copy into every checkpoint.
            watchdog: paused during a save, because waits in a save have limits of their own.
            stage: of the run, in which this engine trains.
            lock: of --save, on rank 0.
        """
        self.stage, self.lock = stage, lock
        self.config, self.engine, self.mesh = config, engine, engine.mesh
        self.fingerprints, self.split_by_tokens = tuple(datasets.fingerprints()), datasets.split_by_tokens
        self.watchdog, self.source_digest = watchdog, source_digest(config.hf_config)
        self.source_type = source_type(config.hf_config)  # or that of the checkpoint from which the run began
        self.saved_at: int | None = None  # iteration of the newest checkpoint in --save
        self.in_memory_at: int | None = None  # iteration of the newest checkpoint in memory, perhaps in flight
        self.loaded_from_memory: int | None = None  # iteration at which the run resumed from memory
        self.run_id = uuid.uuid4().hex  # a resume from the same folder replaces it by that of the run
        minutes = config.parallel.distributed_timeout_minutes
        self.saver = checkpoint.BackgroundSaver(minutes, self._write) if config.checkpoint.async_save else None
        self.memory: checkpoint.MemoryCheckpoints | None = None
        if config.checkpoint.memory_checkpoint_interval and config.trains:
            base, group = config.checkpoint.memory_checkpoint_dir, self.mesh.host.group
            self.memory = checkpoint.MemoryCheckpoints(base, Path(config.checkpoint.save), group)
            self.memory_saver = checkpoint.BackgroundSaver(minutes, self.memory.save, engine.tracker)
        self.saving_since = 0.0
        self.reading: Future[None] | None = None  # an export, which reads the newest checkpoint
        packed = tokenizer if self.mesh.rank == 0 and config.checkpoint.save else None
        self.saved_tokenizer, self.attached = attached_tokenizer(packed)

    def save(self, progress: Progress, last: bool = False) -> None:
        """Save into --save, once per iteration; with --async-save in the background, unless it is the last save.

        If a rank cannot write, a warning is printed and training continues. The last save is attempted again instead.

        Raises:
            AgreedFailure: no attempt of the last save succeeded.
            DeadRun: weights are not finite; nothing is saved.
            Taken: --save was moved away, and another run saves there. This iteration is saved in a new folder.
        """
        iteration = progress.iteration
        if not self.config.checkpoint.save:
            return
        self.finish_save()
        if self.saved_at == iteration:
            return
        self.saving_since = time.perf_counter()
        taken = checkpoint.from_rank(0, self._taken, self.mesh.host.group, tuple[str, str])
        shards, state = self._contents(progress)
        self.saved_at = iteration
        if taken[0]:
            self._leave(*taken, functools.partial(self._write, iteration, shards, state, self.mesh.host.group))
        if self.memory is not None:
            self.memory.number += 1

        def begin() -> Callable[[], Path | None]:
            if self.saver is None:
                return lambda: self._write(iteration, shards, state, self.mesh.host.group)
            self.saver.start(iteration, shards, state)
            return self.saver.finish

        if last:
            self._outcome(lambda: self._insist(lambda: begin()()), last)
        elif self.saver is None:
            self._outcome(begin())
        else:
            begin()
            log.info(f"saving in the background; training stopped for {time.perf_counter() - self.saving_since:.1f} s")

    def _taken(self) -> tuple[str, str]:
        """Return why --save is not this run's any more, and the folder to save in instead; "" if it is."""
        try:
            if self.lock is not None:
                self.lock.keep()
        except Taken as error:
            return str(error), f"{self.config.checkpoint.save.rstrip('/')}-{self.run_id[:8]}"
        return "", ""

    def _leave(self, why: str, refuge: str, write: Callable[[Path], Path]) -> NoReturn:
        """Save in the folder `refuge`, and end the run: nothing is lost, and no two runs share a folder."""
        lock = checkpoint.lock(Path(refuge), self.mesh.host.group)
        self._outcome(lambda: self._insist(lambda: write(Path(refuge))), last=True)
        if lock is not None:
            lock.release()
        raise Taken(f"{why}. This run has saved in {refuge}; --load {refuge} --save {refuge} resumes it")

    def _write(
        self,
        iteration: int,
        shards: Mapping[str, LocalShard],
        state: dict[str, Any],
        group: Any,
        root: Path | None = None,
    ) -> Path:
        root = root or Path(self.config.checkpoint.save)
        return checkpoint.save(root, iteration, shards, state=state, group=group, attached=self.attached)

    def _insist(self, write: Callable[[], Path | None]) -> Path | None:
        """Call `write`, and call it again after each of `waits` while ranks cannot write; AgreedFailure of the last.

        All ranks wait together, so an interrupt of one ends the wait of all.
        """
        for number, seconds in enumerate(self.waits, 2):
            try:
                return write()
            except checkpoint.AgreedFailure as error:
                log.warning(
                    f"{error}. Iteration {self.saved_at} is still in memory: attempt {number} of {len(self.waits) + 1} "
                    f"begins in {seconds:g} s. If the disk is full, delete files, such as old checkpoints in "
                    f"{self.config.checkpoint.save}"
                )
            checkpoint.together("waiting", self.mesh.host.group, functools.partial(self.wait, seconds))
        return write()

    def _contents(self, progress: Progress) -> tuple[dict[str, LocalShard], dict[str, Any]]:
        """Return the tensors and the state of a checkpoint; DeadRun if weights are not finite."""
        self.engine.wait()
        shards = EngineState(self.engine).shards()
        self._refuse_nonfinite(shards, progress.iteration)
        state = RunState(
            **asdict(progress),
            **EngineState(self.engine).numbers(),
            model=asdict(self.config.model),
            layout=asdict(self.mesh.layout),
            config=asdict(self.config),
            run=self.run_id,
            sound=progress.skipped_in_a_row == 0,
            fingerprints=self.fingerprints,
            saved_tokenizer=self.saved_tokenizer,
            texts_begin=True,
            stage=self.stage.first,
            source_digest=self.source_digest,
            source_type=self.source_type,
        )
        return shards, state.to_json()

    def copy_due(self, iteration: int) -> bool:
        """Return whether to save in memory: at each interval, and after a load: copies on a lost node are gone."""
        interval = self.config.checkpoint.memory_checkpoint_interval
        return interval > 0 and (iteration % interval == 0 or iteration - 1 == self.loaded_from_memory)

    def save_in_memory(self, progress: Progress, wait: bool = False) -> None:
        """Begin a save into the memory of the nodes, unless the one before it is in flight, or the disk has this one.

        If a rank cannot write, a warning is printed at the next call, and training continues.

        Args:
            wait: for the one before it, and until this one is done.

        Raises:
            DeadRun: weights are not finite; nothing is saved.
        """
        if self.memory is None or progress.iteration in (self.saved_at, self.in_memory_at):
            return
        if not (wait or self.mesh.agree(self.memory_saver.idle, MIN)):
            log.info(
                f"iteration {progress.iteration} is not saved in memory: {self.in_memory_at} is still being copied"
            )
            return
        self._finish_in_memory()
        shards, state = self._contents(progress)
        self.in_memory_at = progress.iteration
        self.memory_saver.start(progress.iteration, shards, state | self.memory.stamp())
        if wait:
            self._finish_in_memory()

    def _finish_in_memory(self) -> None:
        try:
            self._unwatched(f"copying iteration {self.in_memory_at} to memory", self.memory_saver.finish)
        except checkpoint.AgreedFailure as failure:
            self.in_memory_at = None
            log.warning(f"{failure}. Training continues; the next copy is attempted as scheduled")

    def end_in_memory(self, progress: Progress) -> None:
        """End the copies in memory; delete them if the disk has the last iteration."""
        if self.memory is not None:
            self._finish_in_memory()
            if self.saved_at == progress.iteration:
                self.memory.remove()

    def finish_save(self) -> None:
        """Wait for the end of a save in the background."""
        if self.saver is not None:
            self._outcome(self.saver.finish)

    def _outcome(self, save: Callable[[], Path | None], last: bool = False) -> None:
        """Finish a save: report its result, and delete old checkpoints."""
        try:
            path = self._unwatched(f"saving iteration {self.saved_at}", save)
        except checkpoint.AgreedFailure as error:  # no other error, because other ranks might not have it
            lost, self.saved_at = self.saved_at, None
            if last:
                attempts, newest = things(len(self.waits) + 1, "attempt"), newest_words(self.config.checkpoint.save)
                raise checkpoint.AgreedFailure(
                    f"{error}. After {attempts}, iteration {lost} is lost: {newest}"
                ) from None
            log.warning(f"{error}. Training continues; the next save is attempted as scheduled")
            return
        if path is not None:
            log.info(f"saved {path} in {time.perf_counter() - self.saving_since:.1f} s")
            if self.mesh.rank == 0:
                self.prune()

    def _unwatched(self, action: str, save: Callable[[], Path | None]) -> Path | None:
        """Finish a save while the watchdog pauses."""
        doing, self.watchdog.doing = self.watchdog.doing, ""
        try:
            with self.mesh.world.peer_errors(action):
                return save()
        finally:
            self.watchdog.doing = doing

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


class CheckpointLoader:
    """One rank's part in a resume; all ranks call it together. `saves` learns which run is resumed."""

    def __init__(
        self,
        saves: Checkpoints,
        given: Collection[str] | None = None,
        open_weights: OpenWeights | None = None,
        stages: Sequence[DataStage] = (WHOLE,),
    ) -> None:
        """Take the parts of a resume.

        Args:
            given: names of the flags that were given, without dashes; None: all were.
            open_weights: reads the weights of a Hugging Face folder, which --load may name.
            stages: of the run.
        """
        self.saves, self.config, self.engine, self.mesh = saves, saves.config, saves.engine, saves.mesh
        self.memory, self.given, self.open_weights, self.stages = saves.memory, given, open_weights, stages
        self.enters_stage = False  # the checkpoint is of the stage before

    def resume(self) -> tuple[Path | None, Progress]:
        """Load the newest checkpoint, or if it is damaged, the newest sound one before it.

        Returns:
            The folder that was loaded (None: a fresh start), and its progress.

        Raises:
            ValueError: this run cannot resume from the checkpoint.
            Damaged: it is damaged, and --load-exact is given, or --load is this checkpoint's own folder.
        """
        faults, options = dict[str, str](), self.config.checkpoint
        with self.mesh.world.peer_errors("looking for a checkpoint"):
            if self.memory is not None:
                self.memory.announce(EngineState(self.engine).shards())
            for path, copy in self._candidates(faults):
                try:
                    progress = self._load(path, copy)
                except checkpoint.Damaged as error:
                    if options.load_exact or path == Path(options.load):
                        raise
                    faults[copy.key if copy is not None else path.name] = str(error)
                    continue
                if self.memory is not None:
                    self.memory.settle(copy)
                return path, progress
            find_checkpoint(self.config, self.mesh.host.group, faults, memory=False)  # Damaged if the disk has any
            if self.memory is not None:
                self.memory.settle(None)
        if faults:  # the weights are those of a load that failed
            raise checkpoint.Damaged(
                f"{'; '.join(faults.values())}; all copies are deleted: start again to begin at iteration 0"
            )
        return None, Progress()

    def _candidates(self, faults: Mapping[str, str]) -> Iterator[tuple[Path, InMemory | None]]:
        """Yield checkpoints to try, best first: each one of the disk after the newer ones in memory.

        Args:
            faults: by key or name, the damage of those that were tried; grows in between.
        """
        save = Path(self.config.checkpoint.save)
        asked = takes_memory(self.config) or (self.config.parallel.elastic and generation() > 0)
        while True:
            load = find_checkpoint(self.config, self.mesh.host.group, faults)
            if self.memory is not None and asked:  # a run that does not resume has no checkpoint in --save
                saved = load if load is not None and load.parent.resolve() == save.resolve() else None
                yield from ((copy.path, copy) for copy in self.memory.find(saved, faults))
            if load is None:
                return
            yield load, None

    def _load(self, path: Path, found: InMemory | None) -> Progress:
        """Load the checkpoint `path`, on the disk, or the one `found` in memory."""
        start = time.perf_counter()
        if is_hugging_face(path):
            self._load_weights(path, {})
            log.info(f"loaded the weights of {path} in {time.perf_counter() - start:.1f} s")
            return Progress()
        if found is None:
            state = RunState.read(path, self.mesh.host.group)
        else:
            assert self.memory is not None
            state = RunState.of(path, self.memory.read_state(found))
            check_same_model(path, state.typed_model(path), self.config.model)
        self.saves.source_type = self.saves.source_type or state.source_type
        finetunes = self.config.checkpoint.finetune and found is None
        if finetunes or self.config.evaluation.eval_only or state.weights_only:
            self._load_weights(path, state.expert_biases)
            log.info(f"loaded the weights of {path} in {time.perf_counter() - start:.1f} s")
            if state.weights_only and not (finetunes or self.config.evaluation.eval_only):
                log.info(WEIGHTS_ALONE.format(path))
            return Progress(state.iteration, state.consumed_samples) if self.config.evaluation.eval_only else Progress()
        saves = self.saves
        check_stage(path, state, self.config, self.stages)
        check_data(path, state, self.config, fingerprints=saves.fingerprints, split_by_tokens=saves.split_by_tokens)
        same = state.optimizer == self.config.optimizer.optimizer
        averages = same and state.has_average and self.config.optimizer.ema_interval > 0
        shards = self._shards(states=same, averages=averages)
        dropped = state.has_average and not averages
        self._fill(path, shards, dropped or not same or bool(self.config.training.freeze_parameters), found)
        restored = {
            "updates": state.updates if same else 0,
            "loss_scale": state.loss_scale,
            "expert_biases": state.expert_biases,
            "averages": state.averages if averages else 0,
        }
        EngineState(self.engine).load(restored, shards)
        if self.config.optimizer.ema_interval and not averages:
            log.info(f"the running average of the weights begins at iteration {state.iteration + 1}")
        elif dropped:
            log.info("the running average of the weights is not continued; --ema-interval would continue it")
        self.enters_stage = state.stage != saves.stage.first and saves.stage.holds(state.consumed_samples)
        planned = {flag for stage in self.stages for flag in stage.values} if self.enters_stage else ()
        sets = SETS if self.config.checkpoint.decay_from else ()  # no advice to change them back
        given = None if self.given is None else {*self.given, *sets}
        changes = changed_options(state, self.config, given, saves.fingerprints, planned=planned)
        for text in changes.notes:
            log.info(text)
        for text in changes.warnings:
            log.warning(text)
        on_disk = path.parent.resolve() == Path(self.config.checkpoint.save or ".").resolve()
        if on_disk:
            saves.saved_at = state.iteration
        if found is not None:
            saves.in_memory_at = saves.loaded_from_memory = state.iteration
        if on_disk or found is not None:
            saves.run_id, saves.source_digest = state.run, state.source_digest
        seconds = time.perf_counter() - start
        log.info(found.loaded(seconds) if found is not None else f"loaded {path} in {seconds:.1f} s")
        return Progress(state.iteration, state.consumed_samples, state.skipped_in_a_row)

    def _load_weights(self, path: Path, expert_biases: Mapping[str, list[float]]) -> None:
        """Load the weights alone, with the biases of experts, or those in `path`; optimizer states stay fresh."""
        weights = self._shards(states=False, averages=False)
        biases = self._fill(path, weights, partial=True) or expert_biases
        fresh = {"updates": 0, "loss_scale": None, "expert_biases": biases, "averages": 0}
        EngineState(self.engine).load(fresh, weights)

    def _shards(self, states: bool, averages: bool) -> dict[str, LocalShard]:
        """Return weights, and `states` of those that train: moments of earlier steps would move a frozen one.

        Args:
            averages: return their running averages too, if `states`.
        """
        frozen, shards = self.config.training.freeze_parameters, EngineState(self.engine).shards()
        if not averages:
            shards = {name: shard for name, shard in shards.items() if not name.startswith(f"{AVERAGE.name}.")}
        moves = {n for n in shards if states and not any(fnmatch.fnmatchcase(n.partition(".")[2], p) for p in frozen)}
        return {name: shard for name, shard in shards.items() if name.startswith("model.") or name in moves}

    def _fill(
        self, path: Path, shards: dict[str, LocalShard], partial: bool, found: InMemory | None = None
    ) -> dict[str, list[float]]:
        """Fill shards; return the biases of experts that a Hugging Face folder has."""
        biases: dict[str, list[float]] = {}

        def fill_from_files() -> None:
            assert self.open_weights is not None
            fill, of_experts = self.open_weights(path, self.config.model)
            fill(shards)
            biases.update(of_experts)

        self.engine.wait()  # an all-gather of initial weights in flight would overwrite the loaded ones
        self.mesh.in_flight.check("loading a checkpoint", writes=[shard.data for shard in shards.values()])
        with self.mesh.world.peer_errors(f"loading {path}"):
            if is_hugging_face(path):
                checkpoint.together(f"loading {path}", self.mesh.host.group, fill_from_files)
            elif found is not None:
                assert self.memory is not None
                self.memory.load(found, shards, partial=partial)
            else:
                checkpoint.load(path, shards, self.mesh.host.group, partial=partial)
        return biases


def _finite(shard: LocalShard) -> bool:
    """Return true if all elements of a shard are finite, without a temporary of its size."""
    return not shard.data.numel() or all(math.isfinite(float(x)) for x in torch.aminmax(shard.data))
