"""Refuse a run that cannot fit, before anything is allocated. Pure: what there is comes as arguments.

Two steps: a lower bound in closed form, which counts layers by kind, so that absurd sizes are
refused at once; then the estimate, which walks the whole iteration. Both count less than a process takes (no kernel
scratch, no libraries), so what they refuse would fail.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from megazero.config.schema import BYTES, Config
from megazero.config.validate import check_values
from megazero.memory.host import Available, Machine
from megazero.model.stage import declare
from megazero.plan.parameters import unit_layout
from megazero.plan.resolve import check_block_runs
from megazero.plan.topology import Layout
from megazero.plan.zero_policy import ZeroPolicy
from megazero.price.estimate import estimate, state_bytes
from megazero.price.saved_activations import block_input, block_saves, stage_activations
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
    for count in (lower_bound, estimated):
        problem = _problem(config, layout, rank, machine, count)
        if problem is not None:
            raise ValueError(f"{problem}; {_way_out(config, layout, rank, machine)}")


def lower_bound(config: Config, layout: Layout, rank: int, device_type: str) -> Needs:
    """Return what a rank needs at least, at a cost that does not depend on the number of micro-batches.

    Parameters and optimizer states, and the larger of the gradients (held at the end of an iteration) and of the
    activations and logits of one micro-batch (held at the end of its forward pass; gpipe holds all micro-batches).
    """
    training, model, stage = config.training, config.model, layout.coord(rank).pp
    w, g = BYTES[training.precision], BYTES[training.grad_dtype]
    layers = declare(model, layout.tp)
    held = Counter(layers.kinds[name].name for name in layers.units(layout, stage))
    total = sum(
        count * unit_layout(layers.kinds[name].params, layout.sizes, layout.shard).numel for name, count in held.items()
    )
    blocks = sum(count for name, count in held.items() if layers.kinds[name].end is None)
    policy = ZeroPolicy.for_stage(config.zero, layout.shard)
    owned = total // layout.shard if policy.optimizer else total
    needs = {
        "parameters": (owned if policy.parameters else total) * w,
        "optimizer": owned * state_bytes(training.precision, config.trains)[1],
    }
    trains = config.trains and not training.freeze_parameters  # layers before the first trained one keep nothing
    live = config.micro_batches(layout.dp) if config.parallel.pipeline_schedule == "gpipe" else 1
    gradients = owned * g * trains
    saved = block_input(config, layout)
    if saved < MOST_TRACED:
        saved = sum(block_saves(config, layout, device_type))
    kept = live * blocks * saved * trains
    logits = 0
    if stage == layout.last_pp:
        logits = training.micro_batch_size * model.seq_length * model.vocab_size * w // layout.tp
    if gradients >= kept + logits:
        needs["gradients"] = gradients
    else:
        needs |= {"activations": kept, "logits": logits}
    return Needs(needs, 0)


def estimated(config: Config, layout: Layout, rank: int, device_type: str) -> Needs:
    """Return the estimate of what a rank needs: the peak of the engine, or what it holds after a forward pass."""
    training = config.training
    # A few rounds of the pipeline are enough: only gpipe holds more for more micro-batches, which `lower_bound` counts.
    samples = (
        min(config.micro_batches(layout.dp), 4 * layout.pp * layout.chunks) * training.micro_batch_size * layout.dp
    )
    config = replace(config, training=replace(training, global_batch_size=samples))
    memory = estimate(config, layout, rank, needs_staging_buffer=device_type == "cpu").memory
    at_rest = {kind: memory[kind] for kind in ("parameters", "optimizer")}
    activations = 0 if training.freeze_parameters else stage_activations(config, layout, rank, device_type)
    # Held together with the activations: the logits, but under full recompute, which starts when they are gone.
    logits = 0 if config.activations.recompute == "full" else memory["logits"]
    others = memory["peak"] - sum(at_rest.values())
    if activations + logits > others:
        return Needs(at_rest | {"activations": activations, "logits": logits}, memory["host"])
    kinds = {kind: memory[kind] for kind in ("gradients", "activation_checkpoints", "logits", "buffers")}
    largest = max(kinds, key=lambda kind: kinds[kind])
    return Needs(at_rest | {f"{largest} and others": others}, memory["host"])


Count = Callable[[Config, Layout, int, str], Needs]


def _problem(config: Config, layout: Layout, rank: int, machine: Machine, count: Count) -> str | None:
    @functools.cache
    def of_stage(stage: int) -> Needs:  # all ranks of a stage need the same
        return count(config, layout, layout.stage_ranks(stage)[0], machine.device_type)

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
        return all(_problem(changed, layout, rank, machine, count) is None for count in (lower_bound, estimated))

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
    least, most, even = 0, config.model.num_layers, replace(layout, split=())
    while least < most:
        middle = (least + most + 1) // 2
        layers = max(middle, layout.pp * layout.chunks)
        changed = replace(config, model=replace(config.model, num_layers=layers))
        if _problem(changed, even, rank, machine, lower_bound) is None:
            least = middle
        else:
            most = middle - 1
    return least


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
