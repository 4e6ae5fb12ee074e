"""The trainer on real ranks: damaged checkpoints, dead runs, saves that fail."""

import contextlib
import json
import os
import resource
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from megazero.checkpoint.engine_state import EngineState, states_of
from megazero.checkpoint.locking import SaveLock
from megazero.checkpoint.planning import RankPlan
from megazero.data.writer import IndexedWriter
from megazero.engine.model.stage import declare
from megazero.engine.plan.program.operations import Forward
from megazero.flags.config import Config, LogConfig
from megazero.observe import stragglers
from megazero.observe.timeline import Interval
from megazero.planner.bytes.rank_parts import rank_parts
from megazero.planner.trace.trace import model_flops
from megazero.run.checkpoints import Checkpoints
from megazero.run.replicas import check_replicas
from megazero.run.stopping import Clock, DeadRun, Signals, Wish
from megazero.run.training_run import TrainingRun
from megazero.world import Generation
from tests.helpers.families import of_family
from tests.helpers.rings import by_default
from tests.parallel.runs import MODEL, configured, names, quietly, run_of, train, weights, write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "small")


# -- the plans that ranks compare


def held_and_planned(rank: int, world: int, config: Config) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Geometry of every shard, by the engine and by the pure plan; lists of chunks that rank 0 hears of."""
    run = run_of(rank, world, config)
    held = {
        name: (s.global_shape, s.offset, s.local_shape, s.start, s.stop)
        for name, s in EngineState(run.trainer.engine).shards().items()
    }
    layout = run.mesh.layout
    planned = {
        f"{state}.{p.spec.name}": (p.spec.shape, p.block.offset, p.block.shape, p.start, p.stop)
        for p in rank_parts(run.config, layout, rank, declare)
        for state in ("model", "exp_avg", "exp_avg_sq")
    }
    return held, planned, len(RankPlan.of(EngineState(run.trainer.engine).shards()).holdings)


@pytest.mark.parametrize(("tp", "stage"), [(1, 0), (1, 3), (2, 1)])
def test_what_a_rank_holds_is_known_beforehand(ranks: Any, corpus: str, tmp_path: Path, tp: int, stage: int) -> None:
    config = configured(corpus, tmp_path, 1, tp=tp)
    config = replace(config, zero=replace(config.zero, zero_stage=stage))
    for held, planned, _ in ranks(2).run(held_and_planned, 2, config):
        assert held == planned and len(held) == 3 * (2 + 2 * 12 + 2)


def test_a_plan_does_not_grow_with_the_layers(ranks: Any, corpus: str, tmp_path: Path) -> None:
    """At a thousand ranks rank 0 reads a plan of each, so common parts are sent once."""
    config = configured(corpus, tmp_path, 1)
    deep = replace(config, model=replace(MODEL, num_layers=8))
    few, many = ([size for *_, size in ranks(2).run(held_and_planned, 2, each)] for each in (config, deep))
    assert few == many and max(few) < 20


# -- saves by time


class Told(Clock):
    """A clock that wishes for a save at given calls, one before each iteration."""

    def __init__(self, *due: int) -> None:
        super().__init__(0.0, 0.0, lambda: None)
        self.due, self.calls = due, 0

    def wish(self, now: float, set_time: float | None = None) -> Wish:
        self.calls += 1
        return Wish.SAVE if self.calls in self.due else Wish.CONTINUE


def train_by_time(rank: int, world: int, config: Config) -> int:
    """Rank 0 alone has a clock: before iterations 1 and 4 it asks for a save."""
    run = run_of(rank, world, config)
    run.wishes.clock = Told(1, 4) if rank == 0 else None
    quietly(run)
    return run.trainer.progress.iteration


def test_a_save_by_time_is_every_ranks(ranks: Any, corpus: str, tmp_path: Path) -> None:
    assert ranks(2).run(train_by_time, 2, configured(corpus, tmp_path, 5)) == [5, 5]
    assert names(tmp_path) == [3, 5]  # nothing before the first iteration; the last is saved anyway


# -- damage


@pytest.mark.parametrize("file", ["rank_00001.safetensors", "state.json"])
def test_a_flipped_bit_costs_one_checkpoint_and_not_the_run(ranks: Any, corpus: str, tmp_path: Path, file: str) -> None:
    """dp 2: only rank 1 reads the damaged file, and both ranks go back; the weights equal those of an undamaged run."""
    options = {"save_interval": 2, "load": str(tmp_path)}
    assert ranks(2).run(train, 2, configured(corpus, tmp_path, 4, **options)) == [(4, "")] * 2
    expected = weights(tmp_path / "iter_0000004")
    content = bytearray((tmp_path / "iter_0000004" / file).read_bytes())
    content[-9] ^= 4
    (tmp_path / "iter_0000004" / file).write_bytes(content)
    for _, error in ranks(2).run(train, 2, configured(corpus, tmp_path, 5, load_exact=True, **options)):
        assert error.startswith("Damaged: --load ") and file in error and "damaged" in error
    assert ranks(2).run(train, 2, configured(corpus, tmp_path, 4, **options)) == [(4, "")] * 2
    assert torch.equal(weights(tmp_path / "iter_0000004"), expected)  # trained and saved again from 2


def test_a_corpus_made_anew_ends_the_resume(ranks: Any, tmp_path: Path) -> None:
    for iterations, first in ((1, 0), (2, 1)):
        with IndexedWriter(tmp_path / "corpus", np.uint16, {"tokenizer": "byte", "vocab_size": 257}) as writer:
            writer.add(np.arange(first, first + 200))
        config = configured(str(tmp_path / "corpus"), tmp_path / "saved", iterations, load=str(tmp_path / "saved"))
        errors = [error for _, error in ranks(2).run(train, 2, config)]
    assert all("holds other tokens than when this was saved" in error for error in errors), errors


# -- other starts than a plain resume


def optimizer_after(rank: int, config: Config) -> tuple[float, float, int]:
    """After `resume`: the largest moment, the sum of this rank's weights, the iteration."""
    run = run_of(rank, 2, config)
    with contextlib.redirect_stdout(open(os.devnull, "w")):
        _, run.trainer.progress = run.loader.resume()
    shards = EngineState(run.trainer.engine).shards()
    moments = max(float(s.data.abs().max()) for n, s in shards.items() if n.startswith("exp_avg") and s.data.numel())
    total = sum(float(s.data.double().sum()) for n, s in shards.items() if n.startswith("model."))
    return (
        moments,
        total,
        run.trainer.progress.iteration + run.trainer.progress.consumed_samples + run.trainer.engine.updates,
    )


def test_finetuning_takes_weights_and_nothing_else(ranks: Any, corpus: str, tmp_path: Path) -> None:
    assert ranks(2).run(train, 2, configured(corpus, tmp_path / "base", 3)) == [(3, "")] * 2
    base = str(tmp_path / "base")
    resumed = ranks(2).run(optimizer_after, configured(corpus, tmp_path / "new", 3, load=base))
    tuned = ranks(2).run(optimizer_after, configured(corpus, tmp_path / "new", 3, load=base, finetune=True))
    for (moment, total, progress), (tuned_moment, tuned_total, tuned_progress) in zip(resumed, tuned, strict=True):
        assert moment > 0 and progress == 3 + 12 + 3
        assert tuned_moment == 0 and tuned_progress == 0 and tuned_total == total
    for _, error in ranks(2).run(train, 2, configured(corpus, base, 3, load=base, finetune=True)):
        assert "--finetune starts a new one; name another folder" in error


def samples_read(rank: int, config: Config) -> list[int]:
    """The samples of each iteration, of this rank."""
    run, seen = run_of(rank, 2, config), []
    step = run.trainer.engine.train_step

    def spied(iteration: int, batches: Any, samples: int) -> Any:
        seen.extend(number for batch in batches for number in batch.samples)
        return step(iteration, batches, samples)

    run.trainer.engine.train_step = spied
    quietly(run)
    return sorted(seen)


def test_samples_are_left_out_and_stay_so_after_a_resume(ranks: Any, corpus: str, tmp_path: Path) -> None:
    """Batches of 4; 6 to 9 are left out, hence 4 and 5 with them: their batch would hold 6. No flag at the resume."""
    config = configured(corpus, tmp_path, 3, load=str(tmp_path))
    skipping = replace(config, data=replace(config.data, skip_samples="6:10"))
    first, second = ranks(2).run(samples_read, skipping)
    assert sorted(first + second) == [0, 1, 2, 3, *range(10, 18)]
    on = replace(config, training=replace(config.training, train_iters=4))
    first, second = ranks(2).run(samples_read, on)
    assert sorted(first + second) == [18, 19, 20, 21]


def test_another_global_batch_goes_on_behind_the_last_sample(ranks: Any, corpus: str, tmp_path: Path) -> None:
    """Two batches of 4, then of 6: no sample twice, none left out."""
    config = configured(corpus, tmp_path, 2, load=str(tmp_path))
    first, second = ranks(2).run(samples_read, config)
    assert sorted(first + second) == [*range(8)]
    larger = replace(config, training=replace(config.training, global_batch_size=6, train_iters=4))
    first, second = ranks(2).run(samples_read, larger)
    assert sorted(first + second) == [*range(8, 20)]


@pytest.mark.second
def test_back_to_a_checkpoint_by_name_and_on_without_some_samples(ranks: Any, corpus: str, tmp_path: Path) -> None:
    """The recipe of docs/cluster.md: from 2, although 4 was saved, into the same folder; resumes stay there."""
    config = configured(corpus, tmp_path, 4, save_interval=1)
    assert ranks(2).run(train, 2, config) == [(4, "")] * 2
    spike = weights(tmp_path / "iter_0000003")
    back = replace(config, checkpoint=replace(config.checkpoint, load=str(tmp_path / "iter_0000002")))
    back = replace(back, training=replace(back.training, train_iters=3), data=replace(back.data, skip_samples="9:11"))
    first, second = ranks(2).run(samples_read, back)
    assert sorted(first + second) == [11, 12, 13, 14]
    assert not torch.equal(weights(tmp_path / "iter_0000003"), spike)
    assert (tmp_path / "latest").read_text() == "iter_0000003\n"
    on = replace(config, checkpoint=replace(config.checkpoint, load=str(tmp_path)))
    first, second = ranks(2).run(samples_read, on)
    assert sorted(first + second) == [15, 16, 17, 18]


# -- asked to stop


def signalled(rank: int, config: Config, numbers: list[int], at: int) -> tuple[int, Wish | None]:
    """A run of which rank 1 alone is sent signals, in the middle of an iteration."""
    with Signals() as signals:
        signals.joined()
        run = run_of(rank, 2, config)
        run.wishes.signals = signals
        step = run.trainer.engine.train_step

        def interrupted(iteration: int, batches: Any, samples: int) -> Any:
            if iteration == at and rank == 1:
                for number in numbers:
                    os.kill(os.getpid(), number)
            return step(iteration, batches, samples)

        run.trainer.engine.train_step = interrupted
        stop = quietly(run)
        return run.trainer.progress.iteration, stop


@pytest.mark.parametrize(
    "numbers", by_default([[signal.SIGUSR1], [signal.SIGTERM, signal.SIGTERM], [signal.SIGINT]], 1), ids=str
)
def test_a_signal_to_one_rank_stops_all_after_the_step(
    ranks: Any, corpus: str, tmp_path: Path, numbers: list[int]
) -> None:
    """The run saves and ends with its exit code; the resumed run equals the uninterrupted one bit for bit."""
    whole, parts = configured(corpus, tmp_path / "whole", 5), configured(corpus, tmp_path / "parts", 5)
    parts = replace(parts, checkpoint=replace(parts.checkpoint, load=parts.checkpoint.save))
    assert ranks(2).run(train, 2, whole) == [(5, "")] * 2
    assert ranks(2).run(signalled, parts, numbers, 3) == [(3, Wish[f"STOP_{numbers[0].name}"])] * 2
    assert names(tmp_path / "parts") == [3]
    assert ranks(2).run(train, 2, parts) == [(5, "")] * 2
    found, wanted = (weights(tmp_path / name / "iter_0000005") for name in ("parts", "whole"))
    assert torch.equal(found, wanted)


def timed(rank: int, config: Config, job_end: float | None) -> tuple[int, Wish | None]:
    run = run_of(rank, 2, config)
    if rank == 0:
        limits = config.checkpoint
        run.wishes.clock = Clock(limits.exit_duration_minutes, limits.exit_before_minutes, lambda: job_end, time.time())
    stop = quietly(run)
    return run.trainer.progress.iteration, stop


def test_a_limit_that_rank_0_sees_stops_all(ranks: Any, corpus: str, tmp_path: Path) -> None:
    """Before any step nothing is saved; a stop file is obeyed once."""
    logs = LogConfig(log_dir=str(tmp_path / "logs"))
    config = replace(configured(corpus, tmp_path / "saved", 3, exit_before_minutes=60.0), log=logs)
    soon, later = time.time() + 600, time.time() + 6000
    assert ranks(2).run(timed, config, soon) == [(0, Wish.STOP_JOB_END)] * 2
    assert names(tmp_path / "saved") == []
    (tmp_path / "logs" / "stop").touch()
    assert ranks(2).run(timed, config, later) == [(0, Wish.STOP_FILE)] * 2
    assert ranks(2).run(timed, config, later) == [(3, None)] * 2


# -- dead runs


def poisoned_save(rank: int, config: Config) -> str:
    run = run_of(rank, 2, config)
    run.trainer.progress.iteration = 7
    if rank == 1:
        name = next(
            n
            for n, s in EngineState(run.trainer.engine).shards().items()
            if n.startswith("model.blocks.1") and s.data.numel()
        )
        EngineState(run.trainer.engine).shards()[name].data[-1] = float("nan")
    try:
        run.checkpoints.save(run.trainer.progress)
    except DeadRun as error:
        return str(error)
    return "saved"


def test_weights_that_are_not_finite_are_never_saved(ranks: Any, corpus: str, tmp_path: Path) -> None:
    (first, second) = ranks(2).run(poisoned_save, configured(corpus, tmp_path, 10))
    assert "iteration 7: weights of rank 1 are not finite; nothing is saved" in first
    assert "iteration 7: blocks.1." in second and "is not finite" in second
    assert names(tmp_path) == []


def test_a_run_without_targets_ends_with_an_error(ranks: Any, tmp_path: Path) -> None:
    """A corpus of end-of-document tokens alone, all masked; the checkpoint from before stays."""
    prefix = str(tmp_path / "empty")
    with IndexedWriter(prefix, np.uint16, {"tokenizer": "byte", "vocab_size": 257}) as writer:
        for _ in range(20):
            writer.add(np.full(100, 256))
    options = {"save_interval": 1, "keep_last": 1, "load": str(tmp_path / "saved")}
    config = configured(prefix, tmp_path / "saved", 20, eod=True, max_skipped_iterations=3, **options)
    for reached, error in ranks(2).run(train, 2, config):
        assert reached == 3 and error.startswith("DeadRun: iteration 3: 3 iterations in a row made no update")
        assert "no target counts in this batch" in error
    again = replace(config, training=replace(config.training, max_skipped_iterations=4))
    for reached, error in ranks(2).run(train, 2, again):  # the count continues over a resume, from 2 at iteration 2
        assert reached == 4 and "4 iterations in a row" in error


# -- saves


@pytest.mark.parametrize("stage", by_default([0, 3], 1))
def test_a_save_in_the_background_is_the_same_checkpoint(ranks: Any, corpus: str, tmp_path: Path, stage: int) -> None:
    """Training continues while a checkpoint is written; the last one is whole when the run ends."""
    for name, background in (("now", False), ("later", True)):
        config = configured(corpus, tmp_path / name, 5, save_interval=1, keep_last=4, async_save=background)
        config = replace(config, zero=replace(config.zero, zero_stage=stage))
        assert ranks(2).run(train, 2, config) == [(5, "")] * 2
        assert names(tmp_path / name) == [2, 3, 4, 5]
    for iteration in (2, 3, 4, 5):
        found, wanted = (weights(tmp_path / name / f"iter_000000{iteration}") for name in ("later", "now"))
        assert torch.equal(found, wanted)


def small_disk(rank: int, config: Config, stops: int, frees: int) -> tuple[int, str, list[float]]:
    """Rank 1 may write 5,000 bytes per file, too little for its shard; until wait number `frees` of the last save.

    Rank 0 is sent TERM in iteration `stops`.
    """
    run, waited = run_of(rank, 2, config), list[float]()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    step = run.trainer.engine.train_step

    def stopping(iteration: int, batches: Any, samples: int) -> Any:
        if iteration == stops and rank == 0:
            run.wishes.signals.noted = signal.SIGTERM
        return step(iteration, batches, samples)

    def wait(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == frees:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    run.trainer.engine.train_step = stopping
    run.checkpoints.waits, run.checkpoints.wait = (5.0, 6.0, 7.0), wait
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        quietly(run)
    except RuntimeError as error:
        return run.trainer.progress.iteration, str(error), waited
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return run.trainer.progress.iteration, "", waited


def moved_away(rank: int, config: Config, taken: bool) -> tuple[int, str]:
    """Move --save away before step 4. `taken`: another run begins there."""
    run, save = run_of(rank, 2, config), Path(config.checkpoint.save)
    run.checkpoints.lock = SaveLock(save) if rank == 0 else None
    step = run.trainer.engine.train_step

    def moving(iteration: int, batches: Any, samples: int) -> Any:
        if iteration == 4:
            run.checkpoints.finish_save()
        if iteration == 4 and rank == 0:
            save.rename(save.with_name("away"))
            if taken:
                save.mkdir()
                (save / ".owner").write_bytes(msgspec.json.encode(Generation("process 1 on another host", 0)))
        return step(iteration, batches, samples)

    run.trainer.engine.train_step = moving
    try:
        quietly(run)
    except ValueError as error:
        return run.trainer.progress.iteration, str(error)
    return run.trainer.progress.iteration, ""


@pytest.mark.parametrize("background", by_default([False, True], 0))
def test_a_save_folder_that_is_moved_away(ranks: Any, corpus: str, tmp_path: Path, background: bool) -> None:
    """It is made and locked again; but if another run has begun there, this one saves in a new folder, and ends."""
    save, away = tmp_path / "s", tmp_path / "away"
    config = configured(corpus, save, 6, save_interval=2, async_save=background)
    assert ranks(2).run(moved_away, config, False) == [(6, "")] * 2
    assert names(away) == [2] and names(save) == [4, 6] and (save / ".lock").exists()
    shutil.rmtree(away)
    shutil.rmtree(save)
    (first, error), second = ranks(2).run(moved_away, config, True)
    assert first == 4 and second == (first, error)
    (refuge,) = (path for path in tmp_path.iterdir() if path.name.startswith("s-"))
    assert names(away) == [2] and names(save) == [] and names(refuge) == [4]
    assert error.startswith(f"--save {save} was moved or deleted, and another run saves there: it is of process 1 on")
    assert error.endswith(f"This run has saved in {refuge}; --load {refuge} --save {refuge} resumes it")


@pytest.mark.parametrize("background", by_default([False, True], 0))
def test_a_save_that_fails(ranks: Any, corpus: str, tmp_path: Path, background: bool) -> None:
    """Training continues until the last save, which all ranks attempt again until there is space.

    The last save is a scheduled one, or not; or a signal ends the run where a scheduled save has failed.
    """
    for iterations, stops, frees, reached in ((5, 0, 0, 5), (4, 0, 0, 4), (5, 4, 0, 4), (4, 0, 2, 4), (5, 4, 3, 4)):
        row, root = (iterations, stops, frees), tmp_path / f"{iterations} {stops} {frees}"
        config = configured(corpus, root, iterations, save_interval=2, async_save=background)
        for iteration, error, waited in ranks(2).run(small_disk, config, stops, frees):
            assert iteration == reached and waited == [5.0, 6.0, 7.0][: frees or 3], row
            assert bool(error) == (not frees), (row, error)
            if error:
                assert f"iter_000000{reached} failed on rank 1: {root}/." in error and "File too large" in error, row
                assert error.endswith(f"4 attempts, iteration {reached} is lost: --save {root} has no checkpoint"), row
        assert names(root) == ([reached] if frees else []), row


# -- copies that must be equal


def drift(rank: int, world: int, config: Config, state: str, name: str) -> str:
    """Train a step, then flip a bit of the last rank's copy. Return the check's results before and after."""
    run = run_of(rank, world, config)
    record, model, samples = run.trainer.iterate(), config.model, run.trainer.config.training.global_batch_size
    total = record["tflops_per_device"] * world * record["step_seconds"] * 1e12  # along whichever axis
    assert total == pytest.approx(model_flops(run.trainer.config.model, samples))
    assert record["tokens_per_second"] * record["step_seconds"] == pytest.approx(samples * model.seq_length)
    check_replicas(run.trainer.engine, 1)
    if rank == world - 1:
        units = run.trainer.engine.zero.units.values()
        unit = next((unit for unit in units if name in unit.flat.layout.windows), None)
        if unit is None:
            routers = run.trainer.engine.routers
            data = routers.biases[routers.model.expert_layers.index(int(name.split()[1]))]
        elif state == "weights":
            data = unit.weights.unsharded[unit.flat.layout.windows[name].slice()]
        else:
            part = next(
                part for part in unit.flat.owned_parts() if part.weight.spec.name == name and part.stop > part.start
            )
            data = states_of(unit.optimizer, part)[state]
        data[:1].view(torch.int32)[0] ^= 1
    try:
        check_replicas(run.trainer.engine, 1)
    except DeadRun as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("axes", "zero", "state", "name"),
    [
        ({}, {"zero_stage": 0}, "exp_avg", "blocks.1.mlp.up.weight"),
        ({}, {"zero_stage": 2}, "weights", "blocks.0.norm1.bias"),
        ({}, {"zero_stage": 3, "zero_shard_size": 2}, "master", "blocks.1.mlp.down.weight"),
        ({"tensor_model_parallel_size": 2}, {}, "exp_avg_sq", "blocks.0.attention.proj.bias"),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, {}, "master", "blocks.1.norm2.weight"),
        ({"pipeline_model_parallel_size": 2}, {}, "master", "token_embedding.weight"),
    ],
    ids=str,
)
def test_a_copy_that_drifts_is_named(
    ranks: Any, corpus: str, tmp_path: Path, axes: dict, zero: dict, state: str, name: str
) -> None:
    check_drift(ranks, configured(corpus, tmp_path, 3), axes, zero, state, name)


@pytest.mark.parametrize(
    "axes",
    [{}, {"tensor_model_parallel_size": 2}, {"context_parallel_size": 2}, {"pipeline_model_parallel_size": 2}],
    ids=str,
)
def test_a_routers_biases_that_drift_are_named(ranks: Any, corpus: str, tmp_path: Path, axes: dict) -> None:
    """All ranks have those of all layers."""
    config = configured(corpus, tmp_path, 3)
    experts = {"num_experts": 4, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    config = replace(config, model=replace(config.model, **of_family("llama"), moe_layer_freq="DE", **experts))
    check_drift(ranks, config, axes, {}, "the router's biases", "layer 1")


def check_drift(ranks: Any, config: Config, axes: dict, zero: dict, state: str, name: str) -> None:
    config = replace(config, parallel=replace(config.parallel, **axes), zero=replace(config.zero, **zero))
    kind = {"master": "the master weights", "weights": "the weights"}.get(state, state)
    world = 2 * zero.get("zero_shard_size", 1)  # the last rank's twin: of two ranks the other, of two groups its place
    errors = ranks(world).run(drift, world, config, state, name)
    for error in (errors[-1], errors[world // 2 - 1]):
        assert f"iteration 1: copies that must be equal differ (--check-replicas-interval): {kind} of {name}: " in error
        assert f"rank {world - 1} unlike rank {world // 2 - 1}" in error and "; and " not in error
    assert all("copies that must be equal differ" in error for error in errors)


def compared(rank: int, world: int, config: Config) -> list[float]:
    return run_of(rank, world, config).trainer.iterate()["compute_seconds"]


def test_computing_times_are_compared(ranks: Any, corpus: str, tmp_path: Path) -> None:
    config = configured(corpus, tmp_path, 4)
    config = replace(config, monitor=replace(config.monitor, straggler_interval=1))
    first, second = ranks(2).run(compared, 2, config)
    assert first == second == sorted(first) and first[0] > 0


def slow_ranks(rank: int, config: Config) -> object:
    """Report of an iteration in which rank 1 computed for five seconds, and rank 0 for one."""
    mesh = run_of(rank, 2, config).mesh
    late = Interval(Forward("blocks.0", 0, True), 0, (1 + 4 * rank) * 10**9)
    return stragglers.report_slow(mesh, 3, [late]).get("slow_ranks")


@pytest.mark.parametrize("tp", [1, 2])
def test_the_slow_rank_is_named(ranks: Any, corpus: str, tmp_path: Path, tp: int) -> None:
    """Compare it with all ranks of its stage, over data and over tensor parallelism."""
    for found in ranks(2).run(slow_ranks, configured(corpus, tmp_path, 4, tp=tp)):
        assert [(each["rank"], each["times"]) for each in found] == [(1, 1.67)]


def test_copies_of_a_sound_run_are_equal(ranks: Any, corpus: str, tmp_path: Path) -> None:
    """Over tp 2 and dp 2, every step."""
    config = configured(corpus, tmp_path, 4, tp=2)
    config = replace(config, monitor=replace(config.monitor, check_replicas_interval=1, straggler_interval=2))
    assert ranks(4).run(train, 4, config) == [(4, "")] * 4


# -- events.jsonl and report.html


def events_of(folder: Path) -> list[tuple[str, int, str]]:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [(event["event"], event["iteration"], event.get("why", "")) for event in events]


def test_a_run_leaves_its_starts_its_ends_and_a_report(corpus: str, tmp_path: Path) -> None:
    """Done, with nothing to do, resumed and stopped by the stop file, ended by an error."""
    log = LogConfig(log_dir=str(tmp_path))

    def run(iterations: int) -> TrainingRun:
        return run_of(0, 1, replace(configured(corpus, tmp_path, iterations, load=str(tmp_path)), log=log))

    first = [("start", 0, ""), ("end", 2, "done")]
    quietly(run(2))
    assert events_of(tmp_path) == first
    page = (tmp_path / "report.html").read_text()
    assert ": done." in page and "1 rank: pp 1 x dp 1 x tp 1" in page and "--hidden-size" in page
    (tmp_path / "report.html").unlink()
    quietly(run(2))  # nothing to do
    assert events_of(tmp_path) == first and not (tmp_path / "report.html").exists()

    stopped = run(9)
    read, seen = stopped.trainer.train_batches.batch, []

    def touch(consumed: int) -> Any:
        seen.append(consumed)
        (tmp_path / "stop").touch()
        return read(consumed)

    stopped.trainer.train_batches.batch = touch
    quietly(stopped)
    assert len(seen) == 1
    assert events_of(tmp_path) == [*first, ("start", 2, ""), ("end", 3, "the stop file")]
    assert "resumed once" in (tmp_path / "report.html").read_text()

    fails = run(9)
    fails.trainer.train_batches.batch = None
    with pytest.raises(TypeError):
        quietly(fails)
    assert events_of(tmp_path)[-1] == ("end", 3, "TypeError: 'NoneType' object is not callable")


@pytest.mark.second
def test_a_run_without_a_report_writes_none(corpus: str, tmp_path: Path) -> None:
    log = LogConfig(log_dir=str(tmp_path), report=False)
    quietly(run_of(0, 1, replace(configured(corpus, tmp_path, 1), log=log)))
    assert (tmp_path / "metrics.jsonl").is_file() and not (tmp_path / "report.html").exists()


def test_the_time_of_resumed_runs_is_recorded(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Saves and evaluations between steps, the last save, which is slow, and the first step after a resume.

    The newest checkpoint is lost, so that two iterations are computed again.
    """
    log = LogConfig(log_dir=str(tmp_path))
    config = replace(configured(corpus, tmp_path, 5, load=str(tmp_path), save_interval=3), log=log)
    config = replace(config, evaluation=replace(config.evaluation, eval_interval=4, eval_iters=1))
    save = Checkpoints.save

    def slow(checkpoints: Checkpoints, progress: Any, last: bool = False) -> None:
        save(checkpoints, progress, last)
        if last:
            time.sleep(0.3)

    monkeypatch.setattr(Checkpoints, "save", slow)

    def records() -> list[dict[str, Any]]:
        return [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]

    def events() -> list[dict[str, Any]]:
        return [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]

    quietly(run_of(0, 1, config))
    first = records()
    assert [list(record.get("pause_seconds", {})) for record in first] == [[], [], [], ["save", "evaluation"], []]
    assert events()[1]["pause_seconds"]["save"] >= 0.3
    assert list(first[0]["start_seconds"]) == ["checkpoint", "first step"] and "recovery_seconds" not in first[0]
    assert not any("start_seconds" in record for record in first[1:])

    shutil.rmtree(tmp_path / "iter_0000005")
    (tmp_path / "latest").write_text("iter_0000003")
    capfd.readouterr()
    run = run_of(0, 1, config)
    run.train()
    said, (*_, again, last) = capfd.readouterr().out, records()
    assert again["iteration"] == 4 and again["start_seconds"]["first step"] >= again["step_seconds"]
    assert again["at"] <= first[4]["at"] + again["recovery_seconds"] <= last["at"]
    assert "resumed in " in said and "s after the last record; 2 iterations to compute again\n" in said
    start = events()[2]
    lost = sum(record["step_seconds"] + sum(record.get("pause_seconds", {}).values()) for record in first[3:])
    assert start["lost_iterations"] == 2 and start["lost_seconds"] == pytest.approx(lost)
    assert start["down_seconds"] <= start["at"] - events()[1]["at"]  # the slow save is no time without a process


def test_a_report_that_fails_fails_no_run(corpus: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("events.jsonl", "report.html"):
        (tmp_path / name / "x").mkdir(parents=True)
    run = run_of(0, 1, replace(configured(corpus, tmp_path, 1), log=LogConfig(log_dir=str(tmp_path))))
    assert quietly(run) is None and names(tmp_path) == [1]
    said = capfd.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in said] == ["WARNING"] * 3, said
    assert sum("lacks an event" in line for line in said) == 2 and "no report.html: " in said[-1]
