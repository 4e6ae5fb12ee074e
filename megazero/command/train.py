"""A run: join the other ranks, build the model, train, and stop."""

import contextlib
import functools
import gc
from collections.abc import Iterator
from pathlib import Path

import torch

from megazero import checkpoint
from megazero.checkpoint.locking import SaveLock
from megazero.cluster import failures, launch, scheduler
from megazero.cluster.machine import environment
from megazero.cluster.same_start import agree
from megazero.cluster.watchdog import Watchdog
from megazero.command.prepare import Checked, Prepared, prepare
from megazero.engine.mesh.mesh import Mesh
from megazero.flags.cli import Command
from megazero.flags.config import Config
from megazero.flags.corpus_flags import document_flags
from megazero.flags.flag_names import with_values
from megazero.interop.huggingface.export import export_run
from megazero.interop.huggingface.weight_files import open_weights
from megazero.log import log
from megazero.observe import start_report
from megazero.observe.start_clock import StartClock, process_start
from megazero.run import relayout
from megazero.run.checkpoints import CheckpointLoader, Checkpoints
from megazero.run.exports import Exports
from megazero.run.resume import find_checkpoint
from megazero.run.run_state import RunState, is_hugging_face
from megazero.run.same_run import run_values
from megazero.run.stopping import Signals, Wish, Wishes
from megazero.run.task_scores import task_words
from megazero.run.trainer import Trainer
from megazero.run.training_run import TrainingRun
from megazero.world import World

LOCK_SECONDS = 180.0  # in which a lost node gives up the lock of --save: file servers wait so long for a client
HANG_PATIENCE_SECONDS = 10.0  # in which the watchdogs of the other ranks see the hang too


def train(command: Command, world: World, signals: Signals) -> Wish | None:
    """Train or evaluate; returns the request that ended the run early."""
    clock = StartClock(process_start())
    clock.mark("process")
    prepared = prepare(
        command._replace(stack=command.stack.over("--elastic", relayout.resuming(command.config))), world
    )
    clock.mark("checks")
    mesh, screen = connect(prepared)
    signals.joined()
    if world.rank == 0:
        scheduler.report_begin(prepared.checked.config.checkpoint.save)
    clock.mark("joining")
    with mesh.world.peer_errors("locking --save"):
        lock = take_folder(prepared, mesh)
    config, stages = prepared.checked.config, [each.stage for each in prepared.stages]
    silent = world.has_peers and mesh.device.type == "cuda"  # NCCL does not report that a peer has failed
    with failures.ending_with_peers(world) if silent else contextlib.nullcontext():
        sample = next_sample(config, mesh) if len(stages) > 1 else 0
        goes_on = True
        while goes_on:
            at = next(k for k, stage in enumerate(stages) if stage.holds(sample))
            run = build(prepared, prepared.stages[at], mesh, signals=signals, clock=clock, lock=lock)
            clock.mark("model")
            if world.rank == 0 and screen:
                _hand_out_report(prepared, mesh, screen, run)
            with run.watchdog.over(run.trainer.engine.interpreter), frozen_objects():
                stop = run.evaluate() if config.evaluation.eval_only else run.train()
            reached, goes_on = run.trainer.progress, run.goes_on
            sample = reached.consumed_samples
            del run
            if goes_on:
                free_memory(mesh)  # before the engine of the next stage is built
                prepared, clock, screen = continuing(prepared) if reached.iteration else prepared, StartClock(), []
    if lock is not None:
        lock.release()
    launch.stop(world, config.parallel.distributed_timeout_minutes)
    return stop


def free_memory(mesh: Mesh) -> None:
    """Free the engine of a stage that has ended, of which a cycle of references may be left."""
    gc.collect()
    if mesh.device.type == "cuda":
        torch.cuda.empty_cache()  # buffers of the next stage have other sizes


def next_sample(config: Config, mesh: Mesh) -> int:
    """Return the sample at which the run continues from the newest checkpoint on the disk; 0 at the beginning."""
    path = find_checkpoint(config, mesh.host.group)
    if path is None or is_hugging_face(path) or (config.checkpoint.finetune and config.trains):
        return 0
    return RunState.read(path, mesh.host.group).consumed_samples


def continuing(prepared: Prepared) -> Prepared:
    """Return the run with stages that begin from the checkpoint of the one before."""

    def of(each: Checked) -> Checked:
        values = {"load": each.config.checkpoint.save, "finetune": False, "load-exact": False}
        return each._replace(config=with_values(each.config, values))

    return prepared._replace(stages=tuple(map(of, prepared.stages)))


def connect(prepared: Prepared) -> tuple[Mesh, list[str]]:
    """Join the other ranks, agree with them on the run, and make the groups of the mesh.

    Returns:
        The mesh, and the start report on the console; empty except on rank 0.

    Raises:
        ValueError: on every rank, if rank 0 refuses the run or the ranks' flags, code or data differ.
    """
    (world, device, machine), (config, layout, tokenizer, datasets, _, tasks) = prepared.ranks, prepared.checked
    minutes, screen = config.parallel.distributed_timeout_minutes, []
    hosts = launch.start(world, device, minutes)
    later = [(each.stage, each.datasets) for each in prepared.stages[1:]]
    digest = tasks.requests.tasks.digest if tasks is not None else ""
    values = functools.partial(run_values, config, datasets, tokenizer, stages=later, tasks=digest)
    agree(values, world, device, hosts=hosts, refused=prepared.verdict.refusal)
    if world.rank == 0:
        screen = start_report.screen(
            asked=prepared.choice.command.stack.asked.config,
            config=config,
            layout=layout,
            machine=machine,
            device=start_report.device_text(device, config.training.precision),
            chosen=prepared.note,
            num_ids=tokenizer.vocab_size if tokenizer else 0,
            corpus=datasets.train_tokens,
            auto=prepared.choice.report,
            tasks=task_words(config, tasks) if tasks is not None else "",
            stages=[each.stage for each in prepared.stages],
        )
        log.info("\n".join(screen))
    with launch.limit(world, 60 * (launch.JOIN_MINUTES + minutes), "making the groups of ranks"):
        checks = config.zero.poison_buffers
        return Mesh.build(layout, world.rank, device, minutes, check_buffers=checks, hosts=hosts), screen


def take_folder(prepared: Prepared, mesh: Mesh) -> SaveLock | None:
    """Lock --save. With --elastic, complete the table of layouts there."""
    config, (world, *_), lock = prepared.checked.config, prepared.ranks, None
    if config.checkpoint.save:
        patience = LOCK_SECONDS if config.parallel.elastic else 0.0
        lock = checkpoint.lock(Path(config.checkpoint.save), mesh.host.group, patience)
    if prepared.choice.table is not None:
        relayout.complete(prepared.choice.table, world.rank, world.size, mesh.host.group)
    return lock


def build(
    prepared: Prepared, checked: Checked, mesh: Mesh, signals: Signals, clock: StartClock, lock: SaveLock | None
) -> TrainingRun:
    """Build the model of a stage, and the parts of the run around it."""
    (world, *_), (config, _, tokenizer, datasets, stage, tasks) = prepared.ranks, checked
    command, hosts = prepared.choice.command, mesh.world.hosts
    patience = max(HANG_PATIENCE_SECONDS, 6 * config.monitor.hang_timeout)  # a tenth of the limit
    watchdog = Watchdog(config.monitor.hang_timeout, lambda place: failures.end_hung(world, place, hosts, patience))
    trainer = Trainer(
        config,
        mesh,
        datasets,
        eod=tokenizer.eod if tokenizer and document_flags(config.data) else None,
        watchdog=watchdog,
        tokenizer=tokenizer,
        tasks=tasks,
    )
    saves = Checkpoints(
        trainer.config, trainer.engine, datasets, tokenizer=tokenizer, watchdog=watchdog, stage=stage, lock=lock
    )
    stop_file = Path(config.log.log_dir) / "stop" if world.rank == 0 and config.log.log_dir else None
    return TrainingRun(
        trainer,
        CheckpointLoader(saves, command.given, open_weights, [each.stage for each in prepared.stages]),
        Wishes(signals, prepared.verdict.clock, stop_file),
        command=command,
        exports=_exports(config, saves),
        clock=clock,
        elastic=prepared.choice.line,
    )


def _exports(config: Config, saves: Checkpoints) -> Exports | None:
    if not (config.checkpoint.save_hf and config.trains):
        return None
    return Exports(saves, lambda path, output: export_run(path, output, config.training.precision))


def _hand_out_report(prepared: Prepared, mesh: Mesh, screen: list[str], run: TrainingRun) -> None:
    config, layout, *_ = prepared.checked
    details = start_report.details(
        config,
        layout,
        prepared.ranks.machine,
        hosts=mesh.world.hosts,
        environment=environment(),
        notes=run.trainer.choices,
        sources=prepared.choice.command.stack.table(config),
    )
    start_report.hand_out(config, screen, details)


@contextlib.contextmanager
def frozen_objects() -> Iterator[None]:
    """Exclude modules and engine from garbage collections, which interrupt each rank at a different time."""
    gc.collect()
    gc.freeze()  # the engine too
    try:
        yield
    finally:
        gc.unfreeze()  # else Triton's bindings report leaks when the process exits
