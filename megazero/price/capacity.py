"""Refuse a run that cannot fit, before anything is allocated. Pure: the memory that is available comes as arguments.

Two steps: a lower bound (`plan.sizes.least_held`), which counts layers by kind, so that absurd sizes are refused at
once; then the account of the step (`price.estimate.stage_bytes`), which walks an iteration. Both count less than a
process takes (no kernel scratch, no libraries), so a run that they refuse would fail.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from megazero.config.schema import Config
from megazero.config.validate import check_values
from megazero.memory.host import Available, Machine
from megazero.model.stage import declare
from megazero.plan.parameters import unit_layout
from megazero.plan.resolve import check_block_runs
from megazero.plan.sizes import hidden_bytes, least_held
from megazero.plan.topology import Layout
from megazero.price.estimate import Few, stage_bytes
from megazero.units import size

MOST_TRACED = 1 << 40  # bytes: a block whose input alone is larger fits nowhere, and is not traced


class Needs(NamedTuple):
    """The least bytes that a rank takes, by kind."""

    device: dict[str, int]
    host: int

    @property
    def total(self) -> int:
        return sum(self.device.values())


def check_memory(config: Config, layout: Layout, rank: int, machine: Machine) -> None:
    """Raise if this rank's device, or all ranks of its node together, need more memory than there is.

    Raises:
        ValueError: with the bytes needed, the bytes available, and flags that make it fit.
    """
    for count in (least, estimated):
        problem = _problem(config, layout, rank, machine, count)
        if problem is not None:
            raise ValueError(f"{problem}; {_way_out(config, layout, rank, machine)}")


def least(config: Config, layout: Layout, stage: int, device_type: str) -> Needs:
    """Bound the bytes of a rank of pipeline stage `stage` from below, counting layers by kind."""
    layers = declare(config.model, layout.tp)
    kinds = [layers.kinds[name] for name in layers.units(layout, stage)]
    different = {kind.name: kind for kind in kinds}.values()
    numel = {kind.name: unit_layout(kind.params, layout.sizes, layout.shard).numel for kind in different}
    blocks = sum(kind.end is None for kind in kinds)
    total = sum(numel[kind.name] for kind in kinds)
    return Needs(least_held(config, layout, total, blocks, stage == layout.last_pp), 0)


def estimated(config: Config, layout: Layout, stage: int, device_type: str) -> Needs:
    """Return the account of a rank of pipeline stage `stage`: the bytes at its fullest instant."""
    if hidden_bytes(config, layout) > MOST_TRACED:
        return Needs({"activations": hidden_bytes(config, layout)}, 0)
    found = stage_bytes(config, layout, stage, device_type, _rounds(config, layout))
    return Needs(found.at_peak, found.memory["host"])


def _rounds(config: Config, layout: Layout) -> Few:
    """Choose a few rounds of the pipeline: only gpipe holds more with more micro-batches.

    Its bytes are the largest of some that grow linearly, so that the line through two smaller numbers of micro-batches
    is a lower bound.
    """
    wanted, most = config.micro_batches(layout.dp), 4 * layout.pp * layout.chunks
    few = Few.of(config.parallel.pipeline_schedule, layout, wanted)
    if len(few.played) > 1 or wanted <= most:
        return few
    return Few(wanted, (most - 1, most)) if config.parallel.pipeline_schedule == "gpipe" else Few(most, (most,))


Count = Callable[[Config, Layout, int, str], Needs]


def _problem(config: Config, layout: Layout, rank: int, machine: Machine, count: Count) -> str | None:
    @functools.cache
    def of_stage(stage: int) -> Needs:  # all ranks of a stage need the same
        return count(config, layout, stage, machine.device_type)

    mine = of_stage(layout.coord(rank).pp)
    if machine.device is not None and mine.total > machine.device.num_bytes:
        return f"{_blame(config, mine)}{_list(mine)}, and {_amount(machine.device)} are available to it"
    if machine.host is None:
        return None
    on_cpu = machine.device_type == "cpu"
    all_of_node = [of_stage(layout.coord(r).pp) for r in machine.ranks]
    total = sum(needs.host + needs.total * on_cpu for needs in all_of_node)
    if total <= machine.host.num_bytes:
        return None
    several = f", the {len(machine.ranks)} ranks of this node {size(total)}" if len(machine.ranks) > 1 else ""
    needed = _list(mine) if on_cpu else f"a rank needs {size(mine.host)} of host memory"
    return f"{_blame(config, mine)}{needed}{several}, and {_amount(machine.host)} are available"


def _blame(config: Config, needs: Needs) -> str:
    """Name the flags that the largest part comes from."""
    largest = max(needs.device, key=lambda kind: needs.device[kind])
    model, training = config.model, config.training
    flags = f"--micro-batch-size {training.micro_batch_size} --seq-length {model.seq_length}"
    if largest == "logits":
        flags += f" --vocab-size {model.vocab_size}"
    elif largest in ("parameters", "optimizer", "gradients"):
        flags = f"--num-layers {model.num_layers} --ffn-hidden-size {model.ffn_size} --vocab-size {model.vocab_size}"
    return f"{flags} --hidden-size {model.hidden_size}: "


def _list(needs: Needs) -> str:
    parts = ", ".join(f"{kind} {size(num_bytes)}" for kind, num_bytes in needs.device.items() if num_bytes)
    return f"a rank needs at least {size(needs.total)} ({parts})"


def _amount(available: Available) -> str:
    return f"{size(available.num_bytes)} {available.source}"


def _way_out(config: Config, layout: Layout, rank: int, machine: Machine) -> str:
    def fits(changed: Config, layout: Layout) -> bool:
        return all(_problem(changed, layout, rank, machine, count) is None for count in (least, estimated))

    for flags, changed in alternatives(config, layout, machine.device_type):
        if fits(changed, layout):
            return f"it fits with {flags}"
    others = "use more ranks, with --zero-stage 3, --tensor-model-parallel-size or --pipeline-model-parallel-size"
    fewer = _fewer_layers(config, layout, rank, machine)
    for share in (1.0, 0.9, 0.75, 0.5):
        layers = int(fewer * share)
        changed = replace(config, model=replace(config.model, num_layers=layers))
        if layers >= layout.pp * layout.chunks and fits(changed, replace(layout, split=())):
            return f"{others}, or at most --num-layers {layers}"
    return f"{others}, or a smaller --hidden-size, --ffn-hidden-size, --vocab-size, --seq-length or --micro-batch-size"


def _fewer_layers(config: Config, layout: Layout, rank: int, machine: Machine) -> int:
    """Return the most layers whose lower bound fits; 0 if not even one per stage does."""
    low, high, even = 0, config.model.num_layers, replace(layout, split=())
    while low < high:
        middle = (low + high + 1) // 2
        layers = max(middle, layout.pp * layout.chunks)
        changed = replace(config, model=replace(config.model, num_layers=layers))
        if _problem(changed, even, rank, machine, least) is None:
            low = middle
        else:
            high = middle - 1
    return low


def alternatives(config: Config, layout: Layout, device_type: str) -> Iterator[tuple[str, Config]]:
    """Yield flags that lower memory, one at a time, then more and more of them together."""
    steps: list[tuple[str, str, dict[str, Any]]] = [
        *((f"--zero-stage {stage}", "zero", {"zero_stage": stage}) for stage in (1, 2, 3) if layout.shard != 1),
        *((f"--recompute {kind}", "activations", {"recompute": kind}) for kind in ("selective", "full")),
        ("--micro-batch-size 1", "training", {"micro_batch_size": 1}),
        ("--partition-activations", "activations", {"partition_activations": True}),
        ("--checkpoint-in-cpu", "activations", {"checkpoint_in_cpu": True}),
    ]
    together: Config = config
    names: list[str] = []
    for single in (True, False):
        for name, group, values in steps:
            if name == "--checkpoint-in-cpu" and device_type == "cpu":
                continue
            section = getattr(config if single else together, group)
            key, value = next(iter(values.items()))
            if getattr(section, key) == value or (key == "zero_stage" and section.zero_stage > value):
                continue
            changed = replace(config if single else together, **{group: replace(section, **values)})
            try:
                check_values(changed)
                check_block_runs(changed, layout)
            except ValueError:
                continue
            if not single:
                names = [n for n in names if n.split()[0] != name.split()[0]] + [name]
                together = changed
            yield name if single else " ".join(names), changed
