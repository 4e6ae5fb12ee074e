"""Bytes that a block keeps for its backward: measured, predicted from a trace, and by a paper's formula."""

import gc

import torch

from megazero.command.rehearsal.allocated import Allocated
from megazero.engine.model.layers.context import DeviceBatch, MicroBatchInfo
from megazero.engine.plan.layout.layers import Use
from megazero.engine.plan.layout.topology import Layout
from megazero.engine.plan.program.operations import Forward, Keep
from megazero.engine.step.engine import Engine
from megazero.flags.config import BYTES, Config
from megazero.planner.sizes import kept_input_bytes
from megazero.planner.trace.trace import trace_block


def kept_by_a_block(engine: Engine) -> list[int]:
    """Bytes of each tensor that the first block keeps between its forward and its backward, ascending.

    Counted as storages that are alive after the forward, the block's output and its weights left out; of an arena, the
    slots that are taken.
    """
    training, model, run = engine.config.training, engine.config.model, engine.interpreter
    ids = torch.zeros(training.micro_batch_size, model.seq_length, dtype=torch.long, device=run.activation.device)
    tokens = MicroBatchInfo.of(ids, tuple(range(len(ids))), engine.model.stream, training=True)
    engine.begin()
    step = engine.program(engine.config.parallel.pipeline_schedule, 1)
    block = next(name for name, layer in engine.spec.layers.items() if layer.use is Use.LAYER)
    ops = [op for op in step.gradients if isinstance(op, (Keep, Forward)) and op.layer == block]
    keeps = engine.spec.recompute
    if keeps:
        run.kept.begin(sum(isinstance(op, Keep) and op.slot is not None for op in ops))
    run.micro_batches = [DeviceBatch(ids, ids, ids, tokens)]
    with Allocated(run.activation.device) as allocated, torch.no_grad():
        run.x[0] = torch.randn(run.activation.shape, device=run.activation.device).to(run.activation.dtype)
        run.execute(ops)
        gc.collect()
        number = torch.zeros((), device=run.activation.device)
        for _ in range(4):  # gloo's threads may hold a tensor a moment after it was waited for: until their next work
            engine.mesh.tp.all_reduce_(number)
        weights = [unit.weights.unsharded for unit in engine.zero.units.values()]
        slots = run.kept.slots.slots if keeps else []
        but = [number, run.x[0], *slots, *(whole for whole in weights if whole is not None)]
        sizes = allocated.sizes(but=but)
        sizes += [run.kept.slots.slot_bytes for op in ops if isinstance(op, Keep) and op.slot is not None]
    return sorted(sizes)


def block_saves(config: Config, layout: Layout, device_type: str) -> list[int]:
    """Predict the same from a trace, on the device alone: kept inputs may be on the host."""
    activations = config.activations
    if activations.recompute == "full":
        return [] if activations.checkpoint_in_cpu else [kept_input_bytes(config, layout)]
    traced = trace_block(config, layout, device_type)
    return sorted([traced.saved_input, *traced.saved])


def korthikanti(config: Config, layout: Layout) -> float:
    """Bytes a block by table 2 of "Reducing Activation Recomputation in Large Transformer Models" (2022).

    Its model is Megatron's, with dropout masks of a byte, and with softmax, its dropout and that one's mask kept. The
    paper has it for 16 bit: there this is sbh (10 + 24 / t + 5 a s / (h t)) and so on.
    """
    model, tp, w = config.model, layout.tp, BYTES[config.training.precision]
    s, h, n = model.seq_length, model.hidden_size, model.num_attention_heads
    sbh, recompute = s * config.training.micro_batch_size * h, config.activations.recompute
    stream = tp if config.parallel.sequence_parallel else 1
    if recompute == "full":
        return w * sbh / stream
    scores = (2 * w + 1) * n * s / h / tp if recompute == "none" else 0.0
    return sbh * ((4 * w + 2) / stream + 12 * w / tp + scores)
