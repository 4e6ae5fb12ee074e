"""Checks of a run before ranks meet or a file is made: the machine's ranks, the chosen layout, the checked run."""

from pathlib import Path
from typing import NamedTuple

import torch

from megazero.checkpoint.in_memory import bytes_below, run_folder
from megazero.cluster import launch, scheduler
from megazero.cluster.machine import bind_to_near_cpus, machine
from megazero.data.corpora import Continued, Datasets, continued
from megazero.data.remembered import data_tokenizer
from megazero.data.task_requests import EncodedTasks, PackedRequests
from megazero.data.tokenizer import Tokenizer
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.topology import Layout
from megazero.files import explain
from megazero.flags.cli import Command
from megazero.flags.config import Config, ModelConfig
from megazero.flags.implied import gpu_defaults
from megazero.flags.resolve import resolve
from megazero.flags.stack import Standing
from megazero.flags.stages import DataStage, last_samples, longest, read_stages
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
from megazero.run.inputs import open_data, open_tasks, require_data
from megazero.run.resume import find_checkpoint
from megazero.run.run_state import is_hugging_face
from megazero.run.stopping import Clock
from megazero.run.task_scores import pack_requests
from megazero.world import World, launched, local_size, num_nodes


class Ranks(NamedTuple):
    """This rank among the ranks of the run, and its machine."""

    world: World
    device: torch.device
    machine: Machine


class Choice(NamedTuple):
    """The options with the layout, as flags.

    Attributes:
        command: with the defaults of the device, and the flags that --layout auto chose, as if given.
        report: report of --layout auto; empty if the layout is given.
        table: with --elastic, the layouts for other numbers of nodes.
        line: with --elastic, the line of this start.
    """

    command: Command
    report: str = ""
    table: relayout.Question | None = None
    line: str = ""


class Checked(NamedTuple):
    """A stage of the run: options, layout, data and tasks, all checked. `config` is resolved."""

    config: Config
    layout: Layout
    tokenizer: Tokenizer | None
    datasets: Datasets
    stage: DataStage
    tasks: PackedRequests | None = None  # None without --tasks


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
    stages: tuple[Checked, ...]
    verdict: Verdict
    note: str

    @property
    def checked(self) -> Checked:
        """The first stage."""
        return self.stages[0]


def prepare(command: Command, world: World) -> Prepared:
    """Check everything that can be checked before ranks meet or a file is made.

    Raises:
        ValueError: this rank refuses its flags, its machine or its data.
    """
    device = launch.pick_device(world)
    if device.type == "cuda":
        bind_to_near_cpus(device)  # before any library starts threads, because these keep their CPUs
    fastest = launch.fastest_precision(device) if device.type == "cuda" else None
    values, note = gpu_defaults(command.config, command.given, fastest)
    command = command._replace(stack=command.stack.over("the default on GPUs", values, Standing.DERIVED))
    config = command.config
    if other := command.left_out(config):
        log.info(other)
    require_packages(config.log)
    require_data(config)  # before the tokenizer, because a corpus may name it
    tokenizer = data_tokenizer(config)
    tasks = open_tasks(config, tokenizer)
    ranks, stages = find_ranks(config, world, device), read_stages(config)
    choice = choose_flags(command, longest(config, stages), ranks, tokenizer.vocab_size if tokenizer else 0)
    for late in stages[len(last_samples(choice.command.config, stages)) :] if world.rank == 0 else ():
        log.warning(
            f"--data-stages {config.data.data_stages}: stage {late.number}, from sample {late.first:,}, begins after "
            f"--train-iters {config.training.train_iters}"
        )
    checked = check_stages(choice.command.config, stages, ranks, tokenizer=tokenizer, tasks=tasks)
    verdict = verdict_of_rank_0(checked[0]) if world.rank == 0 else Verdict()
    if verdict.refusal and world.has_peers:  # at once, because the others may start late, or never
        log.error(f"{verdict.refusal}; this rank ends once all ranks have joined")
    return Prepared(ranks=ranks, choice=choice, stages=checked, verdict=verdict, note=note)


def find_ranks(config: Config, world: World, device: torch.device) -> Ranks:
    """Find the memory of this rank's machine."""
    options = config.checkpoint
    found = machine(world, device, config.optimizer.optimizer_nvme_offload if config.trains else "")
    if options.memory_checkpoint_interval:
        found = found._replace(copies=bytes_below(run_folder(options.memory_checkpoint_dir, options.save)))
    return Ranks(world, device, found)


def choose_flags(command: Command, stage: DataStage, ranks: Ranks, vocabulary: int) -> Choice:
    """Choose the flags of the layout that are not given, for --layout auto and --elastic. stage: the longest one."""
    asked = command.stack.over(f"stage {stage.number}", stage.changes, Standing.GIVEN)
    world, config, elastic = ranks.world, asked.config, command.config.parallel.elastic
    if config.parallel.layout != "auto":
        line = relayout.start_words(config, world, "the layout of the given flags") if elastic else ""
        return Choice(command, line=line)
    size = max(2, world.size) if elastic else world.size
    priced, table = device_of_ranks(config, launch.card_name(ranks.device), ranks.machine, size), None
    if elastic:
        table = relayout.Question(
            config=config,
            given=asked.given,
            per_node=local_size(world),
            vocab_size=vocabulary,
            device=priced,
        )
        chosen = table.row(relayout.read_layouts(Path(config.checkpoint.save), table.digest()), num_nodes(world))
    else:
        chosen = choose_layout(config, asked.given, size, vocab_size=vocabulary, device=priced)
    values = {name: chosen.flags[name] for name in chosen.names(config)}
    return Choice(
        command=command._replace(
            stack=command.stack.over("--layout auto", values, Standing.GIVEN, undone=("layout", "device-type"))
        ),
        report=chosen.words(config, priced, command.dropped),
        table=table,
        line=relayout.start_words(config, world, chosen.layout) if elastic else "",
    )


def check_stages(
    config: Config,
    stages: tuple[DataStage, ...],
    ranks: Ranks,
    tokenizer: Tokenizer | None,
    tasks: EncodedTasks | None,
) -> tuple[Checked, ...]:
    """Check every stage. All have the layout of the longest one."""
    vocabulary, found, begins = tokenizer.vocab_size if tokenizer else 0, list[Checked](), None
    _, layout = resolve(longest(config, stages).over(config), ranks.world.size, vocabulary, declare)
    for stage in stages:
        where = f"--data-stages {config.data.data_stages}: stage {stage.number}: " if stage.number > 1 else ""
        try:
            checked = check_run(stage, config, ranks, tokenizer, layout=layout, begins=begins)
            packed = pack_requests(checked.config, tasks, ranks.device.type) if tasks is not None else None
            found.append(checked._replace(tasks=packed))
        except ValueError as error:
            raise ValueError(f"{where}{error}") from None
        model, first = found[-1].config.model, found[0].config.model
        if _shapes(model) != _shapes(first):
            raise ValueError(
                f"{where}weights of --architecture {model.architecture} have other shapes with --seq-length "
                f"{model.seq_length} than with {first.seq_length}, because positions are learned; keep the length, or "
                "train with rotary positions"
            )
        if stage.stop is not None:
            begins = continued(found[-1].datasets, stage.stop, model.seq_length, begins)
    return tuple(found)


def _shapes(model: ModelConfig) -> list[tuple[str, tuple[int, ...]]]:
    return [(spec.name, spec.shape) for spec in declare(model).params()]


def check_run(
    stage: DataStage,
    config: Config,
    ranks: Ranks,
    tokenizer: Tokenizer | None,
    layout: Layout,
    begins: Continued | None,
) -> Checked:
    """Resolve a stage's options, and refuse those that this rank's device, memory or data do not allow.

    Args:
        config: of the command.
        begins: where the stage's training data begin.
    """
    world, device = ranks.world, ranks.device
    config, _ = resolve(stage.over(config), world.size, tokenizer.vocab_size if tokenizer else 0, declare)
    check_device(config, device.type)
    config = choose_exchange(config, layout, find_card(launch.card_name(device)))
    if config.training.deterministic_mode and device.type == "cuda":
        launch.make_deterministic()
    check_memory(config, layout, world.rank, ranks.machine)
    datasets = open_data(config, tokenizer, begins)
    return Checked(config=config, layout=layout, tokenizer=tokenizer, datasets=datasets, stage=stage)


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
