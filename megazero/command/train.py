"""A run: join the other ranks, build the model, train, and stop."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path

from megazero import checkpoint
from megazero.checkpoint.locking import SaveLock
from megazero.cluster import failures, launch
from megazero.cluster.machine import environment
from megazero.cluster.same_start import agree
from megazero.cluster.watchdog import Watchdog
from megazero.command.prepare import Prepared, prepare
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.options.schema import Config
from megazero.flags.cli import Command
from megazero.interop.huggingface.export import export_run
from megazero.interop.huggingface.weight_files import open_weights
from megazero.log import log
from megazero.observe import start_report
from megazero.observe.start_clock import StartClock, process_start
from megazero.run import relayout
from megazero.run.checkpoints import CheckpointLoader, Checkpoints
from megazero.run.exports import Exports
from megazero.run.same_run import run_values
from megazero.run.stopping import Signals, Wish, Wishes
from megazero.run.trainer import Trainer
from megazero.run.training_run import TrainingRun
from megazero.world import World

LOCK_SECONDS = 180.0  # in which a lost node gives up the lock of --save: file servers wait so long for a client
HANG_PATIENCE_SECONDS = 10.0  # in which the watchdogs of the other ranks see the hang too


def train(command: Command, world: World, signals: Signals) -> Wish | None:
    """Train or evaluate; returns the request that ended the run early."""
    clock = StartClock(process_start())
    clock.mark("process")
    prepared = prepare(command._replace(config=relayout.resuming(command.config)), world)
    clock.mark("checks")
    mesh, screen = connect(prepared)
    signals.joined()
    clock.mark("joining")
    with mesh.world.peer_errors("locking --save"):
        lock = take_folder(prepared, mesh)
    config = prepared.checked.config
    run = build(prepared, mesh, signals, clock)
    clock.mark("model")
    if world.rank == 0:
        _hand_out_report(prepared, mesh, screen, run)
    silent = world.has_peers and mesh.device.type == "cuda"  # NCCL does not report that a peer has failed
    peers = failures.ending_with_peers(world) if silent else contextlib.nullcontext()
    with peers, run.watchdog.over(run.trainer.engine.interpreter), frozen_objects():
        stop = run.evaluate() if config.evaluation.eval_only else run.train()
    if lock is not None:
        lock.release()
    launch.stop(world, config.parallel.distributed_timeout_minutes)
    return stop


def connect(prepared: Prepared) -> tuple[Mesh, list[str]]:
    """Join the other ranks, agree with them on the run, and make the groups of the mesh.

    Returns:
        The mesh, and the start report on the console; empty except on rank 0.

    Raises:
        ValueError: on every rank, if rank 0 refuses the run or the ranks' flags, code or data differ.
    """
    (world, device, machine), (config, layout, tokenizer, datasets) = prepared.ranks, prepared.checked
    minutes, screen = config.parallel.distributed_timeout_minutes, []
    hosts = launch.start(world, device, minutes)
    agree(lambda: run_values(config, datasets, tokenizer), world, device, hosts=hosts, refused=prepared.verdict.refusal)
    if world.rank == 0:
        screen = start_report.screen(
            asked=prepared.choice.command.config,
            config=config,
            layout=layout,
            machine=machine,
            device=start_report.device_text(device, config.training.precision),
            chosen=prepared.note,
            num_ids=tokenizer.vocab_size if tokenizer else 0,
            corpus=datasets.train_tokens,
            auto=prepared.choice.report,
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
        lock = checkpoint.lock(Path(config.checkpoint.save), mesh.host_group, patience)
    if prepared.choice.table is not None:
        relayout.complete(prepared.choice.table, world.rank, world.size, mesh.host_group)
    return lock


def build(prepared: Prepared, mesh: Mesh, signals: Signals, clock: StartClock) -> TrainingRun:
    """Build the model, and the parts of the run around it."""
    (world, *_), (config, _, tokenizer, datasets) = prepared.ranks, prepared.checked
    command, hosts = prepared.choice.command, mesh.world.hosts
    patience = max(HANG_PATIENCE_SECONDS, 6 * config.monitor.hang_timeout)  # a tenth of the limit
    watchdog = Watchdog(config.monitor.hang_timeout, lambda place: failures.end_hung(world, place, hosts, patience))
    trainer = Trainer(
        config,
        mesh,
        datasets,
        eod=tokenizer.eod if tokenizer and config.data.document_flags else None,
        watchdog=watchdog,
        tokenizer=tokenizer,
    )
    saves = Checkpoints(trainer.config, trainer.engine, datasets, tokenizer=tokenizer, watchdog=watchdog)
    stop_file = Path(config.log.log_dir) / "stop" if world.rank == 0 and config.log.log_dir else None
    return TrainingRun(
        trainer,
        CheckpointLoader(saves, command.given, open_weights),
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
