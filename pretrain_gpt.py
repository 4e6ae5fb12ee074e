#!/usr/bin/env python3
"""Pretrain a GPT model: alone, under torchrun or under srun. `--help` lists the flags.

Exit codes: 0 done, or stopped as planned; 75 stopped early by a signal or the job's time limit, after saving; 1 an
error; 124 no progress (--hang-timeout); 130 interrupted twice, unsaved. See Note [Exit codes] in
megazero/run/stopping.py.
"""

import contextlib
import gc
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

# What needs torch is imported where it is used: a run that is refused at once does not wait seconds for it.
from megazero.comm.launch.world import World, read_world, report_to_launcher
from megazero.config.cli import Command, read
from megazero.config.gpu_defaults import gpu_defaults
from megazero.config.schema import Config
from megazero.config.validate import check_device, check_values, plans
from megazero.files import explain
from megazero.log import log, log_as
from megazero.optional import missing_package
from megazero.plan.layout.resolve import resolve
from megazero.run.stopping import Clock, DeadRun, Signals, Stop

HANG_PATIENCE_SECONDS = 10.0  # in which the watchdogs of the other ranks see the hang too


def main(argv: list[str]) -> None:
    world = World(0, 1, 0, "single")
    try:
        command = read(argv, lambda: read_world().size)
        config = command.config
        if not plans(config.plan):
            world = read_world()
            log_as(world.rank, world.size)
        for note in command.notes:
            log.info(note)
        check_values(config)
    except ValueError as error:
        log.error(f"ValueError: {error}")
        report_to_launcher(f"ValueError: {error}")
        sys.exit(1)
    run(command, world)


def run(command: Command, world: World) -> None:
    """Do what the command line asks for. Report a failure, to the other ranks too, before this rank ends."""
    from megazero.comm.launch import failures, launch
    from megazero.comm.launch.errors import PeerLost
    from megazero.step.engine import LossScaleExhausted

    try:
        if plans(command.config.plan):
            predict(command)
            return
        with Signals() as signals:
            launch.end_with_launcher(world)
            stop = pretrain(command, world, signals)
        if stop is not None:
            sys.exit(stop.exit_code)
    except ValueError as error:
        fail(world, f"ValueError: {error}")
    except (LossScaleExhausted, DeadRun) as error:
        fail(world, str(error))
    except PeerLost as error:
        # At once: this rank may be ended before they answer.
        log.error(f"{error}{place_of(error)}; asking the others why")
        fail(world, failures.explain(world, error), report=False)
    except ModuleNotFoundError as error:
        fail(world, f"this run {missing_package(error)}")
    except KeyboardInterrupt:
        log.error("interrupted; --load resumes from the last checkpoint in --save")
        launch.abort(130)
    except Exception as error:
        traceback.print_exc()
        fail(world, f"{type(error).__name__}: {error}{place_of(error)}")


def predict(command: Command) -> None:
    """Print what --plan or --plan-search asks for: no rank is started, no data is opened."""
    from rich.console import Console

    from megazero.price import plan_report
    from megazero.price.plan import make_plan, plan_config
    from megazero.price.search import search_report
    from megazero.price.time.devices import load_device

    console = Console(width=None if sys.stdout.isatty() else 160)
    config = command.config
    device = load_device(config.plan.device_type)
    if device.kind == "cuda":
        config, chosen = gpu_defaults(config, command.given, device.fastest_precision)
        if chosen:
            log.info(chosen)
    if config.plan.plan_search:
        search_report.run_search(config, command.args, console)
        return
    plan = make_plan(*plan_config(config))
    plan_report.show(plan, console)
    if config.log.log_dir:
        plan_report.write(plan, Path(config.log.log_dir))


def place_of(error: BaseException) -> str:
    """Name the operation of the step that raised an exception, where the interpreter has noted one."""
    return "".join(f" {note}" for note in getattr(error, "__notes__", [])[:1])


def pretrain(command: Command, world: World, signals: Signals) -> Stop | None:
    """Train, and return what ended the run early, if anything did.

    Everything that can be refused is refused before ranks meet or a file is made. Rank 0 refuses for all when they have
    met, because the others would wait for it.
    """
    from megazero import checkpoint
    from megazero.comm.launch import failures, launch, scheduler
    from megazero.comm.launch.agreement import agree
    from megazero.comm.launch.machine import bind_to_near_cpus, device_name, environment, machine
    from megazero.comm.mesh.mesh import Mesh
    from megazero.data.remembered import data_tokenizer
    from megazero.model.stage import declare
    from megazero.observe import start_report
    from megazero.observe.start_notes import this_processor
    from megazero.observe.watchdog import Watchdog
    from megazero.price.bytes.capacity import check_memory
    from megazero.run.inputs import open_data, require_data
    from megazero.run.resume import find_checkpoint
    from megazero.run.same_run import run_values
    from megazero.run.trainer import Trainer

    config = command.config
    device = launch.pick_device(world)
    fastest = launch.fastest_precision(device) if device.type == "cuda" else ""
    asked, (config, chosen) = config, with_gpu_defaults(command, fastest)
    if config.plan.rehearse:
        return rehearse(config, world, chosen)
    if device.type == "cuda":
        bind_to_near_cpus(device)
    require_data(config)  # before a tokenizer is asked for, which a corpus may name
    tokenizer = data_tokenizer(config)
    config, layout = resolve(config, world.size, tokenizer.vocab_size if tokenizer else 0, declare)
    check_device(config, device.type)
    if config.training.deterministic_mode and device.type == "cuda":
        launch.make_deterministic()
    memory = machine(world, device)
    check_memory(config, layout, world.rank, memory)
    datasets = open_data(config, tokenizer)
    limits = config.checkpoint
    leads, clock, refused = world.rank == 0, None, ""
    by_time = 0.0 if limits.save_interval or not limits.save else limits.save_interval_minutes
    ends = limits.exit_duration_minutes, limits.exit_before_minutes
    if leads:  # for all: it reads what the others would read
        try:
            find_checkpoint(config)
            clock = Clock(*ends, scheduler.job_end, save_minutes=by_time)
        except (OSError, ValueError) as error:
            refused = explain(error) if isinstance(error, OSError) else str(error)
            if world.size > 1:  # at once: the others may come late, or never
                log.error(f"{refused}; this rank ends once all ranks have joined")
    timeout, checks = config.parallel.distributed_timeout_minutes, config.zero.poison_buffers
    hosts = launch.start(world, device, timeout)
    agree(lambda: run_values(config, datasets, tokenizer), world, device, hosts, refused)
    if leads:
        processor = this_processor() if device.type == "cpu" else None
        shown = asked, config, layout, memory, device_name(device), chosen, processor
        screen = start_report.screen(*shown, tokenizer.vocab_size if tokenizer else 0, datasets.train_tokens)
        log.info("\n".join(screen))
    eod = tokenizer.eod if tokenizer and config.data.document_flags else None
    with launch.limit(world, 60 * (launch.JOIN_MINUTES + timeout), "making the groups of ranks"):
        ranks = Mesh.build(layout, world.rank, device, timeout, check_buffers=checks, hosts=hosts)
    with ranks.world.peer_errors("looking for a checkpoint"):
        lock = checkpoint.lock(Path(config.checkpoint.save), ranks.host_group) if config.checkpoint.save else None
        path = find_checkpoint(config, ranks.host_group)
    patience = max(HANG_PATIENCE_SECONDS, 6 * config.monitor.hang_timeout)  # a tenth of the limit
    watchdog = Watchdog(config.monitor.hang_timeout, lambda place: failures.end_hung(world, place, hosts, patience))
    trainer = Trainer(config, ranks, datasets, eod, signals, clock, watchdog, tokenizer, command)
    if leads:
        details = start_report.details(config, layout, memory, hosts, environment(), trainer.choices)
        start_report.hand_out(config, screen, details)
    silent = world.size > 1 and device.type == "cuda"  # NCCL does not say that a peer has failed
    peers = failures.ending_with_peers(world) if silent else contextlib.nullcontext()
    with peers, watchdog.over(trainer.engine.interpreter), frozen_objects():
        stop = trainer.evaluate_only(path) if config.evaluation.eval_only else trainer.run(path)
    if lock is not None:
        lock.release()
    launch.stop(world, timeout)
    return stop


def with_gpu_defaults(command: Command, fastest: str) -> tuple[Config, str]:
    """Return the configuration with the defaults of a GPU that runs, or that a rehearsal imitates; and a line on them.

    Args:
        fastest: the precision in which the GPU here is fastest; empty: there is none.
    """
    plan = command.config.plan
    if plan.rehearse and plan.rehearse_on != "here":
        fastest = "bf16" if plan.rehearse_on == "gpu" else ""
    return gpu_defaults(command.config, command.given, fastest) if fastest else (command.config, "")


@contextlib.contextmanager
def frozen_objects() -> Iterator[None]:
    """Let garbage collections, which come at different times on each rank, skip the modules and the engine."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()  # else Triton's bindings report leaks when the process exits


def rehearse(config: Config, world: World, chosen: str) -> None:
    """Do what --rehearse asks for."""
    from megazero.price.plan import vocabulary
    from megazero.rehearse.rehearsal_report import run_rehearsal

    if chosen:
        log.info(chosen)
    run_rehearsal(config, world, vocabulary(config))


def fail(world: World, message: str, report: bool = True) -> NoReturn:
    """Report the failure, to the other ranks too, and end this process at once, so that their waits for it fail."""
    from megazero.comm.launch import failures, launch

    log.error(message)
    if report:
        failures.report_failure(world, message)
    launch.abort(1)


def command() -> None:
    """Run as the console command megazero-pretrain."""
    main(sys.argv[1:])


if __name__ == "__main__":
    command()
