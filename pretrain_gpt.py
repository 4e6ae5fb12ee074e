#!/usr/bin/env python3
"""Pretrain a GPT model: alone, under torchrun or under srun. `--help` lists the flags.

Exit codes: 0 done, or stopped as planned; 75 stopped early by a signal or the job's time limit, after saving; 1 an
error; 124 no progress (--hang-timeout); 130 interrupted twice, unsaved. See Note [Exit codes] in
megazero/run/stopping.py.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

# Modules that need torch are imported in functions, so that bad flags are refused without seconds of imports.
from megazero.comm.launch.world import World, read_world, report_to_launcher
from megazero.config.cli import Command, read
from megazero.config.gpu_defaults import gpu_defaults
from megazero.config.schema import Config
from megazero.config.validate import check_device, check_values, plans
from megazero.files import explain
from megazero.huggingface.model_flags import find_model
from megazero.log import log, log_as
from megazero.optional import missing_package
from megazero.plan.layout.resolve import resolve
from megazero.run.stopping import Clock, DeadRun, Signals, Wish, Wishes

if TYPE_CHECKING:
    import torch

    from megazero.comm.mesh.mesh import Mesh
    from megazero.data.corpora import Datasets
    from megazero.data.tokenizer import Tokenizer
    from megazero.memory.host import Machine
    from megazero.plan.layout.topology import Layout
    from megazero.run.relayout import Question

LOCK_SECONDS = 180.0  # in which a lost node gives up the lock of --save: file servers wait so long for a client
HANG_PATIENCE_SECONDS = 10.0  # in which the watchdogs of the other ranks see the hang too


def main(argv: list[str]) -> None:
    world = World(0, 1, 0, "single")
    try:
        command = read(argv, lambda: read_world().size, find_model)
        config = command.config
        if not plans(config.plan):
            world = read_world()
            log_as(world.rank, world.size)
        for note in command.notes:
            log.info(note)
        check_values(config)
    except ValueError as error:
        log.error(f"error: {error}")
        report_to_launcher(f"error: {error}")
        sys.exit(1)
    run(command, world)


def run(command: Command, world: World) -> None:
    """Predict, rehearse or train, as the flags ask. Reports errors, also to the other ranks, before this rank ends."""
    from megazero.comm.launch import failures, launch
    from megazero.comm.launch.errors import PeerLost
    from megazero.step.engine import LossScaleExhausted
    from megazero.zero.state_file import StatesLost

    collect_garbage()
    try:
        if plans(command.config.plan):
            predict(command)
            return
        if command.config.plan.rehearse:
            rehearse(command, world)
            return
        with Signals() as signals:
            launch.end_with_launcher(world)
            stop = pretrain(command, world, signals)
        code = stop.exit_code if stop is not None else 0
        if world.size > 1:
            launch.exit_now(code)
        if code:
            sys.exit(code)
    except ValueError as error:
        fail(world, f"error: {error}")
    except (LossScaleExhausted, DeadRun, StatesLost) as error:
        fail(world, str(error))
    except PeerLost as error:
        # At once, because this rank may be ended before they answer.
        log.error(f"{error}{place_of(error)}; asking the others why")
        fail(world, failures.explain(world, error), report=False)
    except ModuleNotFoundError as error:
        fail(world, f"this run {missing_package(error)}")
    except KeyboardInterrupt:
        log.error("interrupted; --load resumes from the last checkpoint in --save")
        launch.exit_now(130)
    except Exception as error:
        traceback.print_exc()
        fail(world, f"{type(error).__name__}: {error}{place_of(error)}")


def predict(command: Command) -> None:
    """Print the predictions of --plan or --plan-search, without starting a rank or opening data."""
    from rich.console import Console

    from megazero.price import plan_report
    from megazero.price.plan import make_plan, plan_config, vocabulary
    from megazero.price.search import search_report
    from megazero.price.search.choose import choose_layout
    from megazero.price.time.devices import load_device

    console = Console(width=None if sys.stdout.isatty() else 160)
    config = command.config
    device = load_device(config.plan.device_type)
    if device.kind == "cuda":
        config, chosen = gpu_defaults(config, command.given, device.fastest_precision)
        if chosen:
            log.info(chosen)
    if config.parallel.layout == "auto":
        choice = choose_layout(config, command.given, config.plan.world_size or 1, vocabulary(config), device)
        log.info(choice.words(config, device, command.dropped))
        config = choice.apply(config)
    if config.plan.plan_search:
        search_report.run_search(config, command.args, console)
        return
    plan = make_plan(*plan_config(config))
    plan_report.show(plan, console)
    if config.log.log_dir:
        plan_report.write(plan, Path(config.log.log_dir))


def place_of(error: BaseException) -> str:
    """Name the operation of the step that raised an exception, if the interpreter has noted one."""
    return "".join(f" {note}" for note in getattr(error, "__notes__", [])[:1])


class Plan(NamedTuple):
    """One rank's part in a run, checked before ranks meet."""

    command: Command  # with the flags that --layout auto chose, as if given
    world: World
    config: Config  # resolved
    chosen: str  # note on the defaults that the GPU chose
    auto: str  # report of --layout auto
    question: Question | None  # with --elastic: of the layouts for other numbers of nodes
    started: str  # with --elastic: the line of this start
    layout: Layout
    device: torch.device
    machine: Machine
    tokenizer: Tokenizer | None
    datasets: Datasets
    clock: Clock | None  # on rank 0
    refusal: str  # why rank 0 refuses the run; the other ranks learn it in `connect`


def lay_out(
    command: Command, config: Config, world: World, vocabulary: int, device: torch.device, memory: Machine
) -> tuple[Command, Config, str, Question | None, str]:
    """Choose the flags of the layout that are not given, for --layout auto and --elastic.

    Returns:
        The command and the options with them; a report; with --elastic the question that they answer, and the line of
        this start.
    """
    from megazero.comm.launch import launch
    from megazero.comm.launch.world import local_size, num_nodes
    from megazero.price.search.choose import choose_layout, device_of_ranks
    from megazero.run import relayout

    question, elastic = None, config.parallel.elastic
    if config.parallel.layout != "auto":
        started = relayout.start_words(config, world, "the layout of the given flags") if elastic else ""
        return command, config, "", None, started
    priced = device_of_ranks(config, launch.card_name(device), memory, max(2, world.size) if elastic else world.size)
    if elastic:
        question = relayout.Question(config, command.given, local_size(world), vocabulary, priced)
        choice = question.row(relayout.read(Path(config.checkpoint.save), question.digest()), num_nodes(world))
    else:
        choice = choose_layout(config, command.given, world.size, vocabulary, priced)
    given = {*command.given, *choice.names(config)} - {"layout", "device-type"}
    command = command._replace(config=choice.apply(command.config), given=frozenset(given))
    started = relayout.start_words(config, world, choice.layout) if elastic else ""
    return command, choice.apply(config), choice.words(config, priced, command.dropped), question, started


def prepare(command: Command, world: World) -> Plan:
    """Check everything that can be checked before ranks meet or a file is made.

    Raises:
        ValueError: this rank refuses its flags, its machine or its data.
    """
    from megazero.checkpoint.in_memory import bytes_below, run_folder
    from megazero.comm.launch import launch, scheduler
    from megazero.comm.launch.machine import bind_to_near_cpus, machine
    from megazero.comm.launch.world import launched
    from megazero.data.remembered import data_tokenizer
    from megazero.huggingface.export import check_export
    from megazero.huggingface.loading import open_weights
    from megazero.model.stage import declare
    from megazero.observe.loggers import require_packages
    from megazero.price.bytes.capacity import check_memory
    from megazero.price.time.devices import find_card
    from megazero.price.time.exchange import choose_exchange
    from megazero.run.exports import guard_exports
    from megazero.run.inputs import open_data, require_data
    from megazero.run.resume import find_checkpoint
    from megazero.run.run_state import is_hugging_face

    device = launch.pick_device(world)
    config, chosen = with_gpu_defaults(command, launch.fastest_precision(device) if device.type == "cuda" else "")
    if device.type == "cuda":
        bind_to_near_cpus(device)
    require_packages(config.log)
    require_data(config)  # before the tokenizer, because a corpus may name it
    tokenizer = data_tokenizer(config)
    vocabulary = tokenizer.vocab_size if tokenizer else 0
    options = config.checkpoint
    memory = machine(world, device, config.optimizer.optimizer_nvme_offload if config.trains else "")
    if options.memory_checkpoint_interval:
        memory = memory._replace(copies=bytes_below(run_folder(options.memory_checkpoint_dir, options.save)))
    command, config, *report = lay_out(command, config, world, vocabulary, device, memory)
    config, layout = resolve(config, world.size, vocabulary, declare)
    check_device(config, device.type)
    config = choose_exchange(config, layout, find_card(launch.card_name(device)))
    if config.training.deterministic_mode and device.type == "cuda":
        launch.make_deterministic()
    check_memory(config, layout, world.rank, memory)
    datasets = open_data(config, tokenizer)
    clock, refusal = None, ""
    if world.rank == 0:
        try:
            load = find_checkpoint(config)
            if load is not None and is_hugging_face(load):
                open_weights(load, config.model)
            guard_exports(options, load)
            if options.save_hf:
                check_export(config.model, tokenizer)
            save_minutes = options.save_interval_minutes if options.save and not options.save_interval else 0.0
            ends = options.exit_duration_minutes, options.exit_before_minutes
            clock = Clock(*ends, scheduler.job_end, launched(), save_minutes)
        except (OSError, ValueError) as error:
            refusal = explain(error) if isinstance(error, OSError) else str(error)
            if world.size > 1:  # at once, because the others may start late, or never
                log.error(f"{refusal}; this rank ends once all ranks have joined")
    found = layout, device, memory, tokenizer, datasets, clock, refusal
    return Plan(command, world, config, chosen, *report, *found)


def connect(plan: Plan) -> tuple[Mesh, list[str]]:
    """Join the other ranks, agree with them on the run, and make the groups of the mesh.

    Returns:
        The mesh, and the start report on the console; empty except on rank 0.

    Raises:
        ValueError: on every rank, if rank 0 refuses the run or the ranks' flags, code or data differ.
    """
    from megazero.comm.launch import launch
    from megazero.comm.launch.agreement import agree
    from megazero.comm.mesh.mesh import Mesh
    from megazero.observe import start_report
    from megazero.run.same_run import run_values

    world, config, tokenizer, datasets = plan.world, plan.config, plan.tokenizer, plan.datasets
    minutes, screen = config.parallel.distributed_timeout_minutes, []
    hosts = launch.start(world, plan.device, minutes)
    agree(lambda: run_values(config, datasets, tokenizer), world, plan.device, hosts, plan.refusal)
    if world.rank == 0:
        screen = start_report.screen(
            plan.command.config,
            config,
            plan.layout,
            plan.machine,
            start_report.device_text(plan.device, config.training.precision),
            plan.chosen,
            tokenizer.vocab_size if tokenizer else 0,
            datasets.train_tokens,
            plan.auto,
        )
        log.info("\n".join(screen))
    with launch.limit(world, 60 * (launch.JOIN_MINUTES + minutes), "making the groups of ranks"):
        checks = config.zero.poison_buffers
        return Mesh.build(plan.layout, world.rank, plan.device, minutes, check_buffers=checks, hosts=hosts), screen


def pretrain(command: Command, world: World, signals: Signals) -> Wish | None:
    """Train; returns the request that ended the run early."""
    from megazero import checkpoint
    from megazero.comm.launch import failures, launch
    from megazero.comm.launch.machine import environment
    from megazero.huggingface.export import export_run
    from megazero.huggingface.loading import open_weights
    from megazero.observe import start_report
    from megazero.observe.start_clock import StartClock, process_start
    from megazero.observe.watchdog import Watchdog
    from megazero.run import relayout
    from megazero.run.checkpoints import Checkpoints
    from megazero.run.exports import Exports
    from megazero.run.resume import find_checkpoint
    from megazero.run.run import TrainingRun
    from megazero.run.trainer import Trainer

    clock = StartClock(process_start())
    clock.mark("process")
    plan = prepare(command._replace(config=relayout.resuming(command.config)), world)
    clock.mark("checks")
    mesh, screen = connect(plan)
    signals.joined()
    clock.mark("joining")
    command, config, datasets, tokenizer, hosts = (
        plan.command,
        plan.config,
        plan.datasets,
        plan.tokenizer,
        mesh.world.hosts,
    )
    with mesh.world.peer_errors("looking for a checkpoint"):
        lock, patience = None, LOCK_SECONDS if config.parallel.elastic else 0.0
        if config.checkpoint.save:
            lock = checkpoint.lock(Path(config.checkpoint.save), mesh.host_group, patience)
        load = find_checkpoint(config, mesh.host_group)
        if plan.question is not None:
            relayout.complete(plan.question, world.rank, world.size, mesh.host_group)
    patience = max(HANG_PATIENCE_SECONDS, 6 * config.monitor.hang_timeout)  # a tenth of the limit
    watchdog = Watchdog(config.monitor.hang_timeout, lambda place: failures.end_hung(world, place, hosts, patience))
    eod = tokenizer.eod if tokenizer and config.data.document_flags else None
    trainer = Trainer(config, mesh, datasets, eod, watchdog, tokenizer)
    saves = Checkpoints(trainer.config, trainer.engine, datasets, tokenizer, watchdog, command.given, open_weights)
    stop_file = Path(config.log.log_dir) / "stop" if world.rank == 0 and config.log.log_dir else None
    precision, exports = config.training.precision, None
    if config.checkpoint.save_hf and config.trains:
        exports = Exports(saves, lambda path, output: export_run(path, output, precision))
    clock.mark("model")
    wishes = Wishes(signals, plan.clock, stop_file)
    run = TrainingRun(trainer, saves, wishes, command, exports, clock, plan.started)
    if world.rank == 0:
        details = start_report.details(config, plan.layout, plan.machine, hosts, environment(), trainer.choices)
        start_report.hand_out(config, screen, details)
    silent = world.size > 1 and plan.device.type == "cuda"  # NCCL does not report that a peer has failed
    peers = failures.ending_with_peers(world) if silent else contextlib.nullcontext()
    with peers, watchdog.over(trainer.engine.interpreter), frozen_objects():
        stop = run.evaluate(load) if config.evaluation.eval_only else run.train(load)
    if lock is not None:
        lock.release()
    launch.stop(world, config.parallel.distributed_timeout_minutes)
    return stop


def with_gpu_defaults(command: Command, fastest: str) -> tuple[Config, str]:
    """Return the configuration with the defaults of this GPU, or of the one that a rehearsal imitates, and a note.

    Args:
        fastest: the precision in which this GPU is fastest; empty without a GPU.
    """
    plan = command.config.plan
    if plan.rehearse and plan.rehearse_on != "here":
        fastest = "bf16" if plan.rehearse_on == "gpu" else ""
    return gpu_defaults(command.config, command.given, fastest) if fastest else (command.config, "")


def collect_garbage() -> None:
    """Begin to collect garbage if `command` has stopped it: collections are a sixth of the time of torch's import."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def frozen_objects() -> Iterator[None]:
    """Exclude modules and engine from garbage collections, which interrupt each rank at a different time."""
    gc.collect()
    gc.freeze()  # the engine too
    try:
        yield
    finally:
        gc.unfreeze()  # else Triton's bindings report leaks when the process exits


def rehearse(command: Command, world: World) -> None:
    """Run steps of ranks of a larger world on stand-in tensors (--rehearse)."""
    from megazero.comm.launch import launch
    from megazero.price.plan import vocabulary
    from megazero.price.search.choose import CPU, choose_layout
    from megazero.price.time.devices import load_device
    from megazero.rehearse.rehearsal import RehearsalDevice
    from megazero.rehearse.rehearsal_report import pretended_world, run_rehearsal

    device = launch.pick_device(world)
    config, chosen = with_gpu_defaults(command, launch.fastest_precision(device) if device.type == "cuda" else "")
    if chosen:
        log.info(chosen)
    if config.parallel.layout == "auto":
        on = config.plan.rehearse_on
        priced = load_device(config.plan.device_type or (CPU if RehearsalDevice.of(on).kind == CPU else ""))
        choice = choose_layout(config, command.given, pretended_world(config, world), vocabulary(config), priced)
        log.info(choice.words(config, priced, command.dropped))
        config = choice.apply(config)
    run_rehearsal(config, world, vocabulary(config))


def fail(world: World, message: str, report: bool = True) -> NoReturn:
    """Report an error here and to the other ranks, and end at once, so that waits for this rank fail promptly."""
    from megazero.comm.launch import failures, launch

    log.error(message)
    if report:
        failures.report_failure(world, message)
    launch.exit_now(1)


def command() -> None:
    """Run as the console command megazero-pretrain."""
    gc.disable()  # see `collect_garbage`
    main(sys.argv[1:])


if __name__ == "__main__":
    command()
