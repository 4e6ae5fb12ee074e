"""Activations that a block saves from its forward for its backward: one row per tensor, exact. Pure.

Beside it stands Korthikanti et al.'s formula (2022), which says what Megatron keeps.

Shapes: b micro-batch, s sequence, T = b s tokens, T' those of the residual stream on this rank (T / tp with sequence
parallelism, else T), h hidden, n heads, f ffn; /tp = this rank's part.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from megazero.config.schema import BYTES, Config
from megazero.model.attention import Backend, attention_backend
from megazero.plan.flat_layout import partition_numel
from megazero.plan.operations import Backward, Forward
from megazero.plan.program import program
from megazero.plan.rank_spec import rank_spec
from megazero.plan.topology import Layout
from megazero.plan.zero_policy import Use


class Saved(NamedTuple):
    """A tensor that a block keeps."""

    name: str
    shape: tuple[int, ...]
    item_bytes: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes


def block_saves(config: Config, layout: Layout, device_type: str) -> list[Saved]:
    """List what one block saves for one micro-batch on its device, between forward and backward.

    Under full recompute: the block's input, or a part of it, or nothing on the device (Pa+cpu). During its recompute a
    block saves `computed_saves`.
    """
    activations, w = config.activations, BYTES[config.training.precision]
    if activations.recompute != "full":
        return computed_saves(config, layout, device_type)
    if activations.checkpoint_in_cpu:
        return []
    rows, hidden = _stream_rows(config, layout), config.model.hidden_size
    if activations.partition_activations:
        return [Saved("block input, partitioned", (partition_numel(rows * hidden, layout.tp),), w)]
    return [Saved("block input", (rows, hidden), w)]


def _stream_rows(config: Config, layout: Layout) -> int:
    """T'."""
    tokens = config.training.micro_batch_size * config.model.seq_length
    return tokens // layout.tp if config.parallel.sequence_parallel else tokens


def computed_saves(config: Config, layout: Layout, device_type: str) -> list[Saved]:
    """List computed tensors that a block saves, without those that selective recompute recomputes.

    A norm's statistics are in fp32 or fp64, on a CPU in the weights' own type. Dropout saves nothing: its masks are
    recomputed.
    """
    model, training, tp = config.model, config.training, layout.tp
    b, s, h, w = training.micro_batch_size, model.seq_length, model.hidden_size, BYTES[training.precision]
    tokens, rows = b * s, _stream_rows(config, layout)
    heads, ffn = model.num_attention_heads // tp, model.ffn_size // tp
    statistic, wide = w if device_type == "cpu" else max(4, w), max(4, w)
    keeps = config.activations.recompute != "selective"

    def norm(number: int) -> list[Saved]:
        name = f"norm{number}"
        found = [Saved(f"{name} input", (rows, h), w)]
        found += [Saved(f"{name} {which}", (rows, 1), statistic) for which in ("mean", "rstd")]
        return found + [Saved(f"{name} output", (rows, h), w)] * keeps

    found = [*norm(1), Saved("queries, keys, values", (tokens, 3 * h // tp), w)]
    if attention_backend(device_type, training.precision, model.attention_dropout > 0) is Backend.FUSED:
        found.append(Saved("attention log-sum-exp", (b, heads, s), wide))
    elif keeps:
        found.append(Saved("attention weights", (b, heads, s, s), w))
    found += [Saved("attention output", (tokens, h // tp), w), *norm(2), Saved("GELU input", (tokens, ffn), w)]
    return found + [Saved("GELU output", (tokens, ffn), w)] * keeps


def saved_bytes(saves: list[Saved]) -> int:
    return sum(saved.num_bytes for saved in saves)


def stage_activations(config: Config, layout: Layout, rank: int, device_type: str) -> int:
    """Return the peak of the bytes that the blocks of a rank save, inputs kept for recompute excluded.

    Without full recompute all blocks and micro-batches in flight count; with it, only the block being recomputed: its
    input is the kept one, unless Pa has gathered it.
    """
    if config.activations.recompute == "full":
        found = computed_saves(config, layout, device_type)
        return saved_bytes(found[0 if config.activations.partition_activations else 1 :])
    stage, micro_batches = layout.coord(rank).pp, config.micro_batches(layout.dp)
    spec = rank_spec(config, layout, stage)
    live = peak = 0
    for op in program(spec, config.parallel.pipeline_schedule, micro_batches).gradients:
        if isinstance(op, (Forward, Backward)) and spec.layers[op.layer].use is Use.LAYER:
            live += op.graph if isinstance(op, Forward) else -1
            peak = max(peak, live)
    return peak * saved_bytes(block_saves(config, layout, device_type))


def korthikanti(config: Config, layout: Layout) -> float:
    """Bytes per block by table 2 of "Reducing Activation Recomputation in Large Transformer Models" (2022).

    Its model is Megatron's, with dropout masks of a byte, and with softmax, its dropout and that one's mask kept. The
    paper has it for 16 bit: there this is sbh (10 + 24 / t + 5 a s / (h t)) and so on.
    """
    model, tp, w = config.model, layout.tp, BYTES[config.training.precision]
    s, h, n = model.seq_length, model.hidden_size, model.num_attention_heads
    sbh, recompute = s * config.training.micro_batch_size * h, config.activations.recompute
    shards = tp if config.parallel.sequence_parallel else 1
    if recompute == "full":
        return w * sbh / shards
    scores = (2 * w + 1) * n * s / h / tp if recompute == "none" else 0.0
    return sbh * ((4 * w + 2) / shards + 12 * w / tp + scores)
