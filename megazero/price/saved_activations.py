"""Bytes of activations that blocks keep for their backward, as traced (`price.trace`)."""

from __future__ import annotations

from megazero.config.schema import BYTES, Config
from megazero.model.stage import declare
from megazero.plan.flat_layout import partition_numel
from megazero.plan.layers import Use
from megazero.plan.operations import Backward, Forward
from megazero.plan.program import program
from megazero.plan.rank_spec import rank_spec
from megazero.plan.topology import Layout
from megazero.price.trace import trace_block


def block_input(config: Config, layout: Layout) -> int:
    """Bytes of a block's input on a rank: its part of the residual stream."""
    model, training = config.model, config.training
    tokens = training.micro_batch_size * model.seq_length
    rows = tokens // layout.tp if config.parallel.sequence_parallel else tokens
    return rows * model.hidden_size * BYTES[training.precision]


def block_saves(config: Config, layout: Layout, device_type: str) -> list[int]:
    """Bytes of each tensor that a block keeps on the device from its forward to its backward, for one micro-batch.

    Under full recompute that is its input: partitioned over tp with Pa, none of it where it is kept on the host.
    """
    activations = config.activations
    if activations.recompute != "full":
        cost = trace_block(config, layout, device_type)
        return sorted([cost.saved_input, *cost.saved])
    if activations.checkpoint_in_cpu:
        return []
    whole, each = block_input(config, layout), BYTES[config.training.precision]
    return [partition_numel(whole // each, layout.tp) * each if activations.partition_activations else whole]


def recomputed_bytes(config: Config, layout: Layout, device_type: str) -> int:
    """Bytes that a block under full recompute keeps once its forward has run again.

    Its input is the kept one, and counted there, unless Pa has gathered it.
    """
    cost = trace_block(config, layout, device_type)
    return sum(cost.saved) + cost.saved_input * config.activations.partition_activations


def stage_activations(config: Config, layout: Layout, rank: int, device_type: str) -> int:
    """Return the peak of the bytes that the blocks of a rank save, inputs kept for recompute excluded.

    Of all blocks and micro-batches in flight; under full recompute, of the one block that is being computed again.
    """
    if config.activations.recompute == "full":
        return recomputed_bytes(config, layout, device_type)
    stage, micro_batches = layout.coord(rank).pp, config.micro_batches(layout.dp)
    spec = rank_spec(config, layout, stage, declare)
    live = peak = 0
    for op in program(spec, config.schedule, micro_batches).gradients:
        if isinstance(op, (Forward, Backward)) and spec.layers[op.layer].use is Use.LAYER:
            live += op.graph if isinstance(op, Forward) else -1
            peak = max(peak, live)
    return peak * sum(block_saves(config, layout, device_type))
