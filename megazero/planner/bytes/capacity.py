"""Refuse a run that does not fit in memory, before anything is allocated. Pure: available memory is an argument.

A lower bound (`least`), which counts layers by kind, refuses absurd sizes quickly. Otherwise the account of a step
(`estimated`) decides. Both count less than a process takes (no kernel scratch, no libraries), so a refused run would
have failed.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.topology import Layout
from megazero.engine.plan.layout.zero_policy import sharding_groups
from megazero.flags.config import Config
from megazero.flags.flag_names import as_flag, with_values
from megazero.flags.presets import over_defaults, preset_names, preset_values
from megazero.flags.resolve import check_block_runs, resolve
from megazero.flags.validate import check_values, elastic_nodes
from megazero.host import Available, Machine
from megazero.planner.bytes.estimate import stage_bytes
from megazero.planner.parameter_counts import num_parameters
from megazero.planner.sizes import elements, hidden_bytes, least_held
from megazero.planner.state_shares import saved_bytes
from megazero.units import size, things

MOST_TRACED = 1 << 40  # bytes: a block with a larger input is not traced, because it fits nowhere


class Needs(NamedTuple):
    """The least bytes that a rank takes, by kind."""

    device: dict[str, int]
    host: int
    files: int = 0

    @property
    def total(self) -> int:
        return sum(self.device.values())


FULL_FOLDER = "--optimizer-nvme-offload"  # begins the message if the folder has too little space

Fits = Callable[[Config, Layout], bool]


def check_memory(config: Config, layout: Layout, rank: int, machine: Machine) -> None:
    """Raise if this rank's device, or all ranks of its node together, need more memory than is available.

    Raises:
        ValueError: with the bytes needed, the bytes available, and flags that make it fit.
    """
    problem = _problem(config, layout, rank, machine)
    if problem.startswith(FULL_FOLDER):
        raise ValueError(f"{problem}; free some space there, name another folder, or use more nodes")
    if problem:
        raise ValueError(f"{problem}; {_way_out(config, layout, rank, machine)}")


def least(config: Config, layout: Layout, stage: int) -> Needs:
    """Bound the bytes of a rank of a pipeline stage from below, counting layers by kind."""
    layers = declare(config.model, layout.tp)
    kinds = [layers.kinds[name] for name in layers.held(layout, stage)]
    different = {kind.name: kind for kind in kinds}.values()
    groups = sharding_groups(config, layout)
    each = {kind.name: elements(kind, layout, groups) for kind in different}
    blocks = sum(kind.end is None for kind in kinds)
    total = {group: sum(each[kind.name][group] for kind in kinds) for group in groups}
    held = least_held(config, layout, total, blocks=blocks, last=stage == layout.last_pp)
    host = held.pop("host", 0)
    return Needs(held, host)


def estimated(config: Config, layout: Layout, stage: int, device_type: str) -> Needs:
    """Return the bytes of a rank of a pipeline stage at the peak of a step."""
    if hidden_bytes(config, layout) > MOST_TRACED:
        return Needs({"activations": hidden_bytes(config, layout)}, 0)
    found = stage_bytes(config, layout, stage, device_type)
    return Needs(found.at_peak, found.memory["host"], found.memory["nvme"])


def checkpoint_bytes(config: Config) -> int:
    """Return the bytes of a checkpoint: master weights and optimizer states, in fp32 or fp64."""
    return saved_bytes(config, ((spec, math.prod(spec.shape)) for spec in declare(config.model).params()))


def memory_copies(config: Config, nodes: int) -> int:
    """Return the bytes of a node's copies for --memory-checkpoint-interval: two of its own part, two of another's."""
    kept = bool(config.checkpoint.memory_checkpoint_interval) and config.trains
    return checkpoint_bytes(config) * (4 if nodes > 1 else 2) // nodes if kept else 0


def _problem(config: Config, layout: Layout, rank: int, machine: Machine) -> str:
    """Return why a run does not fit; empty if it does."""
    counts: tuple[Callable[[int], Needs], ...] = (
        lambda stage: least(config, layout, stage),
        lambda stage: estimated(config, layout, stage, machine.device_type),
    )
    found = (_shortage(config, layout, rank, machine=machine, count=count) for count in counts)
    return next(filter(None, found), "")


def _shortage(config: Config, layout: Layout, rank: int, machine: Machine, count: Callable[[int], Needs]) -> str:
    """Compare with the memory of a machine. count: returns the needs of a rank of a pipeline stage."""
    own = layout.coord(rank).pp
    mine = count(own)
    if machine.device is not None and mine.total > machine.device.num_bytes:
        return f"{_blame(config, mine)}{_list(mine)}, and {_amount(machine.device)} are available to it"
    on_cpu = machine.device_type == "cpu"
    stages = [layout.coord(r).pp for r in machine.ranks]
    needs = {stage: mine if stage == own else count(stage) for stage in set(stages)}
    in_files = sum(needs[stage].files for stage in stages)
    if machine.files is not None and in_files > machine.files.num_bytes:
        needed = f"the ranks of this node need {size(in_files)} for optimizer states"
        return f"{FULL_FOLDER}: {needed}, and {_amount(machine.files)}"
    if machine.host is None:
        return ""
    total = sum(needs[stage].host + (needs[stage].total if on_cpu else 0) for stage in stages)
    nodes = min(elastic_nodes(config.parallel.elastic), default=-(-layout.world_size // len(machine.ranks)))
    copies = memory_copies(config, nodes)
    if total + max(0, copies - machine.copies) <= machine.host.num_bytes:
        return ""
    if total <= machine.host.num_bytes:
        interval, left = config.checkpoint.memory_checkpoint_interval, machine.host.num_bytes + machine.copies
        return (
            f"--memory-checkpoint-interval {interval}: each of {things(nodes, 'node')} holds {size(copies)} of copies, "
            f"and its ranks need {size(total)}, of {size(left)} {machine.host.source}"
        )
    several = f", the {len(machine.ranks)} ranks of this node {size(total)}" if len(machine.ranks) > 1 else ""
    needed = _list(mine) if on_cpu else f"a rank needs {size(mine.host)} of host memory"
    return f"{_blame(config, mine)}{needed}{several}, and {_amount(machine.host)} are available"


def _blame(config: Config, needs: Needs) -> str:
    """Name the flags that determine the largest part."""
    largest = max(needs.device, key=lambda kind: needs.device[kind])
    model, training = config.model, config.training
    given = f"--micro-batch-size {training.micro_batch_size} --seq-length {model.seq_length}"
    if largest == "logits":
        given += f" --vocab-size {model.vocab_size}"
    elif largest in ("parameters", "optimizer", "gradients"):
        given = f"--num-layers {model.num_layers} --ffn-hidden-size {model.ffn_size} --vocab-size {model.vocab_size}"
    return f"{given} --hidden-size {model.hidden_size}: "


def _list(needs: Needs) -> str:
    parts = ", ".join(f"{kind} {size(num_bytes)}" for kind, num_bytes in needs.device.items() if num_bytes)
    return f"a rank needs at least {size(needs.total)} ({parts})"


def _amount(available: Available) -> str:
    return f"{size(available.num_bytes)} {available.source}"


def _way_out(config: Config, layout: Layout, rank: int, machine: Machine) -> str:
    def fits(changed: Config, layout: Layout) -> bool:
        return not _problem(changed, layout, rank, machine)

    lower = flags_that_fit(config, layout, machine.device_type, fits)
    if lower:
        return f"it fits with {lower}"
    sizes = "--tensor-model-parallel-size, --context-parallel-size or --pipeline-model-parallel-size"
    ways = [f"use more ranks, with --zero-stage 3, {sizes}"]
    if layout.world_size == 1:
        ways += [preset for preset in [largest_preset(config, fits)] if preset]
    layers, fewest = config.model.num_layers, layout.pp * layout.chunks
    while layers > fewest:
        layers = max(fewest, int(0.9 * layers))
        if fits(with_values(config, {"num-layers": layers}), replace(layout, split=())):
            return ", or ".join([*ways, f"at most --num-layers {layers}"])
    smaller = "a smaller --hidden-size, --ffn-hidden-size, --vocab-size, --seq-length or --micro-batch-size"
    return ", or ".join([*ways, smaller])


def flags_that_fit(config: Config, layout: Layout, device_type: str, fits: Fits) -> str:
    """Return the first of `alternatives` that fits; empty if none does."""
    found = alternatives(config, layout, device_type)
    return next((lower for lower, changed in found if fits(changed, layout)), "")


def alternatives(config: Config, layout: Layout, device_type: str) -> Iterator[tuple[str, Config]]:
    """Yield flags that lower memory: each alone, then more and more of them together."""
    copied = ("memory-checkpoint-interval", 0)
    steps: list[tuple[str, Any]] = [
        *((copied,) if config.checkpoint.memory_checkpoint_interval else ()),
        *(("zero-stage", stage) for stage in (1, 2, 3) if layout.shard > 1 and stage > config.zero.zero_stage),
        ("recompute", "selective"),
        ("recompute", "full"),
        ("micro-batch-size", 1),
        ("partition-activations", True),
    ]
    if device_type != "cpu":
        steps += [("checkpoint-in-cpu", True), ("optimizer-cpu-offload", True)]
        if layout.shard == 1 and config.zero.zero_stage < 2:  # a rank alone then adds up gradients in host memory
            steps.append(("zero-stage", 2))
    for together in (False, True):
        base, chosen = config, dict[str, str]()
        for flag, value in steps:
            changed = with_values(base, {flag: value})
            if changed == base or not allowed(changed, layout):
                continue
            chosen[flag] = as_flag(flag, value)
            yield " ".join(chosen.values()), changed
            if together:
                base = changed
            else:
                chosen = {}


def allowed(config: Config, layout: Layout) -> bool:
    """Return whether the flags of a configuration can be combined in this layout."""
    try:
        check_values(config)
        check_block_runs(config, layout)
    except ValueError:
        return False
    return True


def largest_preset(config: Config, fits: Fits) -> str:
    """Return the flags of the largest preset of this architecture that fits on one device; empty if none does."""
    given = config.training
    for name, preset in _presets(config.model.architecture):
        changed = with_values(
            preset,
            {
                "precision": given.precision,
                "grad-dtype": given.grad_dtype,
                "micro-batch-size": 1,
                "global-batch-size": 2,  # gradients of micro-batches are added
                "recompute": "full",
            },
        )
        if fits(*resolve(changed, 1, 0, declare)):
            return f"--preset {name} --micro-batch-size 1 --recompute full"
    return ""


def _presets(architecture: str) -> list[tuple[str, Config]]:
    """Return the models and batches of presets that name their vocabulary, largest first."""
    found = []
    for name in preset_names():
        preset = over_defaults(preset_values(name))
        if preset.model.architecture == architecture and preset.model.vocab_size:
            found.append((name, Config(model=preset.model, training=preset.training)))
    return sorted(found, key=lambda preset: -num_parameters(declare(preset[1].model)))
