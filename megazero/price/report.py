"""The table of a run's estimated memory and traffic, printed before it starts. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from megazero.config.batch_sizes import micro_batches
from megazero.config.schema import BYTES, Config
from megazero.model.stage import declare
from megazero.plan.layers import non_block_costs, stage_units
from megazero.plan.operations import Backward, BackwardWeights
from megazero.plan.parameters import unit_layout
from megazero.plan.program import program
from megazero.plan.rank_spec import rank_spec
from megazero.plan.schedules import SCHEDULES
from megazero.plan.split import rank_costs
from megazero.plan.topology import Layout
from megazero.plan.zero_policy import ZeroPolicy
from megazero.price.estimate import estimate, state_bytes
from megazero.price.saved_activations import stage_activations
from megazero.price.trace import trace_layers


class Row(NamedTuple):
    """A kind of memory or traffic of one rank."""

    kind: str
    num_bytes: int
    formula: str  # Psi: elements of the rank's units, padding included; N: the ranks that share a copy of them


def report_rows(config: Config, layout: Layout, rank: int = 0, needs_staging_buffer: bool = True) -> list[Row]:
    """List every kind of memory, then of traffic of an iteration; `needs_staging_buffer` as in `estimate`."""
    memory, traffic = estimate(config, layout, rank, needs_staging_buffer)
    formulas = _memory_formulas(config, layout) | _traffic_formulas(config, layout)
    computed = stage_activations(config, layout, rank, "cpu" if needs_staging_buffer else "cuda")
    memory = {"activations": computed} | memory
    rows = [Row(kind, num_bytes, formulas[kind]) for kind, num_bytes in memory.items()]
    return rows + [
        Row(f"{kind} traffic", num_bytes, formulas[f"{kind} traffic"]) for kind, num_bytes in traffic.items()
    ]


def psi(config: Config, layout: Layout, rank: int = 0) -> int:
    """Elements of the units that a rank's pipeline stage holds, padding included, on its tensor-parallel part."""
    units = stage_units(declare(config.model, layout.tp), layout, layout.coord(rank).pp)
    return sum(unit_layout(specs, layout.sizes, layout.shard).numel for specs in units.values())


def _memory_formulas(config: Config, layout: Layout) -> dict[str, str]:
    training, policy = config.training, ZeroPolicy.for_stage(config.zero, layout.shard)
    w, g, n = BYTES[training.precision], BYTES[training.grad_dtype], f" / {layout.shard}"
    _, states = state_bytes(training.precision, config.trains)
    activations, full = config.activations, config.activations.recompute == "full"
    parts = f" / {layout.tp}" * (activations.partition_activations or config.parallel.sequence_parallel)
    kept = f"{w} b s h{parts} for each block and micro-batch in flight" * full
    arenas = ", arenas" * activations.contiguous_checkpointing
    return {
        "activations": "kept by the one block that is computed again" if full else "kept by all blocks in flight",
        "parameters": f"{w} Psi{n * policy.parameters}",
        "optimizer": f"{states} Psi{n * policy.optimizer}" if states else "",
        "gradients": f"{g} Psi{n * policy.optimizer}" * config.trains,
        "activation_checkpoints": "" if activations.checkpoint_in_cpu else kept,
        "buffers": f"arena of gathered weights, buckets, gradients being made, messages, rotary tables{arenas}",
        "logits": f"{w} b s v / tp",
        "peak": "the most at one instant of all of these but activations",
        "host": f"{kept}, in host memory" if activations.checkpoint_in_cpu else "",
    }


def _traffic_formulas(config: Config, layout: Layout) -> dict[str, str]:
    training, policy = config.training, ZeroPolicy.for_stage(config.zero, layout.shard)
    w, g, m = BYTES[training.precision], BYTES[training.grad_dtype], config.micro_batches(layout.dp)
    reduced = f"{m} x {g}" if policy.gradients else f"{g}"
    if not policy.optimizer:
        dp = f"2 x {g} Psi"
    elif not policy.parameters:
        dp = f"({reduced} + {w}) Psi"
    else:
        gathers = "1" if policy.gathers_once else f"up to 2 x {m}"
        dp = f"({gathers} x {w} + {reduced}) Psi"
    replicas = f" + 2 x {g} Psi / {layout.shard} x ({layout.replica}-1)/{layout.replica}" if layout.replica > 1 else ""
    return {
        "dp traffic": f"{dp} x (N-1)/N, N = {layout.shard}{replicas}",
        "tp traffic": "activations and losses",
        "pp traffic": "messages, tied table",
        "control traffic": "norms, losses, counts",
    }


def partition_line(config: Config, layout: Layout, rank: int = 0) -> str:
    """Describe the memory that --partition-activations saves and the traffic it costs; empty without it."""
    activations = config.activations
    if not activations.partition_activations:
        return ""
    plain = replace(config, activations=replace(activations, partition_activations=False))
    kept = "host" if activations.checkpoint_in_cpu else "activation_checkpoints"
    ours, whole = (estimate(c, layout, rank) for c in (config, plain))
    saved, sent = whole.memory[kept] - ours.memory[kept], whole.traffic["tp"]
    extra = ours.traffic["tp"] - sent
    place = "host memory" if activations.checkpoint_in_cpu else "memory"
    return (
        f"--partition-activations: {saved:,} bytes of checkpoints less in this rank's {place}, for {extra:,} bytes "
        f"more sent an iteration (an all-gather of b s h a block and micro-batch): {extra / sent:.1%} of what tensor "
        "parallelism sends"
    )


def split_line(config: Config, layout: Layout) -> str:
    """The layers of every virtual stage where they are uneven, and why; empty where they are even."""
    if not layout.split:
        return ""
    outer = non_block_costs(declare(config.model, layout.tp), config.model, config.activations)
    costs = rank_costs(layout.split, layout.placement, outer)
    return (
        f"layers per virtual stage: {','.join(map(str, layout.split))}; the head computes as much as "
        f"{outer.head:.1f} blocks, so that pipeline ranks compute "
        f"{', '.join(f'{cost:.1f}' for cost in costs)} (--pipeline-split has other layers)"
    )


def most_queued(config: Config, layout: Layout) -> int:
    """The most bytes that weight gradients which wait keep at one instant, on the pipeline rank that keeps most."""
    most = 0
    for stage in range(layout.pp):
        spec, costs = rank_spec(config, layout, stage, declare), trace_layers(config, layout, stage)
        now = 0
        for op in program(spec, config.schedule, config.micro_batches(layout.dp)).gradients:
            if isinstance(op, Backward) and not op.weights:
                now += costs[op.layer].queued
                most = max(most, now)
            elif isinstance(op, BackwardWeights):
                now -= costs[op.layer].queued
    return most


def padding_words(config: Config, layout: Layout) -> str:
    """Name the samples of an iteration that are padding; empty where none is."""
    padding = config.padding(layout.dp)
    return f", {padding} of {config.training.global_batch_size + padding} samples padding" if padding else ""


def padding_warning(config: Config, layout: Layout) -> str:
    """Name the data-parallel ranks that compute padding alone; empty where there are none."""
    training = config.training
    real = micro_batches(training.global_batch_size, training.micro_batch_size, 1)
    if real >= layout.dp:
        return ""
    return (
        f"{layout.dp - real} of {layout.dp} data-parallel ranks compute padding alone: --global-batch-size "
        f"{training.global_batch_size} is {real} x --micro-batch-size {training.micro_batch_size}"
    )


def queue_line(config: Config, layout: Layout) -> str:
    """Describe bytes that queued weight gradients keep and full recompute does not free; empty without a queue."""
    parallel = config.parallel
    queued = most_queued(config, layout) if SCHEDULES[parallel.pipeline_schedule].backlog else 0
    if not queued:
        return ""
    line = (
        f"--pipeline-schedule {parallel.pipeline_schedule}: weight gradients that wait keep up to {queued:,} bytes of "
        "a rank's buffers"
    )
    if config.activations.recompute != "full":
        return line
    return (
        f"warning: {line}, which --recompute full would free under another schedule; bound the micro-batches that wait "
        "with --zero-bubble-backlog 1, or use --pipeline-schedule 1f1b"
    )


def table(config: Config, layout: Layout, rank: int = 0, needs_staging_buffer: bool = True) -> str:
    """Format `report_rows` as text."""
    head = f"bytes of rank {rank} by estimate; Psi = {psi(config, layout, rank):,} elements"
    rows = [
        f"  {row.kind:<24}{row.num_bytes:>20,}   {row.formula}".rstrip()
        for row in report_rows(config, layout, rank, needs_staging_buffer)
    ]
    notes = [split_line(config, layout), queue_line(config, layout), partition_line(config, layout, rank)]
    return "\n".join([head, *rows, *filter(None, notes)])
