"""Activations that a block of GPT-2 saves from its forward for its backward: one row per tensor, in closed form.

An independent witness for `planner.trace.trace`, which runs the block instead.

Shapes: b micro-batch, s sequence, T = b s tokens, T' those of the residual stream on this rank (T / tp with sequence
parallelism, else T), h hidden, n heads, f ffn; /tp = this rank's part.
"""

import math
from typing import NamedTuple

from megazero.engine.model.layers.fused_attention import is_attention_fused
from megazero.engine.plan.layout.flat_layout import partition_numel
from megazero.engine.plan.layout.topology import Layout
from megazero.flags.config import BYTES, Config


class Saved(NamedTuple):
    """A tensor that a block keeps."""

    name: str
    shape: tuple[int, ...]
    item_bytes: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes


def block_saves(config: Config, layout: Layout, device_type: str) -> list[Saved]:
    """List the tensors that one block saves for one micro-batch on its device, between forward and backward.

    Under full recompute all that is kept is the block's input, or a part of it, or nothing here (Pa+cpu); while the
    block is computed again, it is `computed_saves`.
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

    A norm's statistics are in fp32 or fp64, on a CPU in the weights' own type. Dropout keeps nothing: masks are made
    again.
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
    if is_attention_fused(device_type, training.precision, model.attention_dropout > 0):
        found.append(Saved("attention log-sum-exp", (b, heads, s), wide))
    elif keeps:
        found.append(Saved("attention weights", (b, heads, s, s), w))
    found += [Saved("attention output", (tokens, h // tp), w), *norm(2), Saved("GELU input", (tokens, ffn), w)]
    return found + [Saved("GELU output", (tokens, ffn), w)] * keeps
