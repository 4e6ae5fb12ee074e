"""The table of a run's estimated memory and traffic, printed before it starts. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from megazero.config.batch_sizes import micro_batches
from megazero.config.schema import Config
from megazero.model.stage import declare
from megazero.plan.layers import layer_costs
from megazero.plan.schedules import SCHEDULES
from megazero.plan.sizes import Rates, States
from megazero.plan.split import rank_costs
from megazero.plan.topology import Layout
from megazero.price.estimate import StageBytes, stage_bytes


class Row(NamedTuple):
    """A kind of memory or traffic of one rank."""

    kind: str
    num_bytes: int
    formula: str  # Psi: elements of the rank's units, padding included; N: the ranks that share a copy of them


def report_rows(config: Config, layout: Layout, device_type: str = "cpu") -> list[Row]:
    """List every kind of memory, then of traffic of an iteration, of rank 0."""
    found = stage_bytes(config, layout, 0, device_type)
    formulas = _memory_formulas(config, layout) | _traffic_formulas(config, layout, found)
    numbers = {"activations": found.activations} | found.memory
    numbers |= {f"{kind} traffic": num_bytes for kind, num_bytes in found.traffic.items()}
    return [Row(kind, num_bytes, formulas[kind]) for kind, num_bytes in numbers.items()]


def psi(config: Config, layout: Layout, device_type: str = "cpu") -> int:
    """Elements of the units that rank 0 computes with, padding included, on its tensor-parallel part."""
    return stage_bytes(config, layout, 0, device_type).numel


def _memory_formulas(config: Config, layout: Layout) -> dict[str, str]:
    states, w = States.of(config, layout), Rates.of(config).weights
    activations, full = config.activations, config.activations.recompute == "full"
    parts = f" / {layout.tp}" if activations.partition_activations or config.parallel.sequence_parallel else ""
    kept = f"{w} b s h{parts} for each block and micro-batch in flight" if full else ""
    arenas = ", arenas" if activations.contiguous_checkpointing else ""
    again = "the one block that is computed again, and the ends" if full else "all layers in flight"
    return {
        "activations": f"kept by autograd for {again}",
        "parameters": str(states.parameters),
        "optimizer": str(states.optimizer) if states.optimizer.each else "",
        "gradients": str(states.gradients) if states.gradients.each else "",
        "activation_checkpoints": "" if activations.checkpoint_in_cpu else kept,
        "buffers": f"arena of gathered weights, buckets, gradients being made, messages, rotary tables{arenas}",
        "logits": f"{w} b s v / tp",
        "peak": "the most at one instant of all of these but activations",
        "host": f"{kept}, in host memory" if activations.checkpoint_in_cpu else "",
    }


def _traffic_formulas(config: Config, layout: Layout, found: StageBytes) -> dict[str, str]:
    """Write traffic along dp as the number of times that a step gathers and reduces each element, and its bytes."""
    rates, states, (least, most) = Rates.of(config), States.of(config, layout), found.gathers
    terms = []
    if most:
        terms.append(f"{'up to ' if least < most else ''}{_times(most, rates.weights)}")
    if found.reductions:
        terms.append(_times(found.reductions, rates.gradients))
    replicas = ""
    if layout.replica > 1 and found.reductions:
        replicas = f" + 2 x {states.gradients} x ({layout.replica}-1)/{layout.replica}"
    each = f"({' + '.join(terms)})" if len(terms) > 1 else "".join(terms)
    dp = f"{each} Psi x (N-1)/N, N = {layout.shard}{replicas}" if terms else ""
    return {
        "dp traffic": dp,
        "tp traffic": "activations and losses",
        "pp traffic": "messages, tied table",
        "control traffic": "norms, losses, counts",
    }


def _times(number: int, num_bytes: int) -> str:
    return f"{number} x {num_bytes}" if number > 1 else f"{num_bytes}"


def partition_line(config: Config, layout: Layout, device_type: str = "cpu") -> str:
    """Describe the memory that --partition-activations saves and the traffic it costs; empty without it."""
    activations = config.activations
    if not activations.partition_activations:
        return ""
    plain = replace(config, activations=replace(activations, partition_activations=False))
    kept = "host" if activations.checkpoint_in_cpu else "activation_checkpoints"
    ours, whole = (stage_bytes(c, layout, 0, device_type) for c in (config, plain))
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
    known = layer_costs(declare(config.model, layout.tp), config.model, config.activations)
    costs = rank_costs(layout.split, layout.placement, known)
    return (
        f"layers per virtual stage: {','.join(map(str, layout.split))}; the head computes as much as "
        f"{known.head:.1f} blocks, so that pipeline ranks compute "
        f"{', '.join(f'{cost:.1f}' for cost in costs)} (--pipeline-split has other layers)"
    )


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


def queue_line(config: Config, layout: Layout, device_type: str = "cpu") -> str:
    """Describe bytes that queued weight gradients keep and full recompute does not free; empty without a queue."""
    parallel = config.parallel
    queued = 0
    if SCHEDULES[parallel.pipeline_schedule].backlog:
        queued = max(stage_bytes(config, layout, stage, device_type).queued for stage in range(layout.pp))
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


def table(config: Config, layout: Layout, device_type: str = "cpu") -> str:
    """Format `report_rows` as text."""
    head = f"bytes of rank 0 by estimate; Psi = {psi(config, layout, device_type):,} elements"
    rows = [
        f"  {row.kind:<24}{row.num_bytes:>20,}   {row.formula}".rstrip()
        for row in report_rows(config, layout, device_type)
    ]
    lines = (split_line(config, layout), queue_line(config, layout, device_type))
    notes = [*lines, partition_line(config, layout, device_type)]
    return "\n".join([head, *rows, *filter(None, notes)])
