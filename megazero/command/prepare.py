"""Checks of a run before ranks meet or a file is made: the machine's ranks, the chosen layout, the checked run."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from megazero.checkpoint.in_memory import bytes_below, run_folder
from megazero.cluster import launch, scheduler
from megazero.cluster.machine import bind_to_near_cpus, machine
from megazero.data.corpora import Datasets
from megazero.data.remembered import data_tokenizer
from megazero.data.tokenizer import Tokenizer
from megazero.engine.model.stage import declare
from megazero.engine.options.schema import Config
from megazero.engine.plan.layout.topology import Layout
from megazero.files import explain
from megazero.flags.cli import Command
from megazero.flags.gpu_defaults import gpu_defaults
from megazero.flags.resolve import resolve
from megazero.flags.validate import check_device
from megazero.host import Machine
from megazero.interop.huggingface.export import check_export
from megazero.interop.huggingface.weight_files import open_weights
from megazero.log import log
from megazero.observe.loggers import require_packages
from megazero.planner.bytes.capacity import check_memory
from megazero.planner.search.choose import choose_layout, device_of_ranks
from megazero.planner.time.devices import find_card
from megazero.planner.time.exchange import choose_exchange
from megazero.run import relayout
from megazero.run.exports import guard_exports
from megazero.run.inputs import open_data, require_data
from megazero.run.resume import find_checkpoint
from megazero.run.run_state import is_hugging_face
from megazero.run.stopping import Clock
from megazero.world import World, launched, local_size, num_nodes


class Ranks(NamedTuple):
    """This rank among the ranks of the run, and its machine."""

    world: World
    device: torch.device
    machine: Machine


class Choice(NamedTuple):
    """The options with the layout, as flags.

    Attributes:
        command: with the flags that --layout auto chose, as if given.
        config: with the defaults of the device; not resolved.
        report: report of --layout auto; empty if the layout is given.
        table: with --elastic, the layouts for other numbers of nodes.
        line: with --elastic, the line of this start.
    """

    command: Command
    config: Config
    report: str = ""
    table: relayout.Question | None = None
    line: str = ""


class Checked(NamedTuple):
    """The run: options, layout and data, all checked. `config` is resolved."""

    config: Config
    layout: Layout
    tokenizer: Tokenizer | None
    datasets: Datasets


class Verdict(NamedTuple):
    """Rank 0's verdict on folders and times.

    Attributes:
        clock: ends the run in time; None on other ranks, and if rank 0 refuses.
        refusal: why rank 0 refuses the run; the other ranks learn it when they join.
    """

    clock: Clock | None = None
    refusal: str = ""


class Prepared(NamedTuple):
    """One rank's part in a run. `note`: the defaults that the GPU chose."""

    ranks: Ranks
    choice: Choice
    checked: Checked
    verdict: Verdict
    note: str


def prepare(command: Command, world: World) -> Prepared:
    """Check everything that can be checked before ranks meet or a file is made.

    Raises:
        ValueError: this rank refuses its flags, its machine or its data.
    """
    device = launch.pick_device(world)
    if device.type == "cuda":
        bind_to_near_cpus(device)  # before any library starts threads, because these keep their CPUs
    fastest = launch.fastest_precision(device) if device.type == "cuda" else None
    config, note = gpu_defaults(command.config, command.given, fastest)
    require_packages(config.log)
    require_data(config)  # before the tokenizer, because a corpus may name it
    tokenizer = data_tokenizer(config)
    ranks = find_ranks(config, world, device)
    choice = choose_flags(command, config, ranks, tokenizer.vocab_size if tokenizer else 0)
    checked = check_run(choice.config, ranks, tokenizer)
    verdict = verdict_of_rank_0(checked) if world.rank == 0 else Verdict()
    if verdict.refusal and world.has_peers:  # at once, because the others may start late, or never
        log.error(f"{verdict.refusal}; this rank ends once all ranks have joined")
    return Prepared(ranks=ranks, choice=choice, checked=checked, verdict=verdict, note=note)


def find_ranks(config: Config, world: World, device: torch.device) -> Ranks:
    """Find the memory of this rank's machine."""
    options = config.checkpoint
    found = machine(world, device, config.optimizer.optimizer_nvme_offload if config.trains else "")
    if options.memory_checkpoint_interval:
        found = found._replace(copies=bytes_below(run_folder(options.memory_checkpoint_dir, options.save)))
    return Ranks(world, device, found)


def choose_flags(command: Command, config: Config, ranks: Ranks, vocabulary: int) -> Choice:
    """Choose the flags of the layout that are not given, for --layout auto and --elastic."""
    world, elastic = ranks.world, config.parallel.elastic
    if config.parallel.layout != "auto":
        line = relayout.start_words(config, world, "the layout of the given flags") if elastic else ""
        return Choice(command, config, line=line)
    size = max(2, world.size) if elastic else world.size
    priced, table = device_of_ranks(config, launch.card_name(ranks.device), ranks.machine, size), None
    if elastic:
        table = relayout.Question(
            config=config,
            given=command.given,
            per_node=local_size(world),
            vocab_size=vocabulary,
            device=priced,
        )
        chosen = table.row(relayout.read_layouts(Path(config.checkpoint.save), table.digest()), num_nodes(world))
    else:
        chosen = choose_layout(config, command.given, size, vocab_size=vocabulary, device=priced)
    given = {*command.given, *chosen.names(config)} - {"layout", "device-type"}
    return Choice(
        command=command._replace(config=chosen.apply(command.config), given=frozenset(given)),
        config=chosen.apply(config),
        report=chosen.words(config, priced, command.dropped),
        table=table,
        line=relayout.start_words(config, world, chosen.layout) if elastic else "",
    )


def check_run(config: Config, ranks: Ranks, tokenizer: Tokenizer | None) -> Checked:
    """Resolve the options, and refuse those that this rank's device, memory or data do not allow."""
    world, device = ranks.world, ranks.device
    config, layout = resolve(config, world.size, tokenizer.vocab_size if tokenizer else 0, declare)
    check_device(config, device.type)
    config = choose_exchange(config, layout, find_card(launch.card_name(device)))
    if config.training.deterministic_mode and device.type == "cuda":
        launch.make_deterministic()
    check_memory(config, layout, world.rank, ranks.machine)
    return Checked(config, layout, tokenizer, open_data(config, tokenizer))


def verdict_of_rank_0(checked: Checked) -> Verdict:
    """Refuse folders that this run cannot load or write, and times that it cannot keep."""
    config, options = checked.config, checked.config.checkpoint
    try:
        load = find_checkpoint(config)
        if load is not None and is_hugging_face(load):
            open_weights(load, config.model)
        guard_exports(options, load)
        if options.save_hf:
            check_export(config.model, checked.tokenizer)
        return Verdict(
            Clock(
                options.exit_duration_minutes,
                options.exit_before_minutes,
                scheduler.job_end,
                began=launched(),
                save_minutes=options.save_interval_minutes if options.save and not options.save_interval else 0.0,
            )
        )
    except (OSError, ValueError) as error:
        return Verdict(refusal=explain(error) if isinstance(error, OSError) else str(error))
